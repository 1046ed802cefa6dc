"""Maps that are products of projections, all heads and factors by one matrix product."""

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
        projected = jnp.einsum(
            "bthgd,hdm->hbtgm",
            x.reshape(B, T, H, Hx // H, D),
            jnp.moveaxis(Theta, 1, 2).reshape(H, D, p * M).astype(x.dtype),
            precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=x.dtype,
        )
        if product.normalized:
            mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1)
            inverse = jax.lax.rsqrt(mean_square + 1e-6).reshape(B, T, H, Hx // H, 1)
            inverse = jnp.moveaxis(inverse, 2, 0)

        def factor(j):
            y = projected[..., j * M : (j + 1) * M].astype(jnp.float32)
            return (y * inverse if product.normalized else y) + b[:, None, None, None, j]

        phi = functools.reduce(operator.mul, map(factor, range(p)))
        if product.squared:
            phi = jnp.square(phi)
        return jnp.moveaxis(phi.astype(x.dtype), 0, 2).reshape(B, T, Hx, M)

    return mapped
