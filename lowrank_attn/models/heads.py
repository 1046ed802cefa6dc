"""Classification heads on pooled vectors, of one document or of pairs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class PairHead(NamedTuple):
    """How a head reads the pooled vectors a, b of two documents.

    It sees [a, b, a * b, a - b], or without `products` [a, b]; `halved` is whether a second hidden
    layer of half the width follows the first.
    """

    products: bool
    activation: Callable[[Any], jax.Array]
    halved: bool


# Skyformer (Chen et al. 2021); Amos et al. 2024; Long Range Arena (Tay et al. 2021)
PAIR_HEADS = {
    "products": PairHead(products=True, activation=nnx.relu, halved=False),
    "products_gelu": PairHead(products=True, activation=nnx.gelu, halved=False),
    "concatenation": PairHead(products=False, activation=nnx.relu, halved=True),
}


class Head(nnx.Module):
    """Logits of pooled vectors, by hidden layers (with a ReLU unless `pair` says otherwise).

    Args:
        features: size of a vector, E.
        num_classes: number of logits.
        width: of the hidden layer; None: linear.
        pair: a name in `PAIR_HEADS`, if two vectors are one example.
        rngs: key stream `params`.

    Raises:
        ValueError: for an unknown pair head.
    """

    def __init__(
        self,
        features: int,
        num_classes: int,
        *,
        width: int | None,
        pair: str | None,
        rngs: nnx.Rngs,
    ):
        if pair is not None and pair not in PAIR_HEADS:
            known = ", ".join(PAIR_HEADS)
            raise ValueError(f"pair_head={pair!r} is unknown; known: {known}.")
        self.pair = None if pair is None else PAIR_HEADS[pair]
        size = features if self.pair is None else features * (4 if self.pair.products else 2)
        widths = [] if width is None else [width]
        if widths and self.pair is not None and self.pair.halved:
            widths.append(widths[0] // 2)
        hidden = []
        for following in widths:
            hidden.append(nnx.Linear(size, following, rngs=rngs))
            size = following
        self.hidden = nnx.List(hidden)
        self.logits = nnx.Linear(size, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [B, num_classes] of x [B, E]; of pairs, [2B, E] with the two side by side."""
        activation: Callable[[Any], jax.Array] = nnx.relu
        if self.pair is not None:
            a, b = x[0::2], x[1::2]
            x = jnp.concatenate([a, b, a * b, a - b] if self.pair.products else [a, b], axis=-1)
            activation = self.pair.activation
        for layer in self.hidden:
            x = activation(layer(x))
        return self.logits(x)
