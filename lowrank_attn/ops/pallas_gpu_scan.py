"""The causal scan over features in memory, for Hopper GPUs.

One block owns one head and 64 or 128 columns of its state, which stays in the registers of one
warpgroup in float32. That warpgroup publishes a bfloat16 copy before each chunk of 64 tokens; other
warpgroups turn it into outputs, and one moves tiles with the TMA engine. Tokens beyond T are read
as zeros and never written, by the bounds of the tensor maps.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.pallas_gpu_base import (
    SHARED_BYTES,
    C,
    as_operand,
    best_split,
    launch,
    mod,
    ring,
    tiles,
)

MIN_TOKENS_PER_SEGMENT = 1024


class Denominator(NamedTuple):
    """Divide outputs by d + epsilon (d - epsilon for d < 0), d = offset + the sum of the scores."""

    offset: float
    epsilon: float


class Scan(NamedTuple):
    """What `scan` returns.

    Attributes:
        y: [B, T, H, V] bfloat16.
        S: [B, H, K, V] float32, the state after the last token (of a reverse scan: the first).
        z: [B, H, K] float32, the sum of all k, or None without a denominator.
        d: [B, T, H] float32, the denominators without epsilon, or None.
    """

    y: jax.Array
    S: jax.Array
    z: jax.Array | None
    d: jax.Array | None


class _Plan(NamedTuple):
    """How a scan is laid over the GPU: sizes of blocks, and the chunks of each segment."""

    B: int
    H: int
    T: int
    K: int
    V: int
    columns: int  # of the state, per block
    readers: int  # warpgroups that compute outputs, of alternating chunks
    slots: int
    segments: int
    chunks: int  # per segment
    reverse: bool

    def chunk(self, n):
        """Where the n-th chunk of the scan lies."""
        return self.segments * self.chunks - 1 - n if self.reverse else n

    def rows(self, ref, b, h, n, columns=slice(None)):
        """The rows of the n-th chunk of one head of [B, T, heads, columns]."""
        n = self.chunk(n)
        head = lax.div(h, jnp.int32(self.H // ref.shape[2]))
        return ref.at[b, pl.ds(n * C, C), head, columns]


def scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    S: jax.Array,
    z: jax.Array | None = None,
    *,
    denominator: Denominator | None = None,
    reverse: bool = False,
    interpret=None,
) -> Scan:
    """y_t = sum_{s <= t} (q_t . k_s) v_s + q_t S, in time linear in T.

    The backward pass of this operation is three more calls with other roles, two of them in
    reverse (s >= t).

    Args:
        q, k: [B, T, Hx, K] bfloat16, K one of 64, 128, 192, 256. Heads of q, k and v may be fewer
            than H, the largest number among them: consecutive groups then share one.
        v: [B, T, Hx, V] bfloat16, V a multiple of 64, at most 256.
        S: [B, H, K, V] float32, the initial state.
        z: [B, H, K] float32, the initial sum of keys, with a denominator.
        denominator: divide y by the sum of its scores.
        reverse: scan from the last token to the first.
        interpret: see `pallas_gpu_base.launch`.

    Any T: ragged ends cost the rest of a chunk. With few heads, T is cut into segments whose
    totals come from a first pass over k and v.
    """
    plan = _plan(q, k, v, denominator is not None, reverse)
    S = S[:, :, None]
    z = None if z is None else z[:, :, None]
    if plan.segments > 1:
        totals = _segment_totals(k, v, plan, z is not None, interpret)
        S = _prefix(S, totals[0])
        z = None if z is None else _prefix(z, totals[1][..., 0])
    out = _scan_segments(q, k, v, S, z, plan, denominator, interpret)
    y, S = out[0], out[1][:, :, -1]
    if denominator is None:
        return Scan(y, S, None, None)
    return Scan(y, S, out[2][:, :, -1], jnp.moveaxis(out[3][:, :, : plan.T], 1, 2))


def _plan(q, k, v, with_sum, reverse):
    B, T, _, K = q.shape
    H = max(x.shape[2] for x in (q, k, v))
    V = v.shape[3]
    columns = 128 if K <= 128 and V == 256 else 64
    total = pl.cdiv(T, C)
    segments = best_split(B * H * (V // columns), min(T // MIN_TOKENS_PER_SEGMENT, 16), 0.5)
    readers = 1 if with_sum and K == 256 else 2  # a second one has no room for its outputs there
    chunks = pl.cdiv(pl.cdiv(total, segments), readers) * readers
    fixed = (2 * K + readers * C) * columns * 2 + (K * 4 + 3072 if with_sum else 0)
    slots = min((SHARED_BYTES - fixed) // (C * (2 * K + columns) * 2), 4) // readers * readers
    return _Plan(B, H, T, K, V, columns, readers, slots, segments, chunks, reverse)


def _prefix(first, totals):
    """The state that enters each segment: [B, H, 1, ..] and [B, H, N - 1, ..] to [B, H, N, ..]."""
    parts = jnp.split(totals, totals.shape[2], axis=2)
    return jnp.concatenate(list(itertools.accumulate([first, *parts])), axis=2)


def _ones():
    """A tile of ones; a product with it sums rows into 8 equal columns."""
    return jnp.ones((8, C), jnp.bfloat16)


def _scan_segments(q, k, v, S, z, plan, denominator, interpret):
    B, H, T, K, V, columns, readers, slots, segments, chunks, reverse = plan
    with_sum = denominator is not None
    registers = {1: (216, 240), 2: (152, 168)}[readers]

    def body(*refs):
        q_ref, k_ref, v_ref, S_ref, *refs = refs
        z_ref, ones_ref, *refs = refs if with_sum else (None, None, *refs)
        y_ref, S_end_ref, *refs = refs
        z_end_ref, d_ref, *refs = refs if with_sum else (None, None, *refs)
        q_s, k_s, v_s, S_s, y_s, q_full, kv_full, free, S_full, S_free, *refs = refs
        z_s, ones_s, ones_full, *refs = refs if with_sum else (None, None, None, *refs)
        wg, b, h, g, block = (lax.axis_index(n) for n in ("wg", "b", "h", "segment", "block"))
        own = pl.ds(block * columns, columns)

        @pl.when(wg == readers + 1)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")
            if with_sum:
                plgpu.copy_gmem_to_smem(ones_ref, ones_s, ones_full)

            def load(n, slot):
                at = (b, h, g * chunks + n)
                plgpu.copy_gmem_to_smem(plan.rows(k_ref, *at), k_s.at[slot], kv_full.at[slot])
                plgpu.copy_gmem_to_smem(plan.rows(v_ref, *at, own), v_s.at[slot], kv_full.at[slot])
                plgpu.copy_gmem_to_smem(plan.rows(q_ref, *at), q_s.at[slot], q_full.at[slot])

            ring(chunks, slots, free, load)

        @pl.when(wg == readers)
        def _advance_state():
            plgpu.set_max_registers(registers[1], action="increase")
            if with_sum:
                plgpu.barrier_wait(ones_full)

            first = plgpu.load(
                S_ref.at[b, h, g, :, own], layout=plgpu.Layout.WGMMA, optimized=False
            )
            if with_sum:
                z_first = plgpu.load(
                    z_ref.at[b, h, g], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
                )

                z_first = lax.broadcast_in_dim(z_first, (K, 8), [0])

            def state(acc, first):  # the interpreter cannot write to accumulators
                return acc[...] if interpret is None else acc[...] + first

            def run(S_acc, z_acc=None):
                if interpret is None:
                    S_acc[...] = first
                    if with_sum:
                        z_acc[...] = z_first

                def advance(n, copy):
                    slot = mod(n, slots)
                    S_s[copy] = lax.optimization_barrier(state(S_acc, first)).astype(jnp.bfloat16)
                    if with_sum:
                        z = jnp.sum(state(z_acc, z_first), axis=1) * 0.125
                        z_s[copy] = z.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(S_full.at[copy])
                    plgpu.barrier_wait(kv_full.at[slot])
                    k_t = k_s.at[slot].transpose((1, 0))
                    plgpu.wgmma(S_acc, k_t, v_s.at[slot])
                    if with_sum:
                        plgpu.wgmma(z_acc, k_t, ones_s.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                ring(chunks, 2, S_free, advance)
                S_end_ref[b, h, g, :, own] = state(S_acc, first)
                if with_sum:
                    z_end_ref[b, h, g] = jnp.sum(state(z_acc, z_first), axis=1) * 0.125

            accs = [plgpu.ACC((K, columns), jnp.float32)]
            if with_sum:
                accs.append(plgpu.ACC((K, 8), jnp.float32))
            pl.run_scoped(run, *accs)

        @pl.when(wg < readers)
        def _write_outputs():
            plgpu.set_max_registers(registers[0], action="increase")
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, (C, C), i, layout=plgpu.Layout.WGMMA)
                for i in (0, 1)
            )
            visible = row <= column if reverse else row >= column

            @pl.loop(0, chunks // readers)
            def _(i):
                n = i * readers + wg
                slot, copy = mod(n, slots), mod(n, 2)
                position = g * chunks + n
                plgpu.barrier_wait(kv_full.at[slot])
                plgpu.barrier_wait(q_full.at[slot])

                def attend(scores, acc):
                    plgpu.wgmma(scores, q_s.at[slot], k_s.at[slot].transpose((1, 0)))
                    weights = jnp.where(visible, scores[...], 0.0).astype(jnp.bfloat16)
                    operand = as_operand(weights, refs[0].at[wg] if refs else None)
                    plgpu.barrier_wait(S_full.at[copy])
                    plgpu.wgmma(acc, operand, v_s.at[slot])
                    plgpu.wgmma(acc, q_s.at[slot], S_s.at[copy])
                    if not with_sum:
                        return acc[...]
                    d = _denominators(weights, q_s.at[slot], z_s.at[copy], K) + denominator.offset

                    @pl.when(block == 0)
                    def _():
                        d_ref[b, h, pl.ds(plan.chunk(position) * C, C)] = d

                    d = d + jnp.where(d < 0, -denominator.epsilon, denominator.epsilon)
                    return acc[...] / lax.broadcast_in_dim(d, (C, columns), [0])

                y = pl.run_scoped(
                    attend, plgpu.ACC((C, C), jnp.float32), plgpu.ACC((C, columns), jnp.float32)
                )
                if with_sum:  # q and z were read by ordinary loads: order them before the refill
                    plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[slot])
                plgpu.barrier_arrive(S_free.at[copy])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                y_s[wg] = y.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(y_s.at[wg], plan.rows(y_ref, b, h, position, own))

            plgpu.wait_smem_to_gmem(0)

    out_type = [
        jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
        jax.ShapeDtypeStruct((B, H, segments, K, V), jnp.float32),
    ]
    scratch = [
        tiles(slots, C, K), tiles(slots, C, K), tiles(slots, C, columns), tiles(2, K, columns),
        tiles(readers, C, columns),
        plgpu.Barrier(num_barriers=slots), plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_barriers=2),
    ]  # fmt: skip
    args = [q, k, v, S]
    if with_sum:
        args += [z, _ones()]
        out_type += [
            jax.ShapeDtypeStruct((B, H, segments, K), jnp.float32),
            jax.ShapeDtypeStruct((B, H, segments * chunks * C), jnp.float32),
        ]
        scratch += [plgpu.SMEM((2, K), jnp.bfloat16), tiles(8, C), plgpu.Barrier()]
    if interpret is not None:
        scratch.append(tiles(readers, C, C))
    grid = {"b": B, "h": H, "segment": segments, "block": V // columns}
    return launch(
        body, out_type, grid=grid, warpgroups=readers + 2, scratch=scratch, interpret=interpret
    )(*args)


def _denominators(weights, q_tile, z, K):
    """[C]: the sums of the scores inside the chunk, and q . z, 64 features at a time."""
    d = jnp.sum(weights.astype(jnp.float32), axis=1)
    for i in range(0, K, 64):
        q = plgpu.load(q_tile.at[:, pl.ds(i, 64)], layout=plgpu.Layout.WGMMA)
        part = plgpu.load(z.at[pl.ds(i, 64)], layout=plgpu.Layout.WGMMA.reduce(0))
        part = lax.broadcast_in_dim(part.astype(jnp.float32), (C, 64), [1])
        d = d + jnp.sum(q.astype(jnp.float32) * part, axis=1)
    return d


def _segment_totals(k, v, plan, with_sum, interpret):
    """k^T v, and the sum of k in 8 equal columns, over each segment but the last.

    Returns [B, H, segments - 1, K, V] and, with the sum, [B, H, segments - 1, K, 8], float32.
    """
    B, H, _, K, V, _, _, _, segments, chunks, _ = plan
    workers = 1 if K % 128 else 2
    rows = K // workers
    slots = 4

    def body(k_ref, v_ref, ones_ref, *refs):
        S_ref, *refs = refs
        z_ref, *refs = refs if with_sum else (None, *refs)
        k_s, v_s, ones_s, full, free, ones_full = refs
        wg, b, h, g, block = (lax.axis_index(n) for n in ("wg", "b", "h", "segment", "block"))
        columns = pl.ds(block * 64, 64)

        @pl.when(wg == workers)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(ones_ref, ones_s, ones_full)

            def load(n, slot):
                at = (b, h, g * chunks + n)
                plgpu.copy_gmem_to_smem(plan.rows(k_ref, *at), k_s.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(plan.rows(v_ref, *at, columns), v_s.at[slot], full.at[slot])

            ring(chunks, slots, free, load)

        @pl.when(wg < workers)
        def _sum():
            plgpu.set_max_registers(232, action="increase")
            plgpu.barrier_wait(ones_full)
            own = pl.ds(wg * rows, rows)

            def run(S_acc, z_acc):
                @pl.loop(0, chunks)
                def _(n):
                    slot = mod(n, slots)
                    plgpu.barrier_wait(full.at[slot])
                    k_t = k_s.at[slot, :, own].transpose((1, 0))
                    plgpu.wgmma(S_acc, k_t, v_s.at[slot])
                    if with_sum:
                        plgpu.wgmma(z_acc, k_t, ones_s.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                return S_acc[...], z_acc[...]

            S, z = pl.run_scoped(
                run, plgpu.ACC((rows, 64), jnp.float32), plgpu.ACC((rows, 8), jnp.float32)
            )
            S_ref[b, h, g, own, columns] = S
            if with_sum:

                @pl.when(block == 0)
                def _():
                    z_ref[b, h, g, own] = z

    shape = (B, H, segments - 1, K)
    out_type = [jax.ShapeDtypeStruct((*shape, V), jnp.float32)]
    if with_sum:
        out_type.append(jax.ShapeDtypeStruct((*shape, 8), jnp.float32))
    scratch = [
        tiles(slots, C, K), tiles(slots, C, 64), tiles(8, C),
        plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        plgpu.Barrier(num_arrivals=workers, num_barriers=slots), plgpu.Barrier(),
    ]  # fmt: skip
    grid = {"b": B, "h": H, "segment": segments - 1, "block": V // 64}
    return launch(
        body, out_type, grid=grid, warpgroups=workers + 1, scratch=scratch, interpret=interpret
    )(k, v, _ones())
