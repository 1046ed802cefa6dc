"""Causal linear attention over a sequence that is cut over devices."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lowrank_attn.ops import State
from lowrank_attn.ops.api import prepare
from lowrank_attn.ops.arguments import Arguments, Method
from lowrank_attn.ops.checks import check_tokens
from lowrank_attn.ops.dispatch import dispatch
from lowrank_attn.ops.normalize import needs_denominator
from lowrank_attn.ops.rules import Rule, additive, decay
from lowrank_attn.parallel.halo import halo
from lowrank_attn.parallel.transitions import SCANS, Transition


def causal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str = "context",
    scan: str = "all_gather",
    features=None,
    params=None,
    rule: str | Rule = "additive",
    gates=None,
    normalize: str = "none",
    epsilon: float = 1e-6,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    initial_state: State | None = None,
    chunk_size: int = 128,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, State]:
    """`ops.causal` inside `jax.shard_map`, for a sequence that is cut over a mesh axis.

    Every shard computes what its tokens do to a state, S -> A S + B; these transitions are
    exchanged, each shard applies those before it, and reads its tokens from the state that results.
    What is exchanged does not depend on T: M (P + 1) float32 numbers per head and shard (M more
    with a sum as normaliser) for the rules that add and decay, in each direction. The delta rules
    turn the state by matrices A: M (P + M) numbers, and their local pass has P + M values.

    Args:
        q, k, v, gates, mask, segment_ids, positions: as in `ops.causal`, the shard's own tokens, of
            which every shard has as many; see `pad_tokens`. Documents may cross borders.
            positions None: counted from the start of the whole sequence.
        axis: the mesh axis over which tokens are cut, in their order.
        scan: `all_gather` exchanges all transitions at once; `ppermute` in log2(n) steps, with
            fewer bytes over many shards.
        initial_state: the state before the first token of the whole sequence, the same everywhere.
        features, params, rule, normalize, epsilon, chunk_size, implementation: as in `ops.causal`.
            A `Rule` of your own has to be affine in S and v.

    Returns:
        y of the shard's tokens, and the `State` after the last token of the whole sequence, which
        does not vary over `axis`.

    Raises:
        ValueError: for arguments that do not fit together; the message names the argument.
        NotImplementedError: if the one named implementation cannot do this call.

    Source: LASP-2 (arXiv 2502.07563), with resets, decays and matrices.
    """
    if scan not in SCANS:
        raise ValueError(f"scan={scan!r} is unknown; known: {', '.join(SCANS)}.")
    T, index = q.shape[1], jax.lax.axis_index(axis)
    if positions is None:
        positions = index * T + jnp.arange(T, dtype=jnp.int32)
    args, method = prepare(
        q, k, v, features, params, rule, gates, normalize, epsilon, mask, segment_ids, positions,
        initial_state, chunk_size,
    )  # fmt: skip
    check_tokens("k", k, T)
    own, S = _transition(args, method, implementation), method.join(args.state)
    if segment_ids is None:
        S = SCANS[scan](own, S, axis)
    else:
        changes = segment_ids[:, :1] != halo(segment_ids, axis, 1)
        begins = (changes & (index > 0))[:, :, None, None]
        own = own._replace(keep=jnp.where(begins, 0, own.keep))
        S = jnp.where(begins, 0, SCANS[scan](own, S, axis))
    args = args._replace(state=method.split(S))
    y, state = dispatch("causal", args, method, implementation)
    is_last = index == jax.lax.axis_size(axis) - 1
    return y, jax.lax.psum(jax.tree.map(lambda x: jnp.where(is_last, x, 0), state), axis)


def _transition(args: Arguments, method: Method, implementation) -> Transition:
    """What the tokens of a call do to the joined state; see `Method.join`."""
    if not method.rule.sums or not set(method.rule.gates) <= {"log_decay"}:
        return _by_columns(args, method, implementation)
    B, H, M, _ = args.state.S.shape
    keep = jnp.ones((B, H, 1))
    for log_decay in args.gates.values():
        total = jnp.sum(log_decay.astype(jnp.float32), axis=1)
        keep = jnp.exp(total.reshape(B, H, -1))
    if args.reset is not None:
        keep = jnp.where(jnp.any(args.reset, axis=1)[:, None, None], 0, keep)
    keep = jnp.broadcast_to(keep[..., None], (B, H, M, 1))
    args = args._replace(state=jax.tree.map(jnp.zeros_like, args.state))
    if method.rule == additive or (
        method.rule == decay and not needs_denominator(method.normalize)
    ):
        state = _sum_of_keys(args, method, implementation)
    else:
        _, state = dispatch("causal", args, method, implementation)
    return Transition(keep, method.join(state))


def _sum_of_keys(args, method, implementation):
    """The state after the last token by one product: decays are factors of the values."""
    if args.reset is not None:
        run = jnp.cumsum(args.reset.astype(jnp.int32), axis=1)
        mask = run == run[:, -1:]
        args = args._replace(mask=mask if args.mask is None else mask & args.mask, reset=None)
    if method.rule == decay:
        log_decay = args.gates["log_decay"].astype(jnp.float32)
        later = jnp.flip(jnp.cumsum(jnp.flip(log_decay[:, 1:], 1), axis=1), 1)
        to_end = jnp.exp(jnp.pad(later, [(0, 0), (0, 1), (0, 0)]))[..., None]
        args = args._replace(v=(args.v * to_end).astype(args.v.dtype), gates={})
    args = args._replace(q=args.q[:, :1], q_positions=args.q_positions[..., :1])
    _, state = dispatch("bidirectional", args, method._replace(rule=additive), implementation)
    return state


def _by_columns(args, method, implementation):
    """For any rule that is affine: the columns of A are what becomes of unit states without values.

    The state [I, 0] turns into [A, B] by the values [0, v].
    """
    B, H, M, P = args.state.S.shape
    unit = jnp.broadcast_to(jnp.eye(M), (B, H, M, M))
    S = jnp.concatenate([unit, jnp.zeros_like(args.state.S)], axis=-1)
    nothing = jnp.zeros_like(args.v, shape=(*args.v.shape[:3], M))
    args = args._replace(v=jnp.concatenate([nothing, args.v], axis=-1), state=State(S, None))
    _, state = dispatch("causal", args, method._replace(normalize="none"), implementation)
    return Transition(state.S[..., :M], state.S[..., M:])
