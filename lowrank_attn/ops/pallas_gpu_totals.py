"""Sums of k v^T over segments of tokens, for Hopper GPUs."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.pallas_gpu_base import C, best_split, launch, mod, ring, tiles
from lowrank_attn.ops.pallas_gpu_scan_kernel import Plan, ones_tile

SLOTS = 4


def segment_totals(k, v, plan: Plan, with_sum: bool, interpret):
    """k^T v, and with the sum also the sum of k, over each segment of a plan but the last.

    Args:
        k: [B, T, Hx, N * K] and v: [B, T, Hx, V], bfloat16.
        plan: of the scan. Its parts of a head are those here.

    Returns:
        [B, H, segments - 1, K, V] and [B, H, segments - 1, K] or None, float32.
    """
    B, H, K, V, chunks = plan.B, plan.H, plan.K, plan.V, plan.chunks
    workers = 1 if K % 128 else 2
    rows = K // workers
    columns = 128 if V % 128 == 0 else 64
    parts = best_split(B * H * (plan.segments - 1) * (V // columns), min(4, chunks))
    each = pl.cdiv(chunks, parts)

    def body(k_ref, v_ref, ones_ref, *refs):
        S_ref, *refs = refs
        z_ref, *refs = refs if with_sum else (None, *refs)
        k_s, v_s, ones_s, full, free, ones_full = refs
        wg, b, h, g, part, block = (
            lax.axis_index(n) for n in ("wg", "b", "h", "segment", "part", "block")
        )
        own = pl.ds(block * columns, columns)
        first = part * each
        count = jnp.minimum(each, chunks - first)

        @pl.when(wg == workers)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(ones_ref, ones_s, ones_full)

            def load(n, slot):
                at = (b, h, g * chunks + first + n)
                plgpu.copy_gmem_to_smem(plan.features(k_ref, *at), k_s.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(plan.rows(v_ref, *at, own), v_s.at[slot], full.at[slot])

            ring(count, SLOTS, free, load)

        @pl.when(wg < workers)
        def _sum():
            plgpu.set_max_registers(232, action="increase")
            plgpu.barrier_wait(ones_full)
            mine = pl.ds(wg * rows, rows)

            def run(S_acc, z_acc):
                @pl.loop(0, count)
                def _(n):
                    slot = mod(n, SLOTS)
                    plgpu.barrier_wait(full.at[slot])
                    k_t = k_s.at[slot, :, mine].transpose((1, 0))
                    plgpu.wgmma(S_acc, k_t, v_s.at[slot])
                    if with_sum:
                        plgpu.wgmma(z_acc, k_t, ones_s.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                return S_acc[...], z_acc[...]

            S, z = pl.run_scoped(
                run, plgpu.ACC((rows, columns), jnp.float32), plgpu.ACC((rows, 8), jnp.float32)
            )
            S_ref[b, h, g, part, mine, own] = S
            if with_sum:

                @pl.when(block == 0)
                def _():
                    z_ref[b, h, g, part, mine] = jnp.sum(z, axis=1) * 0.125

    shape = (B, H, plan.segments - 1, parts, K)
    out_type = [jax.ShapeDtypeStruct((*shape, V), jnp.float32)]
    if with_sum:
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    scratch = [
        tiles(SLOTS, C, K), tiles(SLOTS, C, columns), tiles(8, C),
        plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=workers, num_barriers=SLOTS), plgpu.Barrier(),
    ]  # fmt: skip
    grid = {"b": B, "h": H, "segment": plan.segments - 1, "part": parts, "block": V // columns}
    S, *z = launch(
        body,
        out_type,
        grid=grid,
        warpgroups=workers + 1,
        scratch=scratch,
        interpret=interpret,
    )(k, v, ones_tile())
    return _sum_parts(S), _sum_parts(z[0]) if with_sum else None


def _sum_parts(x):
    """Sum [B, H, segments, parts, ..] as additions, which fuse with what comes next."""
    return functools.reduce(jnp.add, jnp.unstack(x, axis=3))
