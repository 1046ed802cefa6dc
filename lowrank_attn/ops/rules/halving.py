"""A chunk cut into halves again and again: triangular inverses, and decays per feature.

At level i, blocks of 2^i tokens come in pairs. Every pair of tokens s < t meets at one level, where
s is in the first block of a pair and t in the second. Everything here is made of two-dimensional
matrix products, so that it runs inside a Pallas TPU block.
"""

import jax
import jax.numpy as jnp

from lowrank_attn.ops.rules.base import dot


@jax.custom_jvp
def unit_lower_inverse(A: jax.Array) -> jax.Array:
    """(I + A)^-1 for strictly lower triangular A [C, C], float32.

    The inverse of a lower triangular block is put together from those of its two halves:

        [[L, 0], [N, R]]^-1 = [[L^-1, 0], [-R^-1 N L^-1, R^-1]]

    which is as stable as forward substitution. The shorter (I - A)(I + A^2)(I + A^4)... is not: the
    powers of A grow like binomials although the inverse is small.
    """
    row, column = _indices(A.shape[0])
    X = jnp.where(row == column, 1.0, jnp.where(_meet(row, column, 0), -A, 0.0))
    for i in range(1, _levels(A.shape[0])):
        N = jnp.where(_meet(row, column, i), A, 0.0)
        X = X - dot(X, dot(N, X, (1, 0)), (1, 0))
    return X


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    X = unit_lower_inverse(*primals)
    return X, -dot(X, dot(tangents[0], X, (1, 0)), (1, 0))


def decayed_scores(q: jax.Array, k: jax.Array, log_decay: jax.Array) -> jax.Array:
    """Scores sum_m q_tm k_sm exp(sum of log_decay_rm over s < r <= t), and 0 for s > t.

    Where s and t meet, the decay is cut at the border between their blocks, and q and k are both
    multiplied by exponentials of sums <= 0: nothing overflows, and a factor underflows only where
    the whole decay does, whatever the decays are.

    Args:
        q: [C, M], k: [C, M].
        log_decay: [C, M], float32, <= 0.

    Returns:
        [C, C], float32.
    """
    C = q.shape[0]
    row, column = _indices(C)
    own = jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=1, keepdims=True)
    scores = jnp.where(row == column, own, 0.0)
    for i in range(_levels(C)):
        second = (row >> i) & 1 == 1
        to_border = (second & (column <= row)) | (~second & (column > row))
        to_border &= row >> i == column >> i
        decay = jnp.exp(dot(to_border.astype(jnp.float32), log_decay, (1, 0)))  # [C, M]
        between = dot((q * decay).astype(q.dtype), (k * decay).astype(k.dtype), (1, 1))
        scores += jnp.where(_meet(row, column, i), between, 0.0)
    return scores


def _indices(C):
    return [jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1)]


def _levels(C):
    return (C - 1).bit_length()


def _meet(row, column, i):
    """Whether token s of the column is in the first block and t of the row in the second."""
    return ((row >> i) ^ (column >> i) == 1) & (row > column)
