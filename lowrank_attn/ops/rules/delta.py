"""Delta rule: S <- S + k u^T with u = beta (v - S^T k), y = S^T q; beta in [0, 1] per token, head.

What the state answers to k, S^T k, is moved towards v. With |k| > 1 it overshoots, and diverges
where beta |k|^2 > 2.

Source: DeltaNet (Yang et al. 2024, arXiv 2406.06484) section 2.2, by the WY form of section 3.
The query is not scaled here, and keys are not normalised.
"""

import jax
import jax.numpy as jnp

from lowrank_attn.ops.rules.additive import additive
from lowrank_attn.ops.rules.base import Rule, as_column, dot, visibility
from lowrank_attn.ops.rules.halving import unit_lower_inverse


def write(S: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array) -> jax.Array:
    """One token's S + k u^T, u = beta (v - S^T k), for S [M, P], k [M], v [P] and scalar beta."""
    k, v, beta = (x.astype(jnp.float32) for x in (k, v, beta))
    return S + k[:, None] * (beta * (v - k @ S))[None, :]


def corrections(key_scores: jax.Array, seen: jax.Array, v: jax.Array, beta: jax.Array) -> jax.Array:
    """The u [C, P] of a chunk, u_t = beta_t (v_t - seen_t - sum_{s < t} key_scores_ts u_s).

    With them the delta rules are the rules without correction: S <- decay S + k u^T.

    Args:
        key_scores: [C, C], what key t reads of what key s wrote, 0 where it sees nothing; float32.
        seen: [C, P], what key t reads of the state that enters the chunk; float32.
        v: [C, P].
        beta: [C].

    Returns:
        [C, P] in the dtype of v.
    """
    C = v.shape[0]
    beta = as_column(beta.astype(jnp.float32))
    earlier = 1 - visibility(C, None).pairs.T
    inverse = unit_lower_inverse(beta * earlier * key_scores)
    return dot(inverse, beta * (v.astype(jnp.float32) - seen), (1, 0)).astype(v.dtype)


def _step(S, q, k, v, gates):
    S = write(S, k, v, gates["beta"])
    return q.astype(jnp.float32) @ S, S


def _chunk(S, q, k, v, gates, run):
    see = visibility(q.shape[0], run)
    seen = see.start * dot(k, S, (1, 0))
    u = corrections(see.pairs * dot(k, k, (1, 1)), seen, v, gates["beta"])
    return additive.chunk(S, q, k, u, {}, run)


delta = Rule(gates=("beta",), step=_step, chunk=_chunk, sums=False, unit_keys=True, most_tokens=64)
