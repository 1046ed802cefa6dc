"""SLAY with features chosen for the size that they may have."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_attn.features.base import FeatureMap, Params
from lowrank_attn.features.slay_draws import draw_directions, draw_frequencies
from lowrank_attn.features.slay_families import length_moment
from lowrank_attn.features.slay_plan import Block, plan_slay
from lowrank_attn.features.slay_polynomials import project, quadratic
from lowrank_attn.features.unit_rows import unit_rows

_ANCHOR_POWERS = {"pair": 2, "pair4": 4}


def slay_auto(
    num_features: int = 256,
    target_error: float | None = None,
    epsilon: float = 1e-3,
    histogram: tuple[float, ...] | None = None,
) -> FeatureMap:
    """SLAY features that `plan_slay` chooses for the head size D, for x^2 / (2 + epsilon - 2x).

    With u = x / |x|, phi(u) holds one group of features for each block of weight beta and count n,

    * `const`: sqrt(beta)
    * `prf`: sqrt(beta / n) e_i(u), positive random features of `draw_frequencies`, kind `oprf`
    * `pair`: sqrt(beta / n) sqrt(D (D + 2)) (a_i . u)^2 e_i(u) with unit vectors a_i
    * `pair4`: sqrt(beta / n) sqrt(D (D + 2) (D + 4) (D + 6)) (a_i . u)^4 e_i(u)
    * `hadamard`: sqrt(beta / n) (g_i . u)^2 e_i(u), e_i of the kind `orthogonal` with vectors g_i
    * `quadratic`: sqrt(beta) times the monomials of `slay_polynomials.quadratic`, of a random
      rotation of u if they are not all

    where a_i, g_i and the vectors of e_i come in orthogonal blocks of D. All scores are >= 0 up to
    the rounding of the monomials (in bfloat16 some come out slightly negative). The length of x
    does not matter; of a zero vector the features of `const` and `prf` stay.

    Predicted errors of scores for D = 64 are 0.84 with 256 features and 0.74 with 1024, where
    constant scores have 0.96; for D = 16 they are 0.70 and 0.65 of 0.95 (epsilon 1e-3, default
    density of cosines). `plan_slay` with the same arguments and D tells what was chosen.

    Args:
        num_features: M >= 1, the most features.
        target_error: None, or the error to reach with as few features as possible, up to M.
        epsilon: > 0.
        histogram: shares of cosines of queries and keys, see `cosine_histogram`.

    Returns:
        A map with constants `omega_b`, `offset_b`, `anchors_b` and `rotation_b` of block b, as far
        as it has them, normaliser `sum`.

    Raises:
        ValueError: from the map, if an argument is out of range or the target is not reached for D.

    Source: SLAY (arXiv 2602.04915) for the kernel and its two factors; the choice is ours.
    """
    histogram = None if histogram is None else tuple(histogram)
    planned = functools.partial(
        plan_slay,
        num_features=num_features,
        target_error=target_error,
        epsilon=epsilon,
        histogram=histogram,
    )

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        constant: dict[str, jax.Array] = {}
        for b, block in enumerate(planned(D).blocks):
            drawn = draw_block(jax.random.fold_in(key, b), block, D, H)
            constant |= {f"{name}_{b}": leaf for name, leaf in drawn.items()}
        return {}, constant

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del is_query, positions
        params = jax.lax.stop_gradient(params)
        u = unit_rows(x)
        parts = []
        for b, block in enumerate(planned(x.shape[-1]).blocks):
            ending = f"_{b}"
            of_block = {n.removesuffix(ending): p for n, p in params.items() if n.endswith(ending)}
            parts.append(block_features(of_block, block, u))
        return jnp.concatenate(parts, axis=1).astype(x.dtype)

    return FeatureMap(
        dim=lambda D: planned(D).num_features,
        init=init,
        apply=apply,
        non_negative=True,
        normalize="sum",
    )


def draw_block(key: jax.Array, block: Block, D: int, H: int) -> Params:
    """The constants of one block, with its weight in the offsets of the exponentials."""
    frequency_key, direction_key = jax.random.split(key)
    constant = {}
    if 0 < block.rank < D:
        constant["rotation"] = draw_directions(direction_key, (H, D, D), True)
    if block.s:
        kind = "orthogonal" if block.family == "hadamard" else "oprf"
        s = np.array([block.s])
        omega, offset = draw_frequencies(frequency_key, H, block.num_random, D, s, kind)
        log_weight = 0.5 * math.log(block.weight / block.num_random)
        if block.family == "hadamard":
            log_weight -= math.log(2 * block.s)  # (omega . u)^2 is 2 s (g . u)^2
        constant |= {"omega": omega[:, 0], "offset": offset[:, 0] + log_weight}
    if block.family in _ANCHOR_POWERS:
        power = _ANCHOR_POWERS[block.family]
        length = length_moment(2 * power, D) ** (0.5 / power)
        anchors = draw_directions(direction_key, (H, block.num_random, D), True)
        constant["anchors"] = length * anchors
    return constant


def block_features(params: Params, block: Block, u: jax.Array) -> jax.Array:
    """The features [T, size] of one block for unit rows [T, D] of one head."""
    if block.s:
        exponent = project(u, params["omega"])
        random = jnp.exp(exponent + params["offset"])
    if block.family == "const":
        return jnp.full((len(u), 1), math.sqrt(block.weight), jnp.float32)
    if block.family == "prf":
        return random
    if block.family == "hadamard":
        return jnp.square(exponent) * random
    if block.family in _ANCHOR_POWERS:
        return project(u, params["anchors"]) ** _ANCHOR_POWERS[block.family] * random
    rotated = project(u, params["rotation"]) if "rotation" in params else u
    return math.sqrt(block.weight) * quadratic(rotated, block.rank)
