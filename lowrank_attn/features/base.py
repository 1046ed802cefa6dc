"""The contract of a feature map: a value made of pure functions."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

Params = Mapping[str, jax.Array]


class Apply(Protocol):
    """The signature of `FeatureMap.apply`."""

    def __call__(
        self,
        params: Params,
        x: jax.Array,
        *,
        is_query: bool,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Map the rows of one head; see `FeatureMap`."""


class ProductForm(NamedTuple):
    """What a kernel needs to know of a map that is a product of learned projections.

        phi(x) = prod_{j=1..p} (b_j + x_hat Theta_j), squared if `squared`

    Attributes:
        factors: `factors(params, is_query=...)` returns Theta [p, D, M] and b [p, M] of ONE head in
            float32, with gains and multipliers folded in.
        normalized: whether x_hat is x / sqrt(mean(x^2) + 1e-6), else it is x.
        squared: whether the product is squared.
    """

    factors: Callable[..., tuple[jax.Array, jax.Array]]
    normalized: bool
    squared: bool


class FeatureMap(NamedTuple):
    """A feature map phi with phi(q) . phi(k) ~ kappa(q, k), for one mathematical kernel kappa.

    Attributes:
        dim: `dim(D)` is the number of features M for head size D.
        init: `init(key, D, H)` returns `(trainable, constant)`, two flat dicts of arrays with
            disjoint names. Every leaf leads with the head axis H, so that heads can be sliced and
            sharded. Random projections that must not be trained are constants.
        apply: `apply(params, x, is_query=..., positions=...)` maps the rows x [T, D] of ONE head to
            [T, M]. `params` is `trainable | constant` of that head, without the leading H.
            Row t of the result depends on row t of x (and positions[t]) only. The result has the
            dtype of x; norms, exponentials, sums and element-wise products are taken in float32.
        non_negative: whether phi(q) . phi(k) >= 0 for all q, k. Signed maps must not be divided by
            the plain sum of their scores.
        normalize: the normaliser that is safe for this map, used when the caller names none.
        product: the same map as a product of projections, for kernels that fuse it; None if it is
            none. `apply` alone defines the map.
    """

    dim: Callable[[int], int]
    init: Callable[[jax.Array, int, int], tuple[Params, Params]]
    apply: Apply
    non_negative: bool
    normalize: str
    product: ProductForm | None = None

    def __call__(
        self,
        params: Params,
        x: jax.Array,
        *,
        is_query: bool,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Apply the map to all heads: [B, T, Hx, D] -> [B, T, Hx, M].

        Args:
            params: `trainable | constant` of H heads, every leaf leading with H.
            x: queries or keys; Hx must be a multiple of H, and consecutive groups of Hx / H heads
                share the parameters of one head (grouped queries).
            is_query: whether x are queries.
            positions: integer positions [T] or [B, T], for maps that depend on them; None: 0..T-1.

        Raises:
            ValueError: if Hx is not a multiple of H.
        """
        B, T, Hx, D = x.shape
        leaves = jax.tree.leaves(params)
        H = leaves[0].shape[0] if leaves else Hx
        if Hx % H:
            raise ValueError(f"x has {Hx} heads, expected a multiple of the {H} heads of params.")

        # Rows are independent: all rows of one head become one matrix, [H, B * T * G, D].
        G = Hx // H
        rows = jnp.moveaxis(x.reshape(B, T, H, G, D), 2, 0).reshape(H, B * T * G, D)
        positions = jnp.arange(T) if positions is None else positions
        positions = jnp.broadcast_to(positions, (B, T))
        positions = jnp.broadcast_to(positions[:, :, None], (B, T, G)).reshape(-1)

        def one_head(head_params, rows):
            return self.apply(head_params, rows, is_query=is_query, positions=positions)

        phi = jax.vmap(one_head)(params, rows)
        phi = jnp.moveaxis(phi.reshape(H, B, T, G, phi.shape[-1]), 0, 2)
        return phi.reshape(B, T, Hx, phi.shape[-1])
