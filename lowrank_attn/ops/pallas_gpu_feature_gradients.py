"""Gradients of the features of `pallas_gpu_features`, for Hopper GPUs.

The factors y_j are computed again and never stored. Factors are taken in pairs, since two are what
the registers hold: the products of the others are computed again for each pair.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.pallas_gpu_base import C, as_operand, drain, launch, mod, ring, tiles
from lowrank_attn.ops.pallas_gpu_features import (
    THETA_BYTES,
    TILE,
    WORKERS,
    Form,
    Tokens,
    multiply,
    over_columns,
    product,
)

COLUMNS = 64  # of Theta, at a time


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
    if p % 2:  # a factor of 1 makes the pairs complete
        Theta = jnp.concatenate([Theta, jnp.zeros((H, 1, D, M), Theta.dtype)], axis=1)
        b = jnp.concatenate([b, jnp.ones((H, 1, M), b.dtype)], axis=1)
    dx = _input_gradient(x, inverse, Theta, b, g, form, interpret)
    dTheta, db = _parameter_gradients(x, inverse, Theta, b, g, form, interpret)

    def of_heads(partial):  # [parts, Hx, ...] -> [H, ...]
        return jnp.sum(partial.reshape(-1, H, x.shape[2] // H, *partial.shape[2:]), axis=(0, 2))

    return dx, of_heads(dTheta)[:, :p], of_heads(db[..., 0])[:, :p]


def _pair_gradients(operands, constants, inverse, p, g, squared):
    """Gradients [C, COLUMNS] of factors 0 and 1 of p, float32, from that of the feature."""
    others = range(2, p)
    if others and squared:
        rest = product(operands, constants, inverse, others, COLUMNS)
    elif others:
        g = product(operands, constants, inverse, others, COLUMNS, g)
    y0, y1 = pl.run_scoped(
        lambda *accs: multiply(operands, constants, inverse, range(2), accs),
        *[plgpu.ACC((C, COLUMNS), jnp.float32)] * 2,
    )
    if squared:
        g = 2.0 * g * y0 * y1
        if others:
            g = g * rest * rest
    return g * y1, g * y0


def _input_gradient(x, inverse, Theta, b, g, form, interpret):
    B, T, Hx, D = x.shape
    H, p, _, M = Theta.shape
    blocks = M // COLUMNS
    slots = min(max(THETA_BYTES // (p * D * COLUMNS * 2), 1), blocks)
    resident = slots == blocks  # Theta is loaded once, else again for each tile
    loads = 1 if resident else slots
    tokens = Tokens(B, T)
    parts, each = tokens.split(Hx)

    def body(x_ref, theta_ref, b_ref, g_ref, *refs):
        inverse_ref, *refs = refs if form.norm_size else (None, *refs)
        dx_ref, *refs = refs
        theta_s, x_s, g_s, theta_full, theta_free, x_full, x_free, g_full, g_free, *refs = refs
        wg, h, part = (lax.axis_index(i) for i in ("wg", "h", "part"))
        first, count = part * each, tokens.count(part, each)
        head = lax.div(h, jnp.int32(Hx // H))

        @pl.when(wg == WORKERS)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")

            def load_theta(n, slot, full):
                columns = pl.ds(lax.rem(n, jnp.int32(blocks)) * COLUMNS, COLUMNS)
                for j in range(p):
                    plgpu.copy_gmem_to_smem(
                        theta_ref.at[head, j, :, columns],
                        theta_s.at[slot, j],
                        full,
                    )

            def reuse(n, size, free):
                slot = mod(n, size)

                @pl.when(n >= size)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                return slot

            if resident:
                for n in range(blocks):
                    load_theta(jnp.int32(n), n, theta_full.at[0])

            @pl.loop(0, count)
            def _(i):
                slot = reuse(i, 2, x_free)
                rows = tokens.rows(x_ref, first + i, h)
                plgpu.copy_gmem_to_smem(rows, x_s.at[slot], x_full.at[slot])

                @pl.loop(0, blocks)
                def _(n):
                    at = i * blocks + n
                    if not resident:
                        slot = reuse(at, slots, theta_free)
                        load_theta(at, slot, theta_full.at[slot])
                    slot = reuse(at, 2, g_free)
                    columns = pl.ds(n * COLUMNS, COLUMNS)
                    rows = tokens.rows(g_ref, first + i, h, columns)
                    plgpu.copy_gmem_to_smem(rows, g_s.at[slot], g_full.at[slot])

            drain(count, 2, x_free)
            drain(count * blocks, 2, g_free)
            if not resident:
                drain(count * blocks, slots, theta_free)

        @pl.when(wg < WORKERS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            own = pl.ds(wg * C, C)
            if resident:
                plgpu.barrier_wait(theta_full.at[0])

            @pl.loop(0, count)
            def _(i):
                x_slot = mod(i, 2)
                x = x_s.at[x_slot, own]
                plgpu.barrier_wait(x_full.at[x_slot])
                inverse = _load_inverse(inverse_ref, tokens.row(first + i, h, wg))

                def run(acc):
                    @pl.loop(0, blocks)
                    def _(n):
                        at = i * blocks + n
                        slot, g_slot = n if resident else mod(at, slots), mod(at, 2)
                        if not resident:
                            plgpu.barrier_wait(theta_full.at[slot])
                        plgpu.barrier_wait(g_full.at[g_slot])
                        dy = plgpu.load(g_s.at[g_slot, own], layout=plgpu.Layout.WGMMA)
                        dy = lax.optimization_barrier(dy.astype(jnp.float32))
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(g_free.at[g_slot])
                        columns = pl.ds(n * COLUMNS, COLUMNS)

                        @pl.loop(0, p // 2)
                        def _(pair):
                            thetas = [theta_s.at[slot, mod(pair * 2 + j, p)] for j in range(p)]
                            dys = _pair_gradients(
                                lambda j: (x, thetas[j]),
                                lambda j: b_ref.at[head, mod(pair * 2 + j, p), columns],
                                inverse,
                                p,
                                dy,
                                form.squared,
                            )
                            for k in range(2):
                                a = as_operand(
                                    dys[k].astype(jnp.bfloat16),
                                    refs[0].at[wg, k] if refs else None,
                                )
                                plgpu.wgmma(acc, a, thetas[k].transpose((1, 0)))
                            plgpu.wgmma_wait(0)

                        if not resident:
                            plgpu.barrier_arrive(theta_free.at[slot])

                    return acc[...]

                dx = pl.run_scoped(run, plgpu.ACC((C, D), jnp.float32))
                if form.norm_size:
                    rows = plgpu.load(x, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                    along = jnp.sum(rows * dx, axis=1) * inverse * inverse * (1 / form.norm_size)
                    dx = (dx - rows * over_columns(along, dx)) * over_columns(inverse, dx)
                x[...] = dx.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(x, tokens.rows(dx_ref, first + i, h, worker=wg))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(x_free.at[x_slot])

            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tiles(slots, p, D, COLUMNS), tiles(2, TILE, D), tiles(2, TILE, COLUMNS),
        plgpu.Barrier(num_arrivals=p * slots // loads, num_barriers=loads),
        plgpu.Barrier(num_arrivals=WORKERS, num_barriers=loads),
        plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_arrivals=WORKERS, num_barriers=2),
        plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_arrivals=WORKERS, num_barriers=2),
    ]  # fmt: skip
    if interpret is not None:
        scratch.append(tiles(WORKERS, 2, C, COLUMNS))
    return launch(
        body, jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), grid={"h": Hx, "part": parts},
        warpgroups=WORKERS + 1, scratch=scratch, interpret=interpret,
    )(x, Theta, b, g, *([] if inverse is None else [inverse]))  # fmt: skip


def _load_inverse(ref, at):
    if ref is None:
        return None
    return plgpu.load(ref.at[at], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def _parameter_gradients(x, inverse, Theta, b, g, form, interpret):
    """Partial sums of dTheta [parts, Hx, p, D, M] and, in 8 equal columns, db [parts, Hx, p, M, 8].

    One block owns COLUMNS columns of two factors of one head, over a part of the tokens. Each of
    its two warpgroups differentiates both factors at its rows of a tile, hands the result over in
    shared memory (one half takes the place of g), and sums one factor over all rows.
    """
    B, T, Hx, D = x.shape
    H, p, _, M = Theta.shape
    slots = 2 if p < 6 else 1
    tokens = Tokens(B, T)
    # the sums over tokens for db undo the factor of `inverse` that those for dTheta need
    weights = jnp.ones((B, Hx, tokens.rounded)) if inverse is None else 1 / inverse
    weights = jnp.broadcast_to(weights[:, :, None], (B, Hx, 8, tokens.rounded))
    weights = weights.astype(jnp.bfloat16)
    parts, each = tokens.split(Hx * (M // COLUMNS) * (p // 2))

    def body(x_ref, theta_ref, b_ref, g_ref, weights_ref, *refs):
        inverse_ref, *refs = refs if form.norm_size else (None, *refs)
        dtheta_ref, db_ref, theta_s, x_s, dy_s, weights_s, once, full, free, dy_full = refs
        names = ("wg", "h", "m", "pair", "part")
        wg, h, m, pair, part = (lax.axis_index(i) for i in names)
        first, count = part * each, tokens.count(part, each)
        head = lax.div(h, jnp.int32(Hx // H))
        columns = pl.ds(m * COLUMNS, COLUMNS)

        def factor(j):  # the own pair is 0 and 1
            return mod(pair * 2 + j, p)

        @pl.when(wg == WORKERS)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")
            for j in range(p):
                theta = theta_ref.at[head, factor(j), :, columns]
                plgpu.copy_gmem_to_smem(theta, theta_s.at[j], once)

            def fill(i, slot):
                rows = tokens.rows(x_ref, first + i, h)
                plgpu.copy_gmem_to_smem(rows, x_s.at[slot], full.at[slot])
                rows = tokens.rows(g_ref, first + i, h, columns)
                plgpu.copy_gmem_to_smem(rows, dy_s.at[slot, 0], full.at[slot])
                at, t = tokens.place(first + i)
                rows = weights_ref.at[at, h, :, pl.ds(t, TILE)]
                plgpu.copy_gmem_to_smem(rows, weights_s.at[slot], full.at[slot])

            ring(count, slots, free, fill)

        @pl.when(wg < WORKERS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            plgpu.barrier_wait(once)
            own = pl.ds(wg * C, C)

            def run(theta_acc, b_acc):
                @pl.loop(0, count)
                def _(i):
                    slot = mod(i, slots)
                    x = x_s.at[slot, own]
                    plgpu.barrier_wait(full.at[slot])
                    inverse = _load_inverse(inverse_ref, tokens.row(first + i, h, wg))
                    dy = plgpu.load(dy_s.at[slot, 0, own], layout=plgpu.Layout.WGMMA)
                    dys = _pair_gradients(
                        lambda j: (x, theta_s.at[j]),
                        lambda j: b_ref.at[head, factor(j), columns],
                        inverse,
                        p,
                        lax.optimization_barrier(dy.astype(jnp.float32)),
                        form.squared,
                    )
                    for k, dy in enumerate(dys):
                        if inverse is not None:
                            dy = dy * over_columns(inverse, dy)
                        dy_s[slot, k, own] = dy.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(dy_full)
                    plgpu.barrier_wait(dy_full)
                    dy = dy_s.at[slot, wg]
                    plgpu.wgmma(theta_acc, x_s.at[slot].transpose((1, 0)), dy)
                    plgpu.wgmma(b_acc, dy.transpose((1, 0)), weights_s.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                at = (part, h, pair * 2 + wg)
                dtheta_ref[*at, :, columns] = theta_acc[...]
                db_ref[*at, columns, :] = b_acc[...]

            pl.run_scoped(
                run,
                plgpu.ACC((D, COLUMNS), jnp.float32),
                plgpu.ACC((COLUMNS, 8), jnp.float32),
            )

    scratch = [
        tiles(p, D, COLUMNS), tiles(slots, TILE, D), tiles(slots, 2, TILE, COLUMNS),
        tiles(slots, 8, TILE),
        plgpu.Barrier(num_arrivals=p), plgpu.Barrier(num_arrivals=3, num_barriers=slots),
        plgpu.Barrier(num_arrivals=WORKERS, num_barriers=slots),
        plgpu.Barrier(num_arrivals=WORKERS),
    ]  # fmt: skip
    out_type = [
        jax.ShapeDtypeStruct((parts, Hx, p, D, M), jnp.float32),
        jax.ShapeDtypeStruct((parts, Hx, p, M, 8), jnp.float32),
    ]
    grid = {"h": Hx, "m": M // COLUMNS, "pair": p // 2, "part": parts}
    return launch(
        body, out_type, grid=grid, warpgroups=WORKERS + 1, scratch=scratch, interpret=interpret
    )(x, Theta, b, g, weights, *([] if inverse is None else [inverse]))
