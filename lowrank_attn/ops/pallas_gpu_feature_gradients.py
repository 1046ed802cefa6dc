"""Gradients of the features of `pallas_gpu_features`, for Hopper GPUs.

    dy_j = g prod_{i != j} y_i, dx_hat = sum_j dy_j Theta_j^T, dTheta_j = sum_t x_hat^T dy_j

One kernel computes the factors y_j again and from them dy_j and dx. It leaves the dy_j of one side,
p times the size of its features, in memory for a second one, which sums over tokens: to compute
them a second time would take longer. Both take x as it is, and dy over its RMS.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.pallas_gpu_base import (
    SHARED_BYTES,
    C,
    drain,
    launch,
    mod,
    ring,
    tiles,
)
from lowrank_attn.ops.pallas_gpu_features import (
    THETA_BYTES,
    TILE,
    Form,
    Tokens,
    factors,
    load_row,
    over_columns,
)

WORKERS = TILE // C  # warpgroups that compute dx


def feature_gradients(
    x: jax.Array,
    inverse: jax.Array | None,
    Theta: jax.Array,
    b: jax.Array,
    g: jax.Array,
    form: Form,
    interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients for x, Theta and b of one side.

    Args:
        x: [B, T, Hx, D], Theta: [H, p, D, M], b: [H, p, M], as for `features`.
        inverse: what `features` returned with the features of x.
        g: [B, T, Hx, M] bfloat16, the gradient for the features.
        form: the static part of the map.
        interpret: see `pallas_gpu_base.launch`.

    Returns:
        dx in bfloat16, dTheta and db in float32.
    """
    H, p, D, M = Theta.shape
    G = x.shape[2] // H
    columns = 64 if p <= 2 else 32  # of Theta, at a time: all p factors stay in registers
    dx, dy = _input_gradient(x, inverse, Theta, b, g, form, columns, interpret)
    dTheta, db = _parameter_gradients(x, inverse, dy, interpret)
    dTheta = jnp.sum(dTheta.reshape(-1, H, G, D, M // columns, p, columns), axis=(0, 2))
    db = jnp.sum(db[..., 0].reshape(-1, H, G, M // columns, p, columns), axis=(0, 2))
    dTheta = jnp.transpose(dTheta, (0, 3, 1, 2, 4)).reshape(H, p, D, M)
    return dx, dTheta, jnp.swapaxes(db, 1, 2).reshape(H, p, M)


def factor_gradients(ys, g):
    """Gradients of the factors ys, from that of their product."""
    before = [g]
    for y in ys[:-1]:
        before.append(before[-1] * y)
    after, gradients = None, []
    for y, product in zip(reversed(ys), reversed(before), strict=True):
        gradients.append(product if after is None else product * after)
        after = y if after is None else y * after
    return gradients[::-1]


def _input_gradient(x, inverse, Theta, b, g, form, columns, interpret):
    """dx, and dy over the RMS of x, [B, T, Hx, p * M]: block after block of p * columns."""
    B, T, Hx, D = x.shape
    H, p, _, M = Theta.shape
    blocks = M // columns
    theta_slots = min(THETA_BYTES // (p * D * columns * 2), blocks)
    resident = theta_slots == blocks  # Theta is loaded once, else again for each tile
    loads = 1 if resident else theta_slots
    staged = max(p, D // columns)  # tiles of dy, and later of dx, that wait to be stored
    fixed = theta_slots * p * columns * (D * 2 + 4) + WORKERS * C * (staged * columns + D) * 2
    g_slots = min((SHARED_BYTES - fixed) // (C * columns * 2), 8) // WORKERS * WORKERS
    tokens = Tokens(B, T)
    parts, each = tokens.split(Hx)

    def body(x_ref, theta_ref, b_ref, g_ref, *refs):
        inverse_ref, *refs = refs if form.norm_size else (None, *refs)
        dx_ref, dy_ref, theta_s, b_s, x_s, g_s, dy_s, *refs = refs
        theta_full, theta_free, x_full, x_free, g_full, g_free = refs
        wg, h, part = (lax.axis_index(i) for i in ("wg", "h", "part"))
        first, turns = part * each, lax.div(tokens.count(part, each), jnp.int32(WORKERS))
        head = lax.div(h, jnp.int32(Hx // H))

        @pl.when(wg == WORKERS)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")

            def load_theta(n, slot, full):
                of_block = pl.ds(n * columns, columns)
                for j in range(p):
                    theta = theta_ref.at[head, j, :, of_block]
                    plgpu.copy_gmem_to_smem(theta, theta_s.at[slot, j], full)
                plgpu.copy_gmem_to_smem(b_ref.at[head, :, of_block], b_s.at[slot], full)

            def reuse(n, size, free):
                slot = mod(n, size)

                @pl.when(n >= size)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                return slot

            if resident:
                for n in range(blocks):
                    load_theta(n, n, theta_full.at[0])

            @pl.loop(0, turns)
            def _(turn):
                for worker in range(WORKERS):
                    i = turn * WORKERS + worker
                    slot = reuse(i, WORKERS, x_free)
                    rows = tokens.rows(x_ref, first + i, h)
                    plgpu.copy_gmem_to_smem(rows, x_s.at[slot], x_full.at[slot])

                @pl.loop(0, blocks)
                def _(n):
                    at = turn * blocks + n
                    if not resident:
                        slot = reuse(at, theta_slots, theta_free)
                        load_theta(n, slot, theta_full.at[slot])
                    for worker in range(WORKERS):
                        slot = reuse(at * WORKERS + worker, g_slots, g_free)
                        i = first + turn * WORKERS + worker
                        rows = tokens.rows(g_ref, i, h, pl.ds(n * columns, columns))
                        plgpu.copy_gmem_to_smem(rows, g_s.at[slot], g_full.at[slot])

            drain(turns * WORKERS, WORKERS, x_free)
            drain(turns * blocks * WORKERS, g_slots, g_free)
            if not resident:
                drain(turns * blocks, theta_slots, theta_free)

        @pl.when(wg < WORKERS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            if resident:
                plgpu.barrier_wait(theta_full.at[0])

            def store(values, ref, i, at):
                """Send tiles of `columns` columns to rows of chunk i from column `at` on."""
                for k, value in enumerate(values):
                    dy_s[wg, k] = value
                plgpu.commit_smem()
                for k in range(len(values)):
                    to = tokens.rows(ref, first + i, h, pl.ds(at + k * columns, columns))
                    plgpu.copy_smem_to_gmem(dy_s.at[wg, k], to)

            @pl.loop(0, turns)
            def _(turn):
                i = turn * WORKERS + wg
                plgpu.barrier_wait(x_full.at[wg])
                x = rows = lax.optimization_barrier(
                    plgpu.load(x_s.at[wg], layout=plgpu.Layout.WGMMA)
                )
                if interpret is None:
                    plgpu.commit_smem()  # orders these loads before the refill
                    plgpu.barrier_arrive(x_free.at[wg])
                else:  # has no operands in registers
                    x = x_s.at[wg]
                inverse = None
                if form.norm_size:
                    inverse = plgpu.load(
                        inverse_ref.at[tokens.row(first + i, h)],
                        layout=plgpu.Layout.WGMMA.reduce(1),
                        optimized=False,
                    )

                def run(acc):
                    @pl.loop(0, blocks)
                    def _(n):
                        at = turn * blocks + n
                        slot = n if resident else mod(at, theta_slots)
                        g_slot = mod(at * WORKERS + wg, g_slots)
                        if not resident:
                            plgpu.barrier_wait(theta_full.at[slot])

                        def differentiate(*accs):
                            ys = factors(
                                lambda j: (x, theta_s.at[slot, j]),
                                lambda j: load_row(b_s.at[slot, j]),
                                inverse,
                                accs,
                            )
                            plgpu.barrier_wait(g_full.at[g_slot])
                            g = plgpu.load(g_s.at[g_slot], layout=plgpu.Layout.WGMMA)
                            g = lax.optimization_barrier(g).astype(jnp.float32)
                            g = g if inverse is None else g * over_columns(inverse, g)
                            if form.squared:
                                g = 2.0 * g
                                for y in ys:
                                    g = g * y
                            return [dy.astype(jnp.bfloat16) for dy in factor_gradients(ys, g)]

                        accs = [plgpu.ACC((C, columns), jnp.float32)] * p
                        dys = pl.run_scoped(differentiate, *accs)

                        def accumulate(dys):
                            for k, dy in enumerate(dys):
                                plgpu.wgmma(acc, dy, theta_s.at[slot, k].transpose((1, 0)))

                        if interpret is None:
                            accumulate(dys)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        store(dys, dy_ref, i, n * p * columns)
                        plgpu.barrier_arrive(g_free.at[g_slot])
                        if interpret is not None:
                            accumulate([dy_s.at[wg, k] for k in range(p)])
                        plgpu.wgmma_wait(0)
                        if not resident:
                            plgpu.barrier_arrive(theta_free.at[slot])

                    return acc[...]

                dx = pl.run_scoped(run, plgpu.ACC((C, D), jnp.float32))
                if form.norm_size:
                    x = rows.astype(jnp.float32)
                    along = jnp.sum(x * dx, axis=1) * inverse * inverse * (1 / form.norm_size)
                    dx = dx - x * over_columns(along, dx)
                dx = dx.astype(jnp.bfloat16)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store([dx[:, at : at + columns] for at in range(0, D, columns)], dx_ref, i, 0)
                if interpret is not None:
                    plgpu.barrier_arrive(x_free.at[wg])

            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tiles(theta_slots, p, D, columns), plgpu.SMEM((theta_slots, p, columns), jnp.float32),
        tiles(WORKERS, C, D), tiles(g_slots, C, columns), tiles(WORKERS, staged, C, columns),
        plgpu.Barrier(num_arrivals=(p + 1) * theta_slots // loads, num_barriers=loads),
        plgpu.Barrier(num_arrivals=WORKERS, num_barriers=loads),
        plgpu.Barrier(num_barriers=WORKERS), plgpu.Barrier(num_barriers=WORKERS),
        plgpu.Barrier(num_barriers=g_slots), plgpu.Barrier(num_barriers=g_slots),
    ]  # fmt: skip
    out_type = [
        jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((B, T, Hx, p * M), jnp.bfloat16),
    ]
    return launch(
        body, out_type, grid={"h": Hx, "part": parts}, warpgroups=WORKERS + 1, scratch=scratch,
        interpret=interpret,
    )(x, Theta, b, g, *([] if inverse is None else [inverse]))  # fmt: skip


def _parameter_gradients(x, inverse, dy, interpret):
    """Partial sums of x^T dy [parts, Hx, D, N] and, in 8 equal columns, of dy [parts, Hx, N, 8].

    The latter undo the factor `inverse` of dy.
    """
    B, T, Hx, D = x.shape
    N = dy.shape[3]
    tokens = Tokens(B, T)
    weights = jnp.ones((B, Hx, tokens.rounded)) if inverse is None else 1 / inverse
    weights = jnp.broadcast_to(weights[:, :, None], (B, Hx, 8, tokens.rounded))
    weights = weights.astype(jnp.bfloat16)
    columns = 128 if N % 128 == 0 else 64  # per worker
    workers = 2 if N % (2 * columns) == 0 else 1
    slots = min(SHARED_BYTES // (C * (D + workers * columns + 8) * 2), 8)
    parts, each = tokens.split(Hx * (N // (workers * columns)))

    def body(x_ref, dy_ref, weights_ref, dtheta_ref, db_ref, x_s, dy_s, weights_s, full, free):
        wg, h, block, part = (lax.axis_index(i) for i in ("wg", "h", "block", "part"))
        first, count = part * each, tokens.count(part, each)

        @pl.when(wg == workers)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")

            def fill(i, slot):
                i = first + i
                own = pl.ds(block * workers * columns, workers * columns)
                at, head, t = tokens.row(i, h)
                for rows, to in (
                    (tokens.rows(x_ref, i, h), x_s),
                    (tokens.rows(dy_ref, i, h, own), dy_s),
                    (weights_ref.at[at, head, :, t], weights_s),
                ):
                    plgpu.copy_gmem_to_smem(rows, to.at[slot], full.at[slot])

            ring(count, slots, free, fill)

        @pl.when(wg < workers)
        def _sum():
            plgpu.set_max_registers(232, action="increase")

            def run(theta_acc, b_acc):
                @pl.loop(0, count)
                def _(i):
                    slot = mod(i, slots)
                    dy = dy_s.at[slot, :, pl.ds(wg * columns, columns)]
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(theta_acc, x_s.at[slot].transpose((1, 0)), dy)
                    plgpu.wgmma(b_acc, dy.transpose((1, 0)), weights_s.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                own = pl.ds((block * workers + wg) * columns, columns)
                dtheta_ref[part, h, :, own] = theta_acc[...]
                db_ref[part, h, own] = b_acc[...]

            accs = [plgpu.ACC((D, columns), jnp.float32), plgpu.ACC((columns, 8), jnp.float32)]
            pl.run_scoped(run, *accs)

    scratch = [
        tiles(slots, C, D), tiles(slots, C, workers * columns), tiles(slots, 8, C),
        plgpu.Barrier(num_arrivals=3, num_barriers=slots),
        plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
    ]  # fmt: skip
    out_type = [
        jax.ShapeDtypeStruct((parts, Hx, D, N), jnp.float32),
        jax.ShapeDtypeStruct((parts, Hx, N, 8), jnp.float32),
    ]
    grid = {"h": Hx, "block": N // (workers * columns), "part": parts}
    return launch(
        body, out_type, grid=grid, warpgroups=workers + 1, scratch=scratch, interpret=interpret
    )(x, dy, weights)
