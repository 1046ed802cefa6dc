"""Scalar decay: S <- exp(g) S + k v^T, y = S^T q, with g = log_decay <= 0 per token and head.

Source: RetNet (Sun et al. 2023) equation 5 with a data-dependent decay, as in Mamba-2 and simple
GLA. There is no output normalisation here; a fixed decay is a constant `log_decay`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_attn.ops.rules.base import Parts, Rule, Visibility, chunk_of_parts, running_sum


class Decays(NamedTuple):
    """Decays in a chunk, float32, 0 where `Visibility` says that nothing is seen.

    Attributes:
        pairs: [C, C], of what the token of the column wrote, when that of the row reads it.
        start: [C, 1], of the state that entered the chunk, when each token reads it.
        end: [C, 1], of what each token wrote, at the end of the chunk.
        keep: scalar, of the state that entered, at the end of the chunk.
    """

    pairs: jax.Array
    start: jax.Array
    end: jax.Array
    keep: jax.Array


def decays(log_decay: jax.Array, see: Visibility) -> Decays:
    """Decays of a chunk with log_decay [C], accurate also right behind very strong ones.

    They are exponentials of differences of sums, never quotients of exponentials, which would
    overflow. Sums are taken of multiples of 1/16, which is exact up to 2^20, and of the rest: small
    differences of large sums would lose what matters.
    """
    g = log_decay.astype(jnp.float32)
    coarse = jax.lax.stop_gradient(jnp.round(16 * g) / 16)
    coarse, fine = running_sum(coarse), running_sum(g - coarse)  # [C, 1] each
    start = coarse + fine
    between = (coarse - coarse.T) + (fine - fine.T)
    end = (coarse[-1:] - coarse) + (fine[-1:] - fine)
    # hidden pairs have a positive difference, which is set to 0 before the exponential
    return Decays(
        see.pairs * jnp.exp(jnp.where(see.pairs > 0, between, 0.0)),
        see.start * jnp.exp(start),
        see.end * jnp.exp(end),
        see.keep * jnp.exp(start[-1]),
    )


def _step(S, q, k, v, gates):
    decay = jnp.exp(gates["log_decay"].astype(jnp.float32))
    S = decay * S + k.astype(jnp.float32)[:, None] * v.astype(jnp.float32)[None, :]
    return q.astype(jnp.float32) @ S, S


def _parts(q, k, v, gates, see, dot):
    to = decays(gates["log_decay"], see)
    scores = dot(q, k, (1, 1)) * to.pairs  # [C, C]
    y = dot(scores.astype(v.dtype), v, (1, 0))
    # decayed values, not keys: XLA's CPU backend (jax 0.10 to 0.12) cannot run some of the latter
    S = dot(k, (v * to.end).astype(v.dtype), (0, 0))
    return Parts(y, S, to.start, to.keep)


decay = Rule(gates=("log_decay",), step=_step, chunk=chunk_of_parts(_parts), parts=_parts)
