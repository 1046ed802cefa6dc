"""The elu(x) + 1 feature map of the first linear transformers."""

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import FeatureMap, Params


def elu() -> FeatureMap:
    """Positive features, exp(x) where x < 0 and x + 1 elsewhere: M = D.

    This is elu(x) + 1 with its branches evaluated apart. Taken literally that is (exp(x) - 1) + 1,
    which rounds to 0 for x below about -6 in bfloat16; here a feature is 0 only where exp(x)
    underflows.

    Returns:
        A map without parameters, normaliser `sum`.

    Source: Katharopoulos et al., Transformers are RNNs (arXiv 2006.16236), equation 7.
    """

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        del key, D, H
        return {}, {}

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del params, is_query, positions
        x32 = x.astype(jnp.float32)
        # The minimum keeps exp finite where its branch is not taken, so no gradient is inf * 0.
        phi = jnp.where(x32 < 0, jnp.exp(jnp.minimum(x32, 0.0)), x32 + 1.0)
        return phi.astype(x.dtype)

    return FeatureMap(dim=lambda D: D, init=init, apply=apply, non_negative=True, normalize="sum")
