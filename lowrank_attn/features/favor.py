"""FAVOR+ of Performers: random features of the softmax kernel and of a rectified kernel."""

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import FeatureMap, Params
from lowrank_attn.features.orthogonal import draw_orthogonal

# Exponents of keys stay below this, so that sums of e^28 = 1e12 of them stay finite in float32.
_LARGEST_EXPONENT = 60.0


def favor(num_features: int = 256, epsilon: float = 1e-6) -> FeatureMap:
    """Positive random features of the softmax kernel exp(q . k / sqrt(D)).

        phi(k) = M^(-1/2) (exp(w_i . k' - |k'|^2 / 2 - c) + epsilon),  k' = k / D^(1/4)
        phi(q) = M^(-1/2) (exp(w_i . q' - max_j w_j . q') + epsilon)

    The rows w_i are orthogonal in blocks of D and have the lengths of Gaussian vectors. Dividing
    all features of one query by their largest leaves its output unchanged, under every normaliser
    but `none`; the same for a key would change its weight among the keys. Exponents of keys are at
    most |w_i|^2 / 2, and c = max(0, max_i |w_i|^2 / 2 - 60), a number of the draw, which is 0 up to
    about D = 64, keeps features and their sums finite in float32 and bfloat16; not in float16.

    Row t depends on row t only, so causal outputs never see the future. Public code subtracts
    |q'|^2 / 2 for queries too, and from all keys the maximum of w_i . k' over the whole sequence,
    before it adds epsilon: with the same draws it agrees with this map as far as epsilon is
    negligible, and its causal outputs depend on later keys.

    Args:
        num_features: M >= 1.
        epsilon: > 0, added to every exponential.

    Returns:
        A map with the constant `projection` [H, M, D], normaliser `sum`.

    Raises:
        ValueError: if a number is out of range.

    Source: Performers (arXiv 2009.14794), equations 5 and 6 (lemma 1) with orthogonal rows;
    epsilon as in the authors' code.
    """
    _check(num_features, epsilon)
    M = num_features

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del positions
        exponent, w = _project(params, x)
        if is_query:
            highest = jnp.max(exponent, axis=-1, keepdims=True)
            exponent = exponent - jax.lax.stop_gradient(highest)
        else:
            c = jnp.maximum(jnp.max(jnp.sum(w * w, axis=-1)) / 2 - _LARGEST_EXPONENT, 0.0)
            size = jnp.sum(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
            exponent = exponent - size * (0.5 * x.shape[-1] ** -0.5) - c
        return (M**-0.5 * (jnp.exp(exponent) + epsilon)).astype(x.dtype)

    return FeatureMap(
        dim=lambda D: M, init=_init(M), apply=apply, non_negative=True, normalize="sum"
    )


def favor_relu(num_features: int = 256, epsilon: float = 1e-3) -> FeatureMap:
    """Random features of a rectified kernel: phi(x) = max(w_i . x / D^(1/4), 0) + epsilon.

    The rows w_i are those of `favor`. The kernel grows with the lengths of q and k and with the
    cosine between them.

    Args:
        num_features: M >= 1.
        epsilon: > 0.

    Returns:
        A map with the constant `projection` [H, M, D], normaliser `sum`.

    Raises:
        ValueError: if a number is out of range.

    Source: Performers (arXiv 2009.14794), generalised attention with a ReLU, as in the code.
    """
    _check(num_features, epsilon)

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del is_query, positions
        projected, _ = _project(params, x)
        return (jax.nn.relu(projected) + epsilon).astype(x.dtype)

    return FeatureMap(
        dim=lambda D: num_features,
        init=_init(num_features),
        apply=apply,
        non_negative=True,
        normalize="sum",
    )


def _check(num_features, epsilon):
    if num_features < 1:
        raise ValueError(f"num_features={num_features}, expected at least 1; 256 is usual.")
    if epsilon <= 0:
        raise ValueError(f"epsilon={epsilon}, expected a number > 0, such as 1e-6.")


def _init(num_features):
    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        direction, length = draw_orthogonal(key, (H, num_features, D))
        return {}, {"projection": direction * length[..., None]}

    return init


def _project(params, x):
    """The products w . x / D^(1/4) [T, M] in float32, and w [M, D]."""
    w = jax.lax.stop_gradient(params["projection"])
    projected = jax.lax.dot_general(
        x.astype(jnp.float32), w, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )
    return projected * x.shape[-1] ** -0.25, w
