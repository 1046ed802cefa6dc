"""The two products of bidirectional attention, for Hopper GPUs.

Each reads a long array of tokens once and keeps the small matrix of a head on the chip: XLA would
first bring the heads of [B, T, H, ...] to the front. Tokens beyond T are read as zeros and never
written, by the bounds of the tensor maps.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.pallas_gpu_base import (
    SHARED_BYTES,
    C,
    best_split,
    launch,
    mod,
    ring,
    tiles,
)

WORKERS = 2  # warpgroups that compute
ACCUMULATED = 128 * 192  # the largest accumulator of one


def total(k: jax.Array, v: jax.Array, interpret=None) -> jax.Array:
    """S = sum_t k_t v_t^T over all tokens of a head.

    Args:
        k: [B, T, H, K], v: [B, T, H, V] bfloat16, K and V multiples of 64.
        interpret: see `pallas_gpu_base.launch`.

    Returns:
        [B, H, K, V] float32.
    """
    B, T, H, K = k.shape
    V = v.shape[3]
    side = max(n for n in range(64, 257, 64) if K % n == 0)
    workers = 1 if side % 128 else WORKERS
    rows = side // workers
    columns = max(n for n in range(64, 193, 64) if V % n == 0 and rows * n <= ACCUMULATED)
    blocks = V // columns
    slots = 4
    parts, each = _parts(T, B * H * (K // side) * blocks)

    def body(k_ref, v_ref, S_ref, k_s, v_s, full, free):
        wg, b, h, block, part = (lax.axis_index(n) for n in ("wg", "b", "h", "block", "part"))
        first = lax.div(block, jnp.int32(blocks)) * side
        own = pl.ds(mod(block, blocks) * columns, columns)
        count = jnp.minimum(each, pl.cdiv(T, C) - part * each)

        @pl.when(wg == workers)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")

            def load(n, slot):
                at = pl.ds((part * each + n) * C, C)
                keys = k_ref.at[b, at, h, pl.ds(first, side)]
                plgpu.copy_gmem_to_smem(keys, k_s.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(v_ref.at[b, at, h, own], v_s.at[slot], full.at[slot])

            ring(count, slots, free, load)

        @pl.when(wg < workers)
        def _sum():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(wg * rows, rows)

            def run(acc):
                @pl.loop(0, count)
                def _(n):
                    slot = mod(n, slots)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, k_s.at[slot, :, mine].transpose((1, 0)), v_s.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                return acc[...]

            S = pl.run_scoped(run, plgpu.ACC((rows, columns), jnp.float32))
            S_ref[b, h, part, pl.ds(first + wg * rows, rows), own] = S

    scratch = [
        tiles(slots, C, side), tiles(slots, C, columns),
        plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
    ]  # fmt: skip
    S = launch(
        body, jax.ShapeDtypeStruct((B, H, parts, K, V), jnp.float32),
        grid={"b": B, "h": H, "block": K // side * blocks, "part": parts},
        warpgroups=workers + 1, scratch=scratch, interpret=interpret,
    )(k, v)  # fmt: skip
    return jnp.sum(S, axis=2)


def read(q: jax.Array, S: jax.Array, interpret=None) -> jax.Array:
    """y_t = q_t^T S for all tokens of a head.

    Args:
        q: [B, T, Hq, K] bfloat16, K a multiple of 64 up to 512.
        S: [B, H, K, V], V a multiple of 64, is rounded to bfloat16; consecutive groups of Hq / H
            heads of q share one head.
        interpret: see `pallas_gpu_base.launch`.

    Returns:
        [B, T, Hq, V] bfloat16.
    """
    B, T, Hq, K = q.shape
    H, V = S.shape[1], S.shape[3]

    def free_slots(columns):
        used = (K * columns + WORKERS * C * _step(columns)) * 2
        return min((SHARED_BYTES - used) // (C * K * 2), 8) // WORKERS * WORKERS

    columns = max(n for n in range(64, V + 1, 64) if V % n == 0 and free_slots(n) > 0)
    step, slots = _step(columns), free_slots(columns)
    parts, each = _parts(T, B * Hq * (V // columns))

    def body(q_ref, S_ref, y_ref, q_s, S_s, y_s, S_full, full, free):
        wg, b, h, block, part = (lax.axis_index(n) for n in ("wg", "b", "h", "block", "part"))
        count = jnp.minimum(each, pl.cdiv(T, C) - part * each)

        def rows(ref, n, columns=slice(None)):
            return ref.at[b, pl.ds((part * each + n) * C, C), h, columns]

        @pl.when(wg == WORKERS)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")
            head = lax.div(h, jnp.int32(Hq // H))
            own = pl.ds(block * columns, columns)
            plgpu.copy_gmem_to_smem(S_ref.at[b, head, :, own], S_s, S_full)

            def load(n, slot):
                plgpu.copy_gmem_to_smem(rows(q_ref, n), q_s.at[slot], full.at[slot])

            ring(count, slots, free, load)

        @pl.when(wg < WORKERS)
        def _read():
            plgpu.set_max_registers(232, action="increase")
            plgpu.barrier_wait(S_full)

            @pl.loop(wg, count, step=WORKERS)
            def _(n):
                slot = mod(n, slots)
                plgpu.barrier_wait(full.at[slot])

                @pl.loop(0, columns // step)
                def _(i):
                    at = pl.multiple_of(i * step, step)

                    def multiply(acc):
                        plgpu.wgmma(acc, q_s.at[slot], S_s.at[:, pl.ds(at, step)])
                        return acc[...]

                    y = pl.run_scoped(multiply, plgpu.ACC((C, step), jnp.float32))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    y_s[wg] = y.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    to = rows(y_ref, n, pl.ds(block * columns + at, step))
                    plgpu.copy_smem_to_gmem(y_s.at[wg], to)

                plgpu.barrier_arrive(free.at[slot])

            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tiles(slots, C, K), tiles(K, columns), tiles(WORKERS, C, step),
        plgpu.Barrier(), plgpu.Barrier(num_barriers=slots), plgpu.Barrier(num_barriers=slots),
    ]  # fmt: skip
    return launch(
        body, jax.ShapeDtypeStruct((B, T, Hq, V), jnp.bfloat16),
        grid={"b": B, "h": Hq, "block": V // columns, "part": parts},
        warpgroups=WORKERS + 1, scratch=scratch, interpret=interpret,
    )(q, S.astype(jnp.bfloat16))  # fmt: skip


def _step(columns):
    """Columns of one product."""
    return 128 if columns % 128 == 0 else 64


def _parts(T, blocks):
    """Into how many parts to cut the tokens of each block, and the chunks of a part."""
    chunks = pl.cdiv(T, C)
    each = pl.cdiv(chunks, best_split(blocks, min(chunks, 32)))
    return pl.cdiv(chunks, each), each
