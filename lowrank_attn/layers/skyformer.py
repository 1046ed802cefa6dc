"""Skyformer: attention by a Gaussian kernel through sampled rows."""

import jax
import jax.numpy as jnp

from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.landmarks import flat_heads, grouped_heads, iterated_inverse
from lowrank_attn.layers.visibility import check_same_tokens, precision_for

_REGULARISER = 0.1


def skyformer(
    num_samples: int = 128, num_iterations: int = 6, shared_start: bool = False
) -> AttentionMethod:
    """Nystrom approximation of attention with scores exp(-|q - k|^2 / (2 sqrt(D))).

        y = K(q, x) M^(-1) K(x, k) v,  M = K(x, x) + 0.1 I,  K(a, b) = exp(-|a - b|^2 / (2 sqrt(D)))

    without a denominator. x are N rows of the real tokens, the first half from q, the rest from k,
    with replacement. M is divided by the roots of its row sums on both sides before the inverse.
    In float32, with float32 matrix products for float32 inputs.

    The constant `draw` [H, N], uniform in [0, 1), says which rows: floor(draw * number of real
    tokens), the same in every call. Grouped queries take the same tokens.

    Args:
        num_samples: N >= 2, even.
        num_iterations: steps towards the inverse; see `layers.landmarks`.
        shared_start: whether these start from a number of the whole batch, as public code does,
            which makes a row's output depend on the other rows.

    Raises:
        ValueError: if a number is out of range, or, when called, for unequal T and S.

    Source: Skyformer (arXiv 2111.00035), section 4. Its code scales by 32 in place of D (its heads
    have that size), draws rows anew in every call, and draws the same ones for all heads.
    """
    if num_samples < 2 or num_samples % 2:
        raise ValueError(f"num_samples={num_samples}, expected an even number >= 2, such as 128.")
    if num_iterations < 1:
        raise ValueError(f"num_iterations={num_iterations}, expected at least 1; 6 is usual.")

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        return {}, {"draw": jax.random.uniform(key, (H, num_samples))}

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
        check_same_tokens(q, k, "rows are sampled from the real tokens of both")
        B, T, _, D = q.shape
        real = jnp.ones((B, T), bool) if mask is None else mask.astype(bool)
        dtype, precision = v.dtype, precision_for(q, k, v)
        v = jnp.where(real[:, :, None, None], v, 0)
        q, k, v = grouped_heads(q, k, v)
        q, k = q * D**-0.25, k * D**-0.25

        # The tokens of the draw, [B, H, 1, N, 1]: real ones come first in `order`.
        order = jnp.argsort(~real, axis=1, stable=True)
        total = jnp.sum(real, axis=1)[:, None]
        rank = (params["draw"] * total[..., None]).astype(jnp.int32)
        rank = jnp.clip(rank, 0, jnp.maximum(total - 1, 0)[..., None])
        token = jax.vmap(lambda order, rank: order[rank])(order, rank)[:, :, None, :, None]
        half = num_samples // 2
        from_q = jnp.take_along_axis(q, token[..., :half, :], axis=3)
        from_k = jnp.take_along_axis(k, token[..., half:, :], axis=3)
        from_k = jnp.broadcast_to(from_k, (*from_q.shape[:3], half, D))
        x = jnp.concatenate([from_q, from_k], axis=3)

        with jax.default_matmul_precision(precision.name.lower()):
            M = _gaussian(x, x) + _REGULARISER * jnp.eye(num_samples)
            root = jax.lax.rsqrt(jnp.sum(M, axis=-1, keepdims=True))  # [B, H, G, N, 1]
            M = root * M * jnp.swapaxes(root, -1, -2)
            inverse = iterated_inverse(M, num_iterations, shared_start)
            read = _gaussian(x, k) @ v
            y = _gaussian(q, x) @ (root * (inverse @ (root * read)))
        return flat_heads(y).astype(dtype)

    return AttentionMethod(
        init=init,
        apply=apply,
        no_causal="all queries read the rows that were sampled, early and late ones",
        no_segments="tokens are sampled from the whole row",
    )


def _gaussian(a: jax.Array, b: jax.Array) -> jax.Array:
    """exp(-|a - b|^2 / 2) of a [..., n, D] and b [..., m, D]: [..., n, m]."""
    a_square, b_square = (jnp.sum(jnp.square(x), axis=-1) for x in (a, b))
    dot = a @ jnp.swapaxes(b, -1, -2)
    return jnp.exp(jnp.minimum(dot - 0.5 * (a_square[..., None] + b_square[..., None, :]), 0.0))
