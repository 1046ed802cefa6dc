"""What a shard of a sequence does to the state that enters it, and the state that does enter it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Transition(NamedTuple):
    """The map S -> keep S + add of states [B, H, M, P], float32.

    Attributes:
        keep: [B, H, M, 1], a number per feature, or [B, H, M, M], matrices.
        add: [B, H, M, P].
    """

    keep: jax.Array
    add: jax.Array

    def __call__(self, S: jax.Array) -> jax.Array:
        """Apply it to S [B, H, M, P]."""
        return _keep(self.keep, S) + self.add

    def after(self, first: "Transition") -> "Transition":
        """The transition that applies `first`, then this one."""
        return Transition(_keep(self.keep, first.keep), self(first.add))


def _keep(keep, S):
    if keep.shape[-1] == 1:
        return keep * S
    return jnp.matmul(keep, S, precision=jax.lax.Precision.HIGHEST)


def by_all_gather(own: Transition, S: jax.Array, axis: str) -> jax.Array:
    """The state that enters each shard, from the S that enters the first one.

    All transitions are gathered at once, and each shard applies those before it. In the backward
    pass their gradients are summed and scattered: n states per device and direction over n shards.
    """
    K = own.keep.shape[-1]
    own_index = jax.lax.axis_index(axis)

    def apply(S, x):
        index, both = x
        return jnp.where(index < own_index, Transition(both[..., :K], both[..., K:])(S), S), None

    both = jax.lax.all_gather(jnp.concatenate(own, axis=-1), axis)
    S, _ = jax.lax.scan(apply, S, (jnp.arange(both.shape[0]), both))
    return S


def by_ppermute(own: Transition, S: jax.Array, axis: str) -> jax.Array:
    """The same in log2(n) steps, each of which composes transitions over twice the distance.

    Each device sends log2(n) + 1 transitions, one after another.
    """
    n, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    distance = 1
    while distance < n:
        before = _from_before(own, axis, distance)
        longer = own.after(before)
        own = jax.tree.map(functools.partial(jnp.where, index >= distance), longer, own)
        distance *= 2
    return jnp.where(index == 0, S, _from_before(own, axis, 1)(S))


def _from_before(own, axis, distance):
    K = own.keep.shape[-1]
    steps = [(i, i + distance) for i in range(jax.lax.axis_size(axis) - distance)]
    both = jax.lax.ppermute(jnp.concatenate(own, axis=-1), axis, steps)
    return Transition(both[..., :K], both[..., K:])


SCANS = {"all_gather": by_all_gather, "ppermute": by_ppermute}
