"""The causal scan over features in memory, for Hopper GPUs, with a decay or without."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lowrank_attn.ops.pallas_gpu_base import SHARED_BYTES, C, best_split, pad_to
from lowrank_attn.ops.pallas_gpu_scan_kernel import Denominator, Plan, scan_segments
from lowrank_attn.ops.pallas_gpu_totals import segment_totals

MIN_TOKENS_PER_SEGMENT = 1024
MAX_FEATURES_PER_BLOCK = 256
CHUNKS_PER_STATE = 4


class Scan(NamedTuple):
    """What `scan` returns.

    Attributes:
        y: [B, T, H, V] bfloat16, or float32 where features were cut into parts.
        S: [B, H, M, V] float32, the state after the last token (of a reverse scan: the first).
        z: [B, H, M] float32, the sum of all k, or None without a denominator.
        d: [B, T, H] float32, the denominators without epsilon, or the row sums, or None.
        states: [B, H, N, M, V] float32, the state after each CHUNKS_PER_STATE chunks (of a reverse
            scan: before), the last of which may be beyond T, or None.
    """

    y: jax.Array
    S: jax.Array
    z: jax.Array | None
    d: jax.Array | None
    states: jax.Array | None


def scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    S: jax.Array,
    z: jax.Array | None = None,
    *,
    log_decay: jax.Array | None = None,
    denominator: Denominator | None = None,
    reverse: bool = False,
    strict: bool = False,
    with_states: bool = False,
    row_sums: bool = False,
    interpret=None,
) -> Scan:
    """y_t = sum_{s <= t} exp(g_{s+1} + .. + g_t) (q_t . k_s) v_s + exp(g_1 + .. + g_t) q_t S.

    In time linear in T. The backward pass of this operation is three more calls with other roles,
    two of them in reverse: s >= t, and g_{t+1} + .. + g_s.

    Args:
        q, k: [B, T, Hx, M] bfloat16, M a multiple of 64, above 256 of 64 times the number of parts
            of at most 256. Heads of q, k and v may be fewer than H, the largest number among them:
            consecutive groups then share one.
        v: [B, T, Hx, V] bfloat16, V a multiple of 64.
        S: [B, H, M, V] float32, the initial state.
        z: [B, H, M] float32, the initial sum of keys, with a denominator.
        log_decay: [B, T, Hx] float32, the g, or None for 0. At most 0, and at least -105 or so:
            sums over a chunk of 64 must keep differences of 1e-3.
        denominator: divide y by the sum of its scores. Not with decays or more than 256 features.
        reverse: scan from the last token to the first.
        strict: leave s = t out of y.
        with_states: return `Scan.states`.
        row_sums: return the sums of the last 64 columns of y, before they are rounded, as `Scan.d`.
            Not with a denominator.
        interpret: see `pallas_gpu_base.launch`.

    Any T: ragged ends cost the rest of a chunk. With few heads, T is cut into segments whose
    totals come from a first pass over k and v.
    """
    B, T, _, M = q.shape
    plan = _plan(
        q, k, v, denominator, log_decay is not None, reverse, strict, with_states, row_sums
    )
    split = (B, plan.H, -1, plan.K)
    S = S.reshape(*split, plan.V)
    z = None if z is None else z.reshape(split)
    decays = None if log_decay is None else _sums_in_chunks(log_decay, plan)
    if plan.segments > 1:
        values = v if decays is None else _decayed_to_ends(v, decays, plan)
        S_totals, z_totals = segment_totals(k, values, plan, z is not None, interpret)
        S = _prefix(S, S_totals, None if decays is None else _kept(decays[1], plan))
        z = None if z is None else _prefix(z, z_totals, None)
    gates = None
    if decays is not None:
        sums, total = decays
        gates = jnp.concatenate([sums, jnp.broadcast_to(total, sums.shape)], axis=3)
    y, states, *of_sum = scan_segments(q, k, v, S, z, gates, plan, denominator, interpret)
    states = states.reshape(B, plan.H // plan.N, plan.N, -1, plan.K, plan.V)
    states = jnp.moveaxis(states, 2, 3).reshape(B, plan.H // plan.N, -1, M, plan.V)
    S = states[:, :, 0 if reverse else -1]
    states = states if with_states else None
    if plan.N > 1:
        y = jnp.sum(y.reshape(B, T, -1, plan.N, plan.V), axis=3, dtype=jnp.float32)
    z = of_sum.pop(0) if denominator is not None else None
    d = jnp.moveaxis(of_sum[0][:, :, :T], 1, 2) if of_sum else None
    if d is not None and plan.N > 1:
        d = jnp.sum(d.reshape(B, T, -1, plan.N), axis=3)
    return Scan(y, S, z, d, states)


def feature_parts(M: int) -> int:
    """Into how many parts of equal size M features are cut."""
    return pl.cdiv(M, MAX_FEATURES_PER_BLOCK)


def _plan(q, k, v, denominator, gated, reverse, strict, with_states, row_sums):
    B, T, _, M = q.shape
    N = feature_parts(M)
    K, V, H = M // N, v.shape[3], N * max(x.shape[2] for x in (q, k, v))
    columns = 128 if K <= 128 and V % 256 == 0 and not row_sums else 64
    total = pl.cdiv(T, C)
    segments = best_split(B * H * (V // columns), min(T // MIN_TOKENS_PER_SEGMENT, 16), 0.5)
    readers = 1 if gated and K == 256 else 2  # no room for the outputs of two beside decayed values
    multiple = CHUNKS_PER_STATE if with_states else readers
    chunks = pl.cdiv(pl.cdiv(total, segments), multiple) * multiple
    fixed = (2 * K + (readers + gated) * C) * columns * 2 + (2048 if denominator else 0)
    per_slot = C * (2 * K + columns) * 2 + (1024 if gated else 0)
    slots = min((SHARED_BYTES - fixed) // per_slot, 4) // readers * readers
    per_state = CHUNKS_PER_STATE if with_states else 0
    return Plan(
        B, H, T, N, K, V, columns, readers, slots, segments, chunks, per_state, reverse, strict,
        row_sums,
    )  # fmt: skip


def _prefix(first, totals, kept):
    """The states that enter the segments: [B, H, 1, ..] and [B, H, n, ..] to [B, H, n + 1, ..]."""
    states = [first[:, :, 0]]
    for i in range(totals.shape[2]):
        before = states[-1] if kept is None else states[-1] * kept[:, :, i, None, None]
        states.append(before + totals[:, :, i])
    return jnp.stack(states, axis=2)


def _sums_in_chunks(log_decay, plan):
    """Sums from where the scan enters a chunk, [B, Hx, all chunks, C], and totals [.., 1].

    They run up to and with each token; in reverse, where a decay lies between a token and the one
    before it, without.
    """
    n = plan.segments * plan.chunks
    g = jnp.moveaxis(pad_to(log_decay, 1, n * C), 1, 2).reshape(plan.B, -1, n, C)
    sums = jax.lax.cumsum(g, axis=3, reverse=plan.reverse)
    if plan.reverse:
        return sums - g, sums[..., :1]
    return sums, sums[..., -1:]


def _decayed_to_ends(v, decays, plan):
    """Values as they are in the state when the scan leaves the segment."""
    sums, total = decays
    totals = total.reshape(*total.shape[:2], plan.segments, plan.chunks)
    later = jax.lax.cumsum(totals, axis=3, reverse=not plan.reverse) - totals
    to_end = jnp.exp(total - sums + later.reshape(total.shape))
    to_end = jnp.moveaxis(to_end.reshape(*to_end.shape[:2], -1)[:, :, : plan.T], 1, 2)
    to_end = jnp.repeat(to_end, v.shape[2] // to_end.shape[2], axis=2)
    return (v * to_end[..., None]).astype(v.dtype)


def _kept(total, plan):
    """How much of the state that enters a segment is left at its end, in the order of the scan."""
    kept = jnp.exp(jnp.sum(total.reshape(*total.shape[:2], plan.segments, -1), axis=3))
    kept = jnp.flip(kept, 2) if plan.reverse else kept
    return jnp.repeat(kept, plan.H // kept.shape[1], axis=1)
