"""Linformer: softmax attention to keys and values projected along the sequence."""

import jax
import jax.numpy as jnp

from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.landmarks import flat_heads, grouped_heads
from lowrank_attn.layers.visibility import precision_for


def linformer(max_length: int = 4096, rank: int = 256, tied: bool = False) -> AttentionMethod:
    """Softmax attention to R learned mixtures of all keys and values, in time linear in T.

        y = softmax(q (E^T k)^T / sqrt(D)) F^T v

    with the first S rows of E and F. Masked keys and values enter as zeros; the mixtures themselves
    are always R. Scores and the softmax are float32.

    Args:
        max_length: the largest S.
        rank: R >= 1.
        tied: whether F = E, the paper's key-value sharing.

    Returns:
        A method with trained `E` [H, max_length, R], unless tied `F` too, initialised uniformly
        within R^(-1/2).

    Raises:
        ValueError: if a number is out of range, or, when called, for more than max_length keys.

    Source: Linformer (arXiv 2006.04768), equation 7, initialised as in the public linformer
    package, which shares E and F between heads; here each key/value head has its own.
    """
    if max_length < 1:
        raise ValueError(f"max_length={max_length}, expected at least 1: the longest sequence.")
    if rank < 1:
        raise ValueError(f"rank={rank}, expected at least 1; 256 is usual.")

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        bound = rank**-0.5
        names = ("E",) if tied else ("E", "F")
        shape = (H, max_length, rank)
        return {
            name: jax.random.uniform(key, shape, minval=-bound, maxval=bound)
            for name, key in zip(names, jax.random.split(key, len(names)))
        }, {}

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
        S, D = k.shape[1], k.shape[3]
        if max_length < S:
            raise ValueError(f"k has {S} tokens, expected at most max_length={max_length}.")
        dtype, precision = v.dtype, precision_for(q, k, v)
        if mask is not None:
            k, v = (jnp.where(mask.astype(bool)[:, :, None, None], x, 0) for x in (k, v))
        q, k, v = grouped_heads(q, k, v)
        E, F = (params[n][:, :S].astype(jnp.float32) for n in ("E", "E" if tied else "F"))

        with jax.default_matmul_precision(precision.name.lower()):
            k = jnp.einsum("bhgsd,hsr->bhgrd", k, E)
            v = jnp.einsum("bhgsp,hsr->bhgrp", v, F)
            weights = jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) * D**-0.5, axis=-1)
            y = weights @ v
        return flat_heads(y).astype(dtype)

    return AttentionMethod(
        init=init,
        apply=apply,
        no_causal="each projected key is a mixture of early and late keys",
        no_segments="each projected key is a mixture over the whole row",
    )
