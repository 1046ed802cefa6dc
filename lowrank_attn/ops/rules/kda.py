"""Kimi Delta Attention: the gated delta rule with a decay per feature.

    S' = diag(exp(g)) S,  S <- S' + k u^T with u = beta (v - S'^T k),  y = S^T q

with g = log_decay [M] <= 0 per token and head, and beta in [0, 1] per token and head.

Source: Kimi Linear (arXiv 2510.26692) section 3. The query is not scaled here, and keys are not
normalised; see `delta`.
"""

import jax.numpy as jnp

from lowrank_attn.ops.rules.base import Rule, dot, visibility
from lowrank_attn.ops.rules.delta import corrections, write
from lowrank_attn.ops.rules.gla import gla
from lowrank_attn.ops.rules.halving import decayed_scores


def _step(S, q, k, v, gates):
    decay = jnp.exp(gates["log_decay"].astype(jnp.float32))
    S = write(decay[:, None] * S, k, v, gates["beta"])
    return q.astype(jnp.float32) @ S, S


def _chunk(S, q, k, v, gates, run):
    C = q.shape[0]
    see = visibility(C, run)
    g = gates["log_decay"].astype(jnp.float32)
    from_start = jnp.exp(dot(visibility(C, None).pairs, g, (1, 0)))  # [C, M]
    seen = see.start * dot((k * from_start).astype(k.dtype), S, (1, 0))
    u = corrections(see.pairs * decayed_scores(k, k, g), seen, v, gates["beta"])
    return gla.chunk(S, q, k, u, gates, run)


kda = Rule(
    gates=("log_decay", "beta"),
    step=_step,
    chunk=_chunk,
    per_feature=("log_decay",),
    sums=False,
    unit_keys=True,
    most_tokens=64,
)
