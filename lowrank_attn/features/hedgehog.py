"""Hedgehog: a learned projection and two opposite activations."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import FeatureMap, Params
from lowrank_attn.features.numerics import project

Activation = Literal["softmax", "exp", "joint_softmax"]


def hedgehog(activation: Activation = "softmax") -> FeatureMap:
    """Positive features [act(z) | act(-z)] of a learned projection z = x W: M = 2 D.

    The activations, each of a whole row:

    * `softmax`: softmax(z)
    * `exp`: exp(z - max z)
    * `joint_softmax`: one softmax over both halves, of 2 z and -2 z

    Features are at least 1e-12, below which they have no gradient. None of the three is the kernel
    of plain exp(z), exp(-z), which overflows: `softmax` and `exp` scale the two halves of a token
    apart, `joint_softmax` only gives each token a weight of its own.

    Trainable leaf: `W` [H, 2, D, D], queries first, initialised to the unit matrix. `apply` takes
    any [2, D, F].

    Args:
        activation: as above.

    Raises:
        ValueError: if it is unknown.

    Source: Hedgehog (Zhang et al., arXiv 2402.04347), whose text has plain exponentials; `softmax`
    and `exp` are those of the LoLCATs code, `joint_softmax` that of flash-linear-attention. There
    is no bias: the one scalar for each head of the LoLCATs code cancels in both of its activations.
    """
    if activation not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        raise ValueError(f"activation={activation!r} is unknown; known: {known}.")

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        del key
        return {"W": jnp.tile(jnp.eye(D), (H, 2, 1, 1))}, {}

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del positions
        z = project(x, params["W"][0 if is_query else 1], x.dtype)
        halves = jnp.stack([z, -z], axis=-2)  # [T, 2, F]
        T = len(z)
        if activation == "joint_softmax":
            phi = jax.nn.softmax(2.0 * halves.reshape(T, -1), axis=-1)
        elif activation == "softmax":
            phi = jax.nn.softmax(halves, axis=-1).reshape(T, -1)
        else:
            phi = jnp.exp(halves - jnp.max(halves, axis=-1, keepdims=True)).reshape(T, -1)
        return jnp.maximum(phi, 1e-12).astype(x.dtype)

    return FeatureMap(
        dim=lambda D: 2 * D, init=init, apply=apply, non_negative=True, normalize="sum"
    )
