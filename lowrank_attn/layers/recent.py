"""The last tokens of each row: what layers that look back a few tokens keep to go on from."""

from typing import TypeVar

import jax
import jax.numpy as jnp

A = TypeVar("A")


def real_and_segment(
    tokens: jax.Array, mask: jax.Array | None, segment: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Fill in a mask and segment numbers [B, T] that are None, for tokens [B, T, ...]."""
    shape = tokens.shape[:2]
    real = jnp.ones(shape, bool) if mask is None else mask.astype(bool)
    return real, jnp.zeros(shape, int) if segment is None else segment


def remember(past: A, new: A, real: jax.Array, segment: jax.Array) -> A:
    """The last n tokens of each row, whatever padding follows them.

    Args:
        past: arrays [B, n, ...] of the tokens before the new ones.
        new: the same arrays of the new tokens, [B, T, ...].
        real: [B, T] bool, false at padding, which is at the ends of a row.
        segment: [B, T] int, the documents of the new tokens, counted from 0; `past` is of
            document 0.

    Returns:
        Arrays [B, n, ...], zeros (false) where a token is padding or of another document than the
        row's last token. A row without real tokens keeps its past.
    """
    T = real.shape[1]
    last = jnp.max(jnp.where(real, segment, 0), axis=1, keepdims=True)
    end = jnp.max(jnp.where(real, jnp.arange(1, T + 1), 0), axis=1, keepdims=True)
    real = real & (segment == last)

    def one(past, new):
        n = past.shape[1]
        axes = [1] * (past.ndim - 2)
        zero = jnp.zeros((), past.dtype)
        old = jnp.where((last == 0).reshape(-1, 1, *axes), past, zero)
        new = jnp.where(real.reshape(*real.shape, *axes), new, zero)
        rows = jnp.concatenate([old, new], axis=1)
        index = end + jnp.arange(n)
        return jnp.take_along_axis(rows, index.reshape(*index.shape, *axes), axis=1)

    return jax.tree.map(one, past, new)
