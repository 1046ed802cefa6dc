"""A sketch by two-layer networks, the baseline that learned projections are compared with."""

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import FeatureMap, Params
from lowrank_attn.features.numerics import project, rms_norm


def mlp(num_features: int = 256, num_hidden: int = 256, qk_norm: bool = True) -> FeatureMap:
    """Features by one two-layer network for queries and one for keys.

        phi(x) = M^(-1/2) (b_2 + gelu(b_1 + x_hat W_1) W_2),  x_hat = RMSNorm(x)

    Scores are signed, so the normaliser is `rms`.

    Trainable leaves, queries first in the axis of 2, F = num_hidden: `W1` [H, 2, D, F] and `W2`
    [H, 2, F, M], initialised N(0, 1 / inputs), and `b1` [H, 2, F] and `b2` [H, 2, M], zeros.

    Args:
        num_features: M >= 1.
        num_hidden: F >= 1.
        qk_norm: whether x is RMS-normalised (epsilon 1e-6) over D first, else x_hat = x.

    Raises:
        ValueError: if a size is out of range.

    Source: the neural baseline (NN) of LLoPS, which only says two layers; sizes, GELU and the norm
    are ours.
    """
    for name, value in (("num_features", num_features), ("num_hidden", num_hidden)):
        if value < 1:
            raise ValueError(f"{name}={value}, expected at least 1.")
    M, F = num_features, num_hidden

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        key_1, key_2 = jax.random.split(key)
        return {
            "W1": D**-0.5 * jax.random.normal(key_1, (H, 2, D, F)),
            "b1": jnp.zeros((H, 2, F)),
            "W2": F**-0.5 * jax.random.normal(key_2, (H, 2, F, M)),
            "b2": jnp.zeros((H, 2, M)),
        }, {}

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del positions
        side = 0 if is_query else 1
        W1, b1, W2, b2 = (params[name][side] for name in ("W1", "b1", "W2", "b2"))
        rows = rms_norm(x) if qk_norm else x
        hidden = jax.nn.gelu(project(rows, W1, x.dtype) + b1)
        return (M**-0.5 * (project(hidden, W2, x.dtype) + b2)).astype(x.dtype)

    return FeatureMap(dim=lambda D: M, init=init, apply=apply, non_negative=False, normalize="rms")
