"""The second-order Taylor feature map of BASED."""

import math

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import FeatureMap, Params


def taylor() -> FeatureMap:
    """Second-order Taylor features of exp: phi(q) . phi(k) = 1 + s + s^2 / 2, s = q . k / sqrt(D).

        phi(x) = [1 | x_i / D^(1/4) | x_i x_j / (sqrt(2) sqrt(D))]

    with the products in row-major order (i, j), both (i, j) and (j, i): M = D^2 + D + 1. Scores are
    at least 1/2, since 1 + s + s^2 / 2 = (1 + (1 + s)^2) / 2. The size is meant for small D: BASED
    projects queries and keys to D = 16 before the map, which gives 273 features.

    Inputs whose square exceeds the range of their dtype overflow.

    Returns:
        A map without parameters, normaliser `sum`.

    Source: BASED (arXiv 2402.18668), order and scale of its published checkpoints.
    """

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        del key, D, H
        return {}, {}

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del params, is_query, positions
        T, D = x.shape
        x32 = x.astype(jnp.float32)
        products = (x32[:, :, None] * x32[:, None, :]).reshape(T, D * D)
        parts = [jnp.ones((T, 1)), x32 / D**0.25, products / math.sqrt(2 * D)]
        return jnp.concatenate(parts, axis=-1).astype(x.dtype)

    return FeatureMap(
        dim=lambda D: D * D + D + 1, init=init, apply=apply, non_negative=True, normalize="sum"
    )
