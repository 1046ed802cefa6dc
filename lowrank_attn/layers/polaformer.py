"""Polarity-aware linear attention of PolaFormer."""

import jax
import jax.numpy as jnp

from lowrank_attn import ops
from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.depthwise import check_kernel, depthwise, init_depthwise


def polaformer(
    alpha: float = 4.0,
    kernel_size: int = 5,
    grid_width: int | None = None,
    delta: float = 1e-6,
) -> AttentionMethod:
    """Linear attention that scores equal and opposite signs apart, plus a convolution.

        x_hat = x / softplus(scale),  x+- = relu(+-x_hat)^(1 + alpha sigmoid(exponent))
        first half of the values:  scores [q+ | q-] . [k+ | k-]
        second half of the values: scores [q- | q+] . [k+ | k-]

    Each half is divided by delta plus the sum of its scores, and a depthwise convolution of the
    values is added, as in `layers.flatten`. P must be D, and even. A query that sees no key gives
    the bias of the convolution.

    Trainable leaves: `scale` and `exponent` [H, D], shared by q and k, initialised 0; `conv` and
    `conv_bias` as in `layers.flatten`.

    Args:
        alpha: > 0, the range of the exponents.
        kernel_size, grid_width, delta: as in `layers.flatten`.

    Raises:
        ValueError: if an argument is out of range, or, from `apply`, if shapes do not fit, P is
            odd, or a grid is to be causal or packed.

    Source: PolaFormer (Meng et al., arXiv 2501.15061), as in its code. That multiplies the result
    by a gate, a projection of the layer's input, which an attention of q, k and v does not see: it
    is left out here. The other differences are those that `layers.flatten` names.
    """
    if alpha <= 0:
        raise ValueError(f"alpha={alpha}, expected a number > 0, such as 4.")
    check_kernel(kernel_size, grid_width)
    if delta <= 0:
        raise ValueError(f"delta={delta}, expected a number > 0, such as 1e-6.")

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        conv = init_depthwise(key, D, H, kernel_size, grid_width)
        return {"scale": jnp.zeros((H, D)), "exponent": jnp.zeros((H, D)), **conv}, {}

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
        P = v.shape[-1]
        if P % 2:
            raise ValueError(f"v has head size {P}, expected an even one: its halves are apart.")
        G = q.shape[2] // k.shape[2]

        def polarities(x, repeats):
            scale, exponent = (
                jnp.repeat(params[name], repeats, axis=0) for name in ("scale", "exponent")
            )
            x_hat = x.astype(jnp.float32) / jax.nn.softplus(scale)
            powers = 1.0 + alpha * jax.nn.sigmoid(exponent)
            return _relu_power(x_hat, powers), _relu_power(-x_hat, powers)

        q_positive, q_negative = polarities(q, G)
        phi_k = jnp.concatenate(polarities(k, 1), axis=-1).astype(k.dtype)
        attend = ops.causal if causal else ops.bidirectional

        def half(signs, v):
            phi_q = jnp.concatenate(signs, axis=-1).astype(q.dtype)
            y, _ = attend(
                phi_q,
                phi_k,
                v,
                normalize="sum",
                epsilon=delta,
                mask=mask,
                segment_ids=segment_ids,
            )
            return y

        same = half((q_positive, q_negative), v[..., : P // 2])
        opposite = half((q_negative, q_positive), v[..., P // 2 :])
        local = depthwise(
            params,
            v,
            num_queries=q.shape[1],
            causal=causal,
            mask=mask,
            segment_ids=segment_ids,
            grid_width=grid_width,
        )
        y = jnp.concatenate([same, opposite], axis=-1).astype(jnp.float32)
        return (y + jnp.repeat(local, G, axis=2)).astype(v.dtype)

    return AttentionMethod(init=init, apply=apply)


def _relu_power(x: jax.Array, power: jax.Array) -> jax.Array:
    """Compute relu(x)^power, with gradient 0 where x <= 0."""
    positive = x > 0
    return jnp.where(positive, jnp.where(positive, x, 1.0) ** power, 0.0)
