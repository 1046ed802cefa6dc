"""Vectors on the unit sphere."""

import jax
import jax.numpy as jnp


def unit_rows(x: jax.Array) -> jax.Array:
    """Divide the vectors on the last axis by their Euclidean norm, in float32.

    Rows are scaled by their largest entry before the norm is taken, so no square overflows or
    underflows. Rows whose largest entry is below the smallest normal float32 (about 1e-38) count
    as zero: they give zero, with gradient zero.

    Args:
        x: [..., D].

    Returns:
        [..., D], float32, of norm one or zero.
    """
    x = x.astype(jnp.float32)
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    nonzero = largest >= jnp.finfo(jnp.float32).tiny
    scaled = jnp.where(nonzero, x, 1.0) / jnp.where(nonzero, largest, 1.0)
    norm = jnp.sqrt(jnp.sum(jnp.square(scaled), axis=-1, keepdims=True))
    return jnp.where(nonzero, scaled / norm, 0.0)
