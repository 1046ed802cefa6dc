"""Decay per feature: S <- diag(exp(g)) S + k v^T, y = S^T q, with g = log_decay [M] <= 0 per token.

Exact for decays of any strength, also within a chunk: see `halving.decayed_scores`.

Source: gated linear attention (GLA, Yang et al. 2024, arXiv 2312.06635) section 4; its chunks have
one level of blocks, inside which decays are formed token by token. The query is not scaled here.
"""

import jax.numpy as jnp

from lowrank_attn.ops.rules.base import Rule, dot, visibility
from lowrank_attn.ops.rules.halving import decayed_scores


def _step(S, q, k, v, gates):
    decay = jnp.exp(gates["log_decay"].astype(jnp.float32))
    S = decay[:, None] * S + k.astype(jnp.float32)[:, None] * v.astype(jnp.float32)[None, :]
    return q.astype(jnp.float32) @ S, S


def _chunk(S, q, k, v, gates, run):
    C = q.shape[0]
    see = visibility(C, run)
    g = gates["log_decay"].astype(jnp.float32)
    lower = visibility(C, None).pairs
    from_start = jnp.exp(dot(lower, g, (1, 0)))  # [C, M]
    to_end = jnp.exp(dot(1 - lower, g, (1, 0)))
    scores = see.pairs * decayed_scores(q, k, g)
    y = dot(scores.astype(v.dtype), v, (1, 0))
    y += see.start * dot((q * from_start).astype(q.dtype), S, (1, 0))
    S = see.keep * from_start[C - 1 :].T * S
    S += dot((k * (see.end * to_end)).astype(k.dtype), v, (0, 0))
    return y, S


gla = Rule(
    gates=("log_decay",), step=_step, chunk=_chunk, per_feature=("log_decay",), most_tokens=64
)
