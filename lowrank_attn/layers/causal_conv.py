"""Depthwise causal convolution over a few tokens."""

import jax
import jax.numpy as jnp


def causal_conv(
    x: jax.Array,
    filters: jax.Array,
    segment: jax.Array | None = None,
    past: jax.Array | None = None,
) -> jax.Array:
    """Weigh each token and the K - 1 before it: y_t = sum_{j<K} filters[..., K - 1 - j] x_{t-j}.

    Args:
        x: [B, T, *C], zero at padding.
        filters: [*C, K], one filter per channel; the last weight is the token's own.
        segment: [B, T] int, documents counted from 0, across which nothing is read; None: one.
        past: [B, K - 1, *C], the tokens before the first one, in its document; None: zeros.

    Returns:
        [B, T, *C], float32.
    """
    B, T, *channels = x.shape
    K = filters.shape[-1]
    if past is None:
        past = jnp.zeros((B, K - 1, *channels), x.dtype)
    rows = jnp.concatenate([past.astype(x.dtype), x], axis=1).astype(jnp.float32)
    y = x.astype(jnp.float32) * filters[..., -1]
    for back in range(1, K):
        earlier = rows[:, K - 1 - back :][:, :T]
        if segment is not None:
            document = jnp.pad(segment, ((0, 0), (back, 0)))[:, :T]
            same = (document == segment).reshape(B, T, *[1] * len(channels))
            earlier = jnp.where(same, earlier, 0)
        y = y + earlier * filters[..., K - 1 - back]
    return y
