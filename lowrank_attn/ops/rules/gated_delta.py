"""Gated delta rule: the delta rule on a state that decays first.

    S' = exp(g) S,  S <- S' + k u^T with u = beta (v - S'^T k),  y = S^T q

with g = log_decay <= 0 and beta in [0, 1] per token and head.

Source: Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) section 3. The query is not scaled here,
and keys are not normalised; see `delta`.
"""

import jax.numpy as jnp

from lowrank_attn.ops.rules.base import Rule, dot, visibility
from lowrank_attn.ops.rules.decay import decay, decays
from lowrank_attn.ops.rules.delta import corrections, write


def _step(S, q, k, v, gates):
    S = write(jnp.exp(gates["log_decay"].astype(jnp.float32)) * S, k, v, gates["beta"])
    return q.astype(jnp.float32) @ S, S


def _chunk(S, q, k, v, gates, run):
    to = decays(gates["log_decay"], visibility(q.shape[0], run))
    u = corrections(to.pairs * dot(k, k, (1, 1)), to.start * dot(k, S, (1, 0)), v, gates["beta"])
    return decay.chunk(S, q, k, u, gates, run)


gated_delta = Rule(
    gates=("log_decay", "beta"),
    step=_step,
    chunk=_chunk,
    sums=False,
    unit_keys=True,
    most_tokens=64,
)
