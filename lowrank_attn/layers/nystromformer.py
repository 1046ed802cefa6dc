"""Nystromformer: softmax attention through landmarks."""

import jax
import jax.numpy as jnp

from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.landmarks import flat_heads, grouped_heads, iterated_inverse
from lowrank_attn.layers.visibility import check_same_tokens, masked_softmax, precision_for


def nystromformer(
    num_landmarks: int = 64,
    conv_size: int | None = 35,
    num_iterations: int = 6,
    shared_start: bool = False,
) -> AttentionMethod:
    """Nystrom approximation of softmax attention, in time linear in T.

        y = softmax(q kl^T) pinv(softmax(ql kl^T)) softmax(ql k^T) v + conv(v)

    with q and k divided by D^(1/4), and landmarks ql, kl the means of N contiguous segments of the
    real tokens, of equal size or one apart. With fewer than N real tokens each is a landmark.
    All in float32 with float32 matrix products for float32 inputs.

    Args:
        num_landmarks: N >= 1.
        conv_size: taps of a depthwise convolution over the real values, centred, odd; one filter
            for each key/value head (`conv` [H, K], trained, initialised uniformly within
            K^(-1/2)). None: no convolution.
        num_iterations: steps towards the pseudo-inverse; see `layers.landmarks`.
        shared_start: whether these start from a number of the whole batch, as public code does,
            which makes a row's output depend on the other rows. For published checkpoints.

    Raises:
        ValueError: if a number is out of range, or, when called, for unequal T and S.

    Source: Nystromformer (arXiv 2102.03902), equations 9 to 12. Public code needs N to divide T and
    averages padding into landmarks.
    """
    if num_landmarks < 1:
        raise ValueError(f"num_landmarks={num_landmarks}, expected at least 1; 64 is usual.")
    if conv_size is not None and (conv_size < 1 or conv_size % 2 == 0):
        raise ValueError(f"conv_size={conv_size}, expected an odd number >= 1, or None.")
    if num_iterations < 1:
        raise ValueError(f"num_iterations={num_iterations}, expected at least 1; 6 is usual.")

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        if conv_size is None:
            return {}, {}
        bound = conv_size**-0.5
        return {"conv": jax.random.uniform(key, (H, conv_size), minval=-bound, maxval=bound)}, {}

    def apply(
        params: Params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        del causal, segment_ids
        check_same_tokens(q, k, "landmarks are means over the real tokens of both")
        B, T, _, D = q.shape
        real = jnp.ones((B, T), bool) if mask is None else mask.astype(bool)
        segment, counts = _segments(real, num_landmarks)
        dtype, precision = v.dtype, precision_for(q, k, v)
        v = jnp.where(real[:, :, None, None], v, 0)
        q, k, v = grouped_heads(q, k, v)
        q, k = q * D**-0.25, k * D**-0.25

        with jax.default_matmul_precision(precision.name.lower()):
            member = (segment[..., None] == jnp.arange(num_landmarks)) & real[..., None]
            mean = member / jnp.maximum(counts, 1)[:, None]  # [B, T, N]
            ql, kl = (jnp.einsum("btn,bhgtd->bhgnd", mean, x) for x in (q, k))
            filled = (counts > 0)[:, None, None, None]  # [B, 1, 1, 1, N]
            to_landmarks = masked_softmax(q @ jnp.swapaxes(kl, -1, -2), filled)
            among = masked_softmax(ql @ jnp.swapaxes(kl, -1, -2), filled)
            among = among * jnp.swapaxes(filled, -1, -2)
            visible = real[:, None, None, None]
            read = masked_softmax(ql @ jnp.swapaxes(k, -1, -2), visible) @ v
            inverse = iterated_inverse(among, num_iterations, shared_start)
            y = to_landmarks @ (inverse @ read)
            if conv_size is not None:
                y = y + _convolve(v[:, :, 0], params["conv"].astype(jnp.float32))[:, :, None]
        return flat_heads(y).astype(dtype)

    return AttentionMethod(
        init=init,
        apply=apply,
        no_causal="landmarks are means over early and late tokens, and each query reads them all",
        no_segments="landmarks are means over the whole row",
    )


def _segments(real: jax.Array, N: int) -> tuple[jax.Array, jax.Array]:
    """Split the real tokens of each row [B, T] into N segments: numbers [B, T], sizes [B, N]."""
    rank = jnp.cumsum(real, axis=1) - 1
    total = jnp.sum(real, axis=1, keepdims=True)
    segment = rank * N // jnp.maximum(total, N)
    counts = jnp.sum((segment[..., None] == jnp.arange(N)) & real[..., None], axis=1)
    return segment, counts


def _convolve(v: jax.Array, filters: jax.Array) -> jax.Array:
    """Filter v [B, H, T, P] along T by filters [H, K], centred, with zeros beyond the ends."""
    B, H, T, P = v.shape
    rows = jnp.moveaxis(v, 3, 1).reshape(B * P, H, T)
    y = jax.lax.conv_general_dilated(
        rows, filters[:, None], (1,), "SAME", feature_group_count=H,
    )  # fmt: skip
    return jnp.moveaxis(y.reshape(B, P, H, T), 1, 3)
