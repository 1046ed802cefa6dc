"""Focused linear attention of the FLatten Transformer."""

import jax
import jax.numpy as jnp

from lowrank_attn import ops
from lowrank_attn.features.focused import check_power, focus
from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.depthwise import check_kernel, depthwise, init_depthwise


def flatten(
    power: float = 3.0,
    kernel_size: int = 5,
    grid_width: int | None = None,
    delta: float = 1e-6,
) -> AttentionMethod:
    """Linear attention with focused features, plus a depthwise convolution of the values.

        u = (relu(x) + 1e-6) / softplus(scale),  phi(x) = |u| u^power / |u^power|
        y_t = sum_s phi(q_t) . phi(k_s) v_s / (delta + sum_s phi(q_t) . phi(k_s)) + conv(v)_t

    The norms run over the channels of all heads together. The convolution is 1-D over the sequence,
    ending with the token itself if causal, or 2-D over an image. The value size P must be D. A
    query that sees no key gives the bias of the convolution.

    Trainable leaves: `scale` [H, D], shared by q and k, initialised 0; `conv`, [H, D, 1,
    kernel_size] or on a grid [H, D, kernel_size, kernel_size], uniform; `conv_bias` [H, D], zeros.

    Args:
        power: element-wise, >= 1.
        kernel_size: odd; of the convolution, in tokens or in pixels each way.
        grid_width: width of the image whose pixels the tokens are, row by row; None: a sequence.
        delta: > 0; the authors' code adds 1e-6 to the mean of T scores, so its delta is T 1e-6,
            which matters to queries that are orthogonal to nearly all keys.

    Raises:
        ValueError: if an argument is out of range, or, from `apply`, if shapes do not fit, or a
            grid is to be causal or packed.

    Source: FLatten Transformer (Han et al., arXiv 2308.00442), as in its code, which has images
    only, one convolution kernel for all heads, and learned positions on the keys, which are the
    caller's here.
    """
    check_power(power)
    check_kernel(kernel_size, grid_width)
    if delta <= 0:
        raise ValueError(f"delta={delta}, expected a number > 0, such as 1e-6.")

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        conv = init_depthwise(key, D, H, kernel_size, grid_width)
        return {"scale": jnp.zeros((H, D)), **conv}, {}

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
        G = q.shape[2] // k.shape[2]

        def features(x, repeats):
            scale = jnp.repeat(params["scale"], repeats, axis=0).reshape(-1)
            flat = focus(x.reshape(*x.shape[:2], -1), scale, power)
            return flat.reshape(x.shape).astype(x.dtype)

        attend = ops.causal if causal else ops.bidirectional
        y, _ = attend(
            features(q, G),
            features(k, 1),
            v,
            normalize="sum",
            epsilon=delta,
            mask=mask,
            segment_ids=segment_ids,
        )
        local = depthwise(
            params,
            v,
            num_queries=q.shape[1],
            causal=causal,
            mask=mask,
            segment_ids=segment_ids,
            grid_width=grid_width,
        )
        return (y.astype(jnp.float32) + jnp.repeat(local, G, axis=2)).astype(v.dtype)

    return AttentionMethod(init=init, apply=apply)
