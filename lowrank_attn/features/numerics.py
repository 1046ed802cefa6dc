"""Norms and products that feature maps share, in float32 for inputs of any dtype."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Compute x / sqrt(mean(x^2) + epsilon) over the last axis, in float32, for any finite x.

    Rows are divided by their largest magnitude first (if it is above 1), so that squares cannot
    overflow; the result does not depend on that divisor, which therefore carries no gradient.
    """
    x = x.astype(jnp.float32)
    size = jax.lax.stop_gradient(jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1.0))
    shrink = 1.0 / size
    x = x * shrink
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + epsilon * jnp.square(shrink))


def layer_norm(x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Compute (x - mean(x)) / sqrt(var(x) + epsilon) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return rms_norm(x - jnp.mean(x, axis=-1, keepdims=True), epsilon)


def project(x: jax.Array, W: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiply x [..., D] by W [D, M] in float32, as exactly as inputs of `dtype` deserve.

    Inputs that were float32 get full float32 products; for others the platform's fast ones do.
    """
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.matmul(
        x.astype(jnp.float32),
        W.astype(jnp.float32),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
