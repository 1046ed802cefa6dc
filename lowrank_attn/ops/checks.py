"""Checks of the arrays that the operations receive; each names the argument that is wrong."""

import jax
import jax.numpy as jnp

from lowrank_attn.ops.arguments import State
from lowrank_attn.ops.rules import Rule


def check_qkv(q: jax.Array, k: jax.Array, v: jax.Array, *, mapped: bool) -> None:
    """Check ranks, dtypes and the sizes that q, k and v share.

    Args:
        q: [B, T, Hq, D], k: [B, S, H, D], v: [B, S, H, P].
        mapped: whether q and k are features already, for the wording only.

    Raises:
        ValueError: if they do not fit together.
    """
    size = "M (features)" if mapped else "D"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {x.shape}, expected four axes [B, T, H, "
                f"{'P' if name == 'v' else size}]."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}, expected a floating dtype.")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}, expected no axis of length 0.")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}, expected {q.shape[0]} as in q.")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has last axis {k.shape[3]}, expected {size} = {q.shape[3]} as in q.")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v begins with {v.shape[:3]}, expected {k.shape[:3]} as in k.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads, expected a multiple of the {k.shape[2]} heads of k and v."
        )


def check_tokens(
    name: str, x: jax.Array, T: int, why: str = "queries and keys are the same tokens"
):
    """Check that x [B, T, ...] has T tokens.

    Raises:
        ValueError: if it has another number.
    """
    if x.shape[1] != T:
        raise ValueError(f"{name} has {x.shape[1]} tokens, expected {T} as in q: {why}.")


def check_gates(gates, rule: Rule, shape: tuple[int, int, int, int]) -> dict:
    """Check that exactly the gates of the rule are there, for shape (B, T, H, M).

    Raises:
        ValueError: if one is missing, unknown or of another shape than [B, T, H], or [B, T, H, M]
            where the rule has one gate per feature.
    """
    gates = {} if gates is None else dict(gates)
    if set(gates) != set(rule.gates):
        raise ValueError(
            f"gates has {sorted(gates) or 'none'}, expected {sorted(rule.gates) or 'none'} for "
            "this rule."
        )
    for name, gate in gates.items():
        per_feature = name in rule.per_feature
        expected = shape if per_feature else shape[:3]
        if gate.shape != expected:
            raise ValueError(
                f"gates[{name!r}] has shape {gate.shape}, expected {expected}: one gate per token "
                f"and {'feature' if per_feature else 'key/value head'}."
            )
    return gates


def check_state(state: State | None, shape: tuple[int, int, int, int], with_z: bool) -> State:
    """Check an initial state against [B, H, M, P], or make zeros.

    Raises:
        ValueError: if S or z has another shape or dtype, or z is there without being needed.
    """
    if state is None:
        return State(
            jnp.zeros(shape, jnp.float32), jnp.zeros(shape[:3], jnp.float32) if with_z else None
        )
    if state.S.shape != shape or state.S.dtype != jnp.float32:
        raise ValueError(
            f"initial_state.S has shape {state.S.shape} and dtype {state.S.dtype}, expected "
            f"{shape} and float32."
        )
    if (state.z is not None) != with_z:
        raise ValueError(
            f"initial_state.z is {'None' if state.z is None else 'an array'}, expected "
            f"{'an array' if with_z else 'None'} for this normaliser: z is kept only by the sums."
        )
    if state.z is not None and (state.z.shape != shape[:3] or state.z.dtype != jnp.float32):
        raise ValueError(
            f"initial_state.z has shape {state.z.shape} and dtype {state.z.dtype}, expected "
            f"{shape[:3]} and float32."
        )
    return state
