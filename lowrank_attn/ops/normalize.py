"""Normalisers: how summed values become the output of attention."""

import jax
import jax.numpy as jnp

NORMALIZERS = ("none", "sum", "sum_plus_one", "rms")


def needs_denominator(normalize: str) -> bool:
    """Whether a normaliser divides by the sum of the scores.

    Raises:
        ValueError: if `normalize` is not a known name.
    """
    if normalize not in NORMALIZERS:
        raise ValueError(f"normalize={normalize!r} is unknown; known: {', '.join(NORMALIZERS)}.")
    return normalize in ("sum", "sum_plus_one")


def apply_normalizer(
    numerator: jax.Array, denominator: jax.Array | None, normalize: str, epsilon: float
) -> jax.Array:
    """Turn sums of scored values into the attention output, in float32.

    With n = sum_s score_s v_s and d = sum_s score_s over the visible keys:

    * `none`: n
    * `rms`: n / sqrt(mean(n^2) + epsilon), the mean over the P values of the head; no gain
    * `sum`: n / (d + epsilon) for d >= 0, n / (d - epsilon) for d < 0
    * `sum_plus_one`: as `sum` with 1 + d in place of d

    Epsilon moves the denominator away from zero on its own side, so it never divides by zero, and
    for non-negative scores it is the usual `d + epsilon`. A query that sees no key gives 0.

    Args:
        numerator: n, [..., P].
        denominator: d, [...]; only read by the two sum normalisers.
        normalize: one of `NORMALIZERS`.
        epsilon: > 0; it has the scale of the scores (of the squared output for `rms`).

    Returns:
        [..., P], float32.
    """
    numerator = numerator.astype(jnp.float32)
    if normalize == "none":
        return numerator
    if normalize == "rms":
        mean_square = jnp.mean(jnp.square(numerator), axis=-1, keepdims=True)
        return numerator * jax.lax.rsqrt(mean_square + epsilon)
    assert denominator is not None
    d = denominator.astype(jnp.float32)[..., None]
    if normalize == "sum_plus_one":
        d = d + 1.0
    return numerator / (d + jnp.where(d < 0, -epsilon, epsilon))
