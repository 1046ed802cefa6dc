"""Plain linear attention: S <- S + k v^T, y = S^T q.

Source: Katharopoulos et al. 2020, equations 8 to 12; their normaliser lives in `ops.normalize`.
"""

import jax.numpy as jnp

from lowrank_attn.ops.rules.base import Rule, dot, visibility


def _step(S, q, k, v, gates):
    S = S + k.astype(jnp.float32)[:, None] * v.astype(jnp.float32)[None, :]
    return q.astype(jnp.float32) @ S, S


def _chunk(S, q, k, v, gates, run):
    see = visibility(q.shape[0], run)
    scores = dot(q, k, (1, 1)) * see.pairs  # [C, C]
    y = dot(scores.astype(v.dtype), v, (1, 0)) + see.start * dot(q, S, (1, 0))
    S = see.keep * S + dot((k * see.end).astype(k.dtype), v, (0, 0))
    return y, S


additive = Rule(gates=(), step=_step, chunk=_chunk)
