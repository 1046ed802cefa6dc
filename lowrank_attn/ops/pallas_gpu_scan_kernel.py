"""The kernel of the causal scan, for Hopper GPUs.

One block owns one head and 64 or 128 columns of its state, which stays in the registers of one
warpgroup in float32. That warpgroup publishes a bfloat16 copy before each chunk of 64 tokens; other
warpgroups turn it into outputs, and one moves tiles with the TMA engine. Tokens beyond T are read
as zeros and never written, by the bounds of the tensor maps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.pallas_gpu_base import (
    C,
    accumulate,
    add_product,
    as_operand,
    launch,
    mod,
    ring,
    tiles,
)


class Denominator(NamedTuple):
    """Divide outputs by d + epsilon (d - epsilon for d < 0), d = offset + the sum of the scores."""

    offset: float
    epsilon: float


class Plan(NamedTuple):
    """How a scan is laid over the GPU.

    A head with more features than one block holds is cut into N parts of K features, each scanned
    as if it were a head: part h of the grid is part h % N of head h // N.
    """

    B: int
    H: int  # heads times N
    T: int
    N: int
    K: int
    V: int
    columns: int  # of the state, per block
    readers: int  # warpgroups that compute outputs, of alternating chunks
    slots: int
    segments: int
    chunks: int  # per segment
    per_state: int  # chunks between two states that are written; 0: the last one only
    reverse: bool
    strict: bool  # a token does not see itself
    row_sums: bool  # the sums of outputs over the last block of columns are written too

    def chunk(self, n):
        """Where the n-th chunk of the scan lies."""
        return self.segments * self.chunks - 1 - n if self.reverse else n

    def head(self, h, heads):
        """Which of `heads` heads the part h of the grid reads; consecutive groups share one."""
        return lax.div(h, jnp.int32(self.H // heads))

    def rows(self, ref, b, h, n, columns=slice(None)):
        """The rows of the n-th chunk of one head of [B, T, heads, columns]."""
        return ref.at[b, pl.ds(self.chunk(n) * C, C), self.head(h, ref.shape[2]), columns]

    def features(self, ref, b, h, n):
        """The K features of the n-th chunk of one head of [B, T, heads, N * K]."""
        return self.rows(ref, b, h, n, pl.ds(mod(h, self.N) * self.K, self.K))


def ones_tile():
    """A tile of ones; a product with it sums rows into 8 equal columns."""
    return jnp.ones((8, C), jnp.bfloat16)


def scan_segments(q, k, v, S, z, gates, plan: Plan, denominator: Denominator | None, interpret):
    """Scan every segment from its own initial state; see `pallas_gpu_scan.scan`.

    Args:
        q, k: [B, T, Hx, N * K] and v: [B, T, Hx, V], bfloat16.
        S: [B, H, segments, K, V] float32.
        z: [B, H, segments, K] float32 with a denominator.
        gates: [B, Hx, all chunks, 2 * C] float32 or None: the sums of log decays from where the
            scan enters a chunk up to each token, and C times the total. Without a denominator.

    Returns:
        y [B, T, H, V] bfloat16 and states [B, H, all chunks / per_state (or 1), K, V] float32; with
        a denominator also z [B, H, K] float32; and d [B, H, all chunks * C] float32 with one or
        with row sums.
    """
    with_sum, gated = denominator is not None, gates is not None
    with_d = with_sum or plan.row_sums
    blocks = plan.V // plan.columns
    K, columns, readers, slots, chunks = plan.K, plan.columns, plan.readers, plan.slots, plan.chunks
    early = not with_sum and not gated  # registers to publish S while products are under way
    registers = {1: (216, 240), 2: (144, 184) if with_sum else (152, 168)}[readers]
    registers = (128, 216) if early else registers  # of readers, and of the state's warpgroup

    def body(*refs):
        q_ref, k_ref, v_ref, S_ref, *refs = refs
        z_ref, ones_ref, *refs = refs if with_sum else (None, None, *refs)
        gates_ref, *refs = refs if gated else (None, *refs)
        y_ref, states_ref, *refs = refs
        z_end_ref, *refs = refs if with_sum else (None, *refs)
        d_ref, *refs = refs if with_d else (None, *refs)
        q_s, k_s, v_s, S_s, y_s, q_full, kv_full, free, S_full, S_free, *refs = refs
        z_s, ones_s, ones_full, *refs = refs if with_sum else (None, None, None, *refs)
        gates_s, decayed_s, *spare = refs if gated else (None, None, *refs)
        wg, b, h, g, block = (lax.axis_index(n) for n in ("wg", "b", "h", "segment", "block"))
        own = pl.ds(block * columns, columns)

        def sums(slot, axis):
            """The sums of log decays, along the rows (axis 1) or the columns of a tile."""
            row = gates_s.at[slot, pl.ds(0, C)]
            # the layouts of a load along rows, marked optimized, would be searched for minutes
            return plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(axis), optimized=axis == 0)

        @pl.when(wg == readers + 1)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")
            if with_sum:
                plgpu.copy_gmem_to_smem(ones_ref, ones_s, ones_full)

            def load(n, slot):
                n = g * chunks + n
                at, full = (b, h, n), kv_full.at[slot]
                plgpu.copy_gmem_to_smem(plan.features(k_ref, *at), k_s.at[slot], full)
                plgpu.copy_gmem_to_smem(plan.rows(v_ref, *at, own), v_s.at[slot], full)
                if gated:
                    of_chunk = gates_ref.at[b, plan.head(h, gates_ref.shape[1]), plan.chunk(n)]
                    plgpu.copy_gmem_to_smem(of_chunk, gates_s.at[slot], full)
                plgpu.copy_gmem_to_smem(plan.features(q_ref, *at), q_s.at[slot], q_full.at[slot])

            ring(chunks, slots, free, load)

        @pl.when(wg == readers)
        def _advance_state():
            plgpu.set_max_registers(registers[1], action="increase")
            if with_sum:
                plgpu.barrier_wait(ones_full)

            def run(S_acc, z_acc=None):
                S_acc[...] = plgpu.load(
                    S_ref.at[b, h, g, :, own], layout=plgpu.Layout.WGMMA, optimized=False
                )
                if with_sum:
                    z = plgpu.load(
                        z_ref.at[b, h, g], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
                    )
                    z_acc[...] = lax.broadcast_in_dim(z, (K, 8), [0])

                def save(n):
                    index = lax.div(plan.chunk(g * chunks + n), jnp.int32(plan.per_state))
                    states_ref[b, h, index, :, own] = S_acc[...]

                def save_last():
                    states_ref[b, h, 0, :, own] = S_acc[...]
                    if with_sum:
                        z_end_ref[b, h] = jnp.sum(z_acc[...], axis=1) * 0.125

                def advance(n, copy):
                    slot = mod(n, slots)
                    S = lax.optimization_barrier(S_acc[...]).astype(jnp.bfloat16)
                    if with_sum:
                        z = (jnp.sum(z_acc[...], axis=1) * 0.125).astype(jnp.bfloat16)

                    def publish():
                        S_s[copy] = S
                        if with_sum:
                            z_s[copy] = z
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(S_full.at[copy])

                    if not early:
                        publish()
                    plgpu.barrier_wait(kv_full.at[slot])
                    k_t, values = k_s.at[slot].transpose((1, 0)), v_s.at[slot]
                    if gated:
                        total = gates_s[slot, C]
                        to_end = jnp.exp(total - sums(slot, 1))
                        for i in range(0, columns, 64):
                            part = pl.ds(i, 64)
                            v = plgpu.load(values.at[:, part], layout=plgpu.Layout.WGMMA)
                            v = v.astype(jnp.float32)
                            v = v * lax.broadcast_in_dim(to_end, v.shape, [0])
                            decayed_s[:, part] = v.astype(jnp.bfloat16)
                        plgpu.commit_smem()
                        values = decayed_s
                        S_acc[...] = S_acc[...] * jnp.exp(total)
                    add_product(S_acc, k_t, values, interpret)
                    if with_sum:
                        add_product(z_acc, k_t, ones_s.transpose((1, 0)), interpret)
                    if early:
                        publish()
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])
                    if plan.per_state:
                        pl.when(mod(n + 1, plan.per_state) == 0)(lambda: save(n))

                ring(chunks, 2, S_free, advance)
                if not plan.per_state:
                    pl.when(g == plan.segments - 1)(save_last)

            accumulate(run, (K, columns), *[(K, 8)] * with_sum, spare=spare[: 1 + with_sum])

        @pl.when(wg < readers)
        def _write_outputs():
            plgpu.set_max_registers(registers[0], action="increase")
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, (C, C), i, layout=plgpu.Layout.WGMMA)
                for i in (0, 1)
            )
            if plan.reverse:
                row, column = column, row
            visible = row > column if plan.strict else row >= column

            @pl.loop(0, chunks // readers)
            def _(i):
                n = i * readers + wg
                slot, copy = mod(n, slots), mod(n, 2)
                position = g * chunks + n
                plgpu.barrier_wait(kv_full.at[slot])
                plgpu.barrier_wait(q_full.at[slot])

                def attend(scores, acc):
                    add_product(scores, q_s.at[slot], k_s.at[slot].transpose((1, 0)), interpret)
                    if gated:
                        plgpu.barrier_wait(S_full.at[copy])
                        add_product(acc, q_s.at[slot], S_s.at[copy], interpret)
                        from_start = sums(slot, 1)
                        between = lax.broadcast_in_dim(from_start, (C, C), [0])
                        between -= lax.broadcast_in_dim(sums(slot, 0), (C, C), [1])
                        weights = scores[...] * jnp.exp(between)
                    else:
                        weights = scores[...]
                    weights = jnp.where(visible, weights, 0.0).astype(jnp.bfloat16)
                    operand = as_operand(weights, spare[-1].at[wg] if spare else None)
                    if gated:
                        kept = lax.broadcast_in_dim(jnp.exp(from_start), (C, columns), [0])
                        acc[...] = acc[...] * kept
                    else:
                        plgpu.barrier_wait(S_full.at[copy])
                        add_product(acc, q_s.at[slot], S_s.at[copy], interpret)
                    add_product(acc, operand, v_s.at[slot], interpret)
                    if not with_d:
                        return acc[...]
                    if with_sum:
                        d = _denominators(weights, q_s.at[slot], z_s.at[copy], K)
                        d = d + denominator.offset
                    else:
                        d = jnp.sum(acc[...], axis=1)

                    @pl.when(block == blocks - 1)
                    def _():
                        d_ref[b, h, pl.ds(plan.chunk(position) * C, C)] = d

                    if not with_sum:
                        return acc[...]
                    d = d + jnp.where(d < 0, -denominator.epsilon, denominator.epsilon)
                    return acc[...] / lax.broadcast_in_dim(d, (C, columns), [0])

                own_spare = [ref.at[wg] for ref in spare[-3:-1]]
                y = accumulate(attend, (C, C), (C, columns), spare=own_spare)
                if with_sum or gated:  # ordinary loads of tiles: order them before the refill
                    plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[slot])
                plgpu.barrier_arrive(S_free.at[copy])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                y_s[wg] = y.astype(jnp.bfloat16)
                plgpu.commit_smem()
                rows = pl.ds(plan.chunk(position) * C, C)
                plgpu.copy_smem_to_gmem(y_s.at[wg], y_ref.at[b, rows, h, own])

            plgpu.wait_smem_to_gmem(0)

    all_chunks = plan.segments * chunks
    states = all_chunks // plan.per_state if plan.per_state else 1
    out_type = [
        jax.ShapeDtypeStruct((plan.B, plan.T, plan.H, plan.V), jnp.bfloat16),
        jax.ShapeDtypeStruct((plan.B, plan.H, states, K, plan.V), jnp.float32),
    ]
    scratch = [
        tiles(slots, C, K), tiles(slots, C, K), tiles(slots, C, columns), tiles(2, K, columns),
        tiles(readers, C, columns),
        plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_arrivals=2 + gated, num_barriers=slots),
        plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_barriers=2),
    ]  # fmt: skip
    args = [q, k, v, S]
    if with_sum:
        args += [z, ones_tile()]
        out_type.append(jax.ShapeDtypeStruct((plan.B, plan.H, K), jnp.float32))
        scratch += [plgpu.SMEM((2, K), jnp.bfloat16), tiles(8, C), plgpu.Barrier()]
    if with_d:
        out_type.append(jax.ShapeDtypeStruct((plan.B, plan.H, all_chunks * C), jnp.float32))
    if gated:
        args.append(gates)
        scratch += [plgpu.SMEM((slots, 2 * C), jnp.float32), tiles(C, columns)]
    if interpret is not None:
        sums_of_products = [
            (K, columns),
            *[(K, 8)] * with_sum,
            (readers, C, C),
            (readers, C, columns),
        ]
        scratch += [plgpu.SMEM(shape, jnp.float32) for shape in sums_of_products]
        scratch.append(tiles(readers, C, C))
    grid = {"b": plan.B, "h": plan.H, "segment": plan.segments, "block": blocks}
    return launch(
        body,
        out_type,
        grid=grid,
        warpgroups=readers + 2,
        scratch=scratch,
        interpret=interpret,
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
