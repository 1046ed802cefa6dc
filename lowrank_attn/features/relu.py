"""The rectified feature map."""

import jax

from lowrank_attn.features.base import FeatureMap, Params


def relu() -> FeatureMap:
    """Non-negative features max(x, 0): M = D.

    A query whose entries are all negative has no feature: its output is 0.

    Returns:
        A map without parameters, normaliser `sum`.

    Source: the map of cosFormer (arXiv 2202.08791, section 3.1) without its positions.
    """

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        del key, D, H
        return {}, {}

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del params, is_query, positions
        return jax.nn.relu(x)

    return FeatureMap(dim=lambda D: D, init=init, apply=apply, non_negative=True, normalize="sum")
