"""Scalar decay: S <- exp(g) S + k v^T, y = S^T q, with g = log_decay <= 0 per token and head.

Source: RetNet (Sun et al. 2023) equation 5 with a data-dependent decay, as in Mamba-2 and simple
GLA. There is no output normalisation here; a fixed decay is a constant `log_decay`.
"""

import jax.numpy as jnp

from lowrank_attn.ops.rules.base import Parts, Rule, chunk_of_parts, running_sum


def _step(S, q, k, v, gates):
    decay = jnp.exp(gates["log_decay"].astype(jnp.float32))
    S = decay * S + k.astype(jnp.float32)[:, None] * v.astype(jnp.float32)[None, :]
    return q.astype(jnp.float32) @ S, S


def _parts(q, k, v, gates, see, dot):
    C = q.shape[0]
    total = running_sum(gates["log_decay"].astype(jnp.float32))  # [C, 1], falls from <= 0
    # exp of a difference of sums, never a quotient of exponentials, which would overflow; hidden
    # pairs have a positive difference and are set to 0 before the exponential
    between = jnp.where(see.pairs > 0, total - total.T, 0.0)
    scores = dot(q, k, (1, 1)) * (see.pairs * jnp.exp(between))  # [C, C]
    to_end = see.end * jnp.exp(total[C - 1 :] - total)
    y = dot(scores.astype(v.dtype), v, (1, 0))
    S = dot((k * to_end).astype(k.dtype), v, (0, 0))
    return Parts(y, S, see.start * jnp.exp(total), see.keep * jnp.exp(total[C - 1]))


decay = Rule(gates=("log_decay",), step=_step, chunk=chunk_of_parts(_parts), parts=_parts)
