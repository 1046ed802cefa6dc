"""Feature maps that are products of projections, for all heads and factors by one matrix product."""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp


def by_products(features: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same map with one matrix product for all its factors; any other map as it is.

        phi(x) = prod_{j=1..p} (b_j + x_hat Theta_j), squared if the map is

    The p projections of a row leave the matrix product side by side in the dtype of x and are
    multiplied in float32, so that no float32 factor goes through memory. Rows longer than 1e19
    overflow under the norm.

    Args:
        features: a `FeatureMap`, whose `product` says whether it has this form, or any function
            `features(params, x, is_query=..., positions=...)`.
    """
    product = getattr(features, "product", None)
    if product is None:
        return features

    def mapped(params, x, *, is_query, positions=None):
        Theta, b = jax.vmap(functools.partial(product.factors, is_query=is_query))(params)
        H, p, D, M = Theta.shape
        B, T, Hx, _ = x.shape
        rows = _rms_norm(x) if product.normalized else x
        projected = jnp.einsum(
            "bthgd,hdm->hbtgm",
            rows.reshape(B, T, H, Hx // H, D),
            jnp.moveaxis(Theta, 1, 2).reshape(H, D, p * M).astype(x.dtype),
            precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=x.dtype,
        )
        factors = [
            projected[..., j * M : (j + 1) * M].astype(jnp.float32) + b[:, None, None, None, j]
            for j in range(p)
        ]
        phi = functools.reduce(operator.mul, factors)
        if product.squared:
            phi = jnp.square(phi)
        return jnp.moveaxis(phi.astype(x.dtype), 0, 2).reshape(B, T, Hx, M)

    return mapped


def _rms_norm(x):
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype)
