"""Features of length 1, for rules whose state would grow without bound on longer keys."""

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import FeatureMap, Params


def unit_length(features: FeatureMap) -> FeatureMap:
    """The map x -> phi(x) / sqrt(|phi(x)|^2 + 1e-6), queries and keys alike.

    Scores become cosines of the features. Norms are taken in float32; the result has the dtype of
    x, so lengths are 1 up to its rounding, and less where |phi(x)|^2 is not above 1e-6.

    Returns:
        A map with the parameters, size, sign and normaliser of `features`.

    Source: the l2 norm on queries and keys of DeltaNet (arXiv 2406.06484), applied behind the map.
    """

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        phi = features.apply(params, x, is_query=is_query, positions=positions)
        phi = phi.astype(jnp.float32)
        square = jnp.sum(jnp.square(phi), axis=-1, keepdims=True)
        return (phi * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)

    return features._replace(apply=apply, product=None)
