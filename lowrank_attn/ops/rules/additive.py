"""Plain linear attention: S <- S + k v^T, y = S^T q.

Source: Katharopoulos et al. 2020, equations 8 to 12; their normaliser lives in `ops.normalize`.
"""

import jax.numpy as jnp

from lowrank_attn.ops.rules.base import Parts, Rule, chunk_of_parts


def _step(S, q, k, v, gates):
    S = S + k.astype(jnp.float32)[:, None] * v.astype(jnp.float32)[None, :]
    return q.astype(jnp.float32) @ S, S


def _parts(q, k, v, gates, see, dot):
    scores = dot(q, k, (1, 1)) * see.pairs  # [C, C]
    y = dot(scores.astype(v.dtype), v, (1, 0))
    return Parts(y, dot((k * see.end).astype(k.dtype), v, (0, 0)), see.start, see.keep)


additive = Rule(gates=(), step=_step, chunk=chunk_of_parts(_parts), parts=_parts)
