"""Two numbers that show whether the features of a map are alive."""

import jax
import jax.numpy as jnp


def effective_rank(phi: jax.Array) -> jax.Array:
    """tr(C)^2 / |C|_F^2 of C = sum_t phi_t phi_t^T: between 1 and min(T, M).

    Low values (below about 6 for M = 256) go with features that collapsed while training.

    Args:
        phi: features [..., T, M] of keys, any floating dtype.

    Returns:
        [...], float32.
    """
    phi = phi.astype(jnp.float32)
    phi = phi / jnp.maximum(jnp.max(jnp.abs(phi), axis=(-2, -1), keepdims=True), 1e-30)
    C = jnp.einsum("...tm,...tn->...mn", phi, phi, precision="highest")
    trace = jnp.trace(C, axis1=-2, axis2=-1)
    return jnp.square(trace) / jnp.maximum(jnp.sum(jnp.square(C), axis=(-2, -1)), 1e-30)


def active_features(phi: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Median over tokens of (sum_m phi_m^2)^2 / sum_m phi_m^4: between 1 and M.

    Args:
        phi: features [..., T, M] of keys, any floating dtype.
        mask: bool, broadcasts to [..., T], true at tokens that count; None: all.

    Returns:
        [...], float32.
    """
    phi = phi.astype(jnp.float32)
    square = jnp.square(phi / jnp.maximum(jnp.max(jnp.abs(phi), axis=-1, keepdims=True), 1e-30))
    count = jnp.square(jnp.sum(square, -1)) / jnp.maximum(jnp.sum(jnp.square(square), -1), 1e-30)
    if mask is None:
        return jnp.median(count, axis=-1)
    return jnp.nanmedian(jnp.where(mask, count, jnp.nan), axis=-1)
