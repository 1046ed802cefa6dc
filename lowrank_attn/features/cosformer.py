"""The map of cosFormer: rectified features, weighted by the cosine of a distance in time."""

import math

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import FeatureMap, Params


def cosformer(horizon: int = 4096) -> FeatureMap:
    """Rectified features whose scores fall with the distance of positions i and j.

        phi(x) = [max(x, 0) sin(a_i) | max(x, 0) cos(a_i)],  a_i = (pi / 2) (i + 1) / horizon
        phi(q) . phi(k) = (max(q, 0) . max(k, 0)) cos((pi / 2) (i - j) / horizon)

    for positions i from 0, M = 2 D. The cosine is positive for distances below the horizon; later
    positions take the angle of the last one, so that scores are never negative.

    Args:
        horizon: >= 1, the number of positions. It is fixed here, so that a prompt and the tokens
            decoded after it use the same angles; set it to the longest sequence.

    Returns:
        A map without parameters, normaliser `sum`. Without `positions` rows are at 0, 1, ...

    Raises:
        ValueError: if the horizon is below 1.

    Source: cosFormer (arXiv 2202.08791), equation 10. The authors' code takes the length of the
    longer sequence of each call for the horizon.
    """
    if horizon < 1:
        raise ValueError(f"horizon={horizon}, expected at least 1: the longest sequence.")

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        del key, D, H
        return {}, {}

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del params, is_query
        if positions is None:
            positions = jnp.arange(x.shape[0])
        place = jnp.minimum(positions + 1, horizon).astype(jnp.float32)
        angle = (0.5 * math.pi / horizon) * place[:, None]
        positive = jax.nn.relu(x.astype(jnp.float32))
        # In float32 the cosine of the last position is -4e-8.
        cosine = jnp.maximum(jnp.cos(angle), 0.0)
        phi = jnp.concatenate([positive * jnp.sin(angle), positive * cosine], axis=-1)
        return phi.astype(x.dtype)

    return FeatureMap(
        dim=lambda D: 2 * D, init=init, apply=apply, non_negative=True, normalize="sum"
    )
