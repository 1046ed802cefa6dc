"""Products of learned projections as features, for Hopper GPUs.

    phi(x) = prod_{j=1..p} (b_j + x_hat Theta_j), squared if asked for; x_hat = RMSNorm(x) or x

Theta stays in shared memory; tiles of tokens pass by. Norms are taken in the kernel, where the tile
already is. Tokens beyond T are read as zeros and never written, by the bounds of the tensor maps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.pallas_gpu_base import C, best_split, launch, mod, ring, tiles

WORKERS = 2  # warpgroups that compute, of C tokens each
TILE = WORKERS * C
THETA_BYTES = 128 * 1024  # of shared memory, for Theta


class Form(NamedTuple):
    """The static part of the map.

    Attributes:
        norm_size: the number of entries of a row of x that count, 0 for no RMSNorm of rows.
        squared: whether features are squared.
    """

    norm_size: int
    squared: bool


def features(xs, Theta: jax.Array, b: jax.Array, form: Form, interpret=None) -> list[jax.Array]:
    """Map one side (queries or keys), or both in one launch.

    Args:
        xs: one or two arrays [B, T, Hx, D] bfloat16, D 64 or 128.
        Theta: [len(xs), H, p, D, M] bfloat16, M a multiple of 64; consecutive groups of Hx / H
            heads of x share one head.
        b: [len(xs), H, p, M] float32.
        form: the static part of the map.
        interpret: see `pallas_gpu_base.launch`.

    Returns:
        For each x the features [B, T, Hx, M], bfloat16.
    """
    B, T, Hx, D = xs[0].shape
    sides, H, p, _, M = Theta.shape
    block = max(n for n in range(64, M + 1, 64) if M % n == 0 and p * D * n * 2 <= THETA_BYTES)
    sub = 128 if p <= 2 and block % 128 == 0 else 64
    tokens = Tokens(B, T)
    parts, each = tokens.split(sides * Hx * (M // block))

    def body(theta_ref, b_ref, *refs):
        x_refs, y_refs, refs = refs[:sides], refs[sides : 2 * sides], refs[2 * sides :]
        theta_s, x_s, y_s, theta_full, full, free = refs
        wg, side, h, m, part = (lax.axis_index(i) for i in ("wg", "side", "h", "m", "part"))
        first, count = part * each, tokens.count(part, each)
        head = lax.div(h, jnp.int32(Hx // H))

        def of_side(refs, use):
            for i, ref in enumerate(refs):
                pl.when(side == i)(lambda ref=ref: use(ref))

        @pl.when(wg == WORKERS)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")
            for j in range(p):
                columns = theta_ref.at[side, head, j, :, pl.ds(m * block, block)]
                plgpu.copy_gmem_to_smem(columns, theta_s.at[j], theta_full)

            def load(x_ref):
                def fill(i, slot):
                    rows = tokens.rows(x_ref, first + i, h)
                    plgpu.copy_gmem_to_smem(rows, x_s.at[slot], full.at[slot])

                ring(count, 2, free, fill)

            of_side(x_refs, load)

        @pl.when(wg < WORKERS)
        def _compute():
            plgpu.set_max_registers(232, action="increase")
            plgpu.barrier_wait(theta_full)

            @pl.loop(0, count)
            def _(i):
                slot = mod(i, 2)
                plgpu.barrier_wait(full.at[slot])
                x = x_s.at[slot, pl.ds(wg * C, C)]
                if form.norm_size:
                    normalize_rows(x, form.norm_size)

                @pl.loop(0, block // sub)
                def _(n):
                    at = pl.multiple_of(n * sub, sub)
                    to = pl.ds(m * block + at, sub)
                    y = product(
                        lambda j: (x, theta_s.at[j, :, pl.ds(at, sub)]),
                        lambda j: b_ref.at[side, head, j, to],
                        range(p),
                        sub,
                    )
                    y = y * y if form.squared else y
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    y_s[wg] = y.astype(jnp.bfloat16)
                    plgpu.commit_smem()

                    def store(y_ref):
                        rows = tokens.rows(y_ref, first + i, h, to, wg)
                        plgpu.copy_smem_to_gmem(y_s.at[wg], rows)

                    of_side(y_refs, store)

                plgpu.barrier_arrive(free.at[slot])

            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tiles(p, D, block), tiles(2, TILE, D), tiles(WORKERS, C, sub),
        plgpu.Barrier(num_arrivals=p), plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_arrivals=WORKERS, num_barriers=2),
    ]  # fmt: skip
    grid = {"side": sides, "h": Hx, "m": M // block, "part": parts}
    out_type = [jax.ShapeDtypeStruct((B, T, Hx, M), jnp.bfloat16)] * sides
    return launch(
        body, out_type, grid=grid, warpgroups=WORKERS + 1, scratch=scratch, interpret=interpret
    )(Theta, b, *xs)


class Tokens(NamedTuple):
    """The tiles of TILE tokens of a batch, numbered from the first row on."""

    B: int
    T: int

    def split(self, blocks):
        """Cut the tiles of each of `blocks` blocks into (parts, tiles per part)."""
        n = self.B * pl.cdiv(self.T, TILE)
        each = pl.cdiv(n, best_split(blocks, min(n, 32)))
        return pl.cdiv(n, each), each

    def count(self, part, each):
        """Tiles of one part: the last may have fewer."""
        return jnp.minimum(each, self.B * pl.cdiv(self.T, TILE) - part * each)

    def rows(self, ref, i, h, columns=slice(None), worker=None):
        """Tile i of head h of [B, T, H, columns], or the rows of one worker of it."""
        per_row = jnp.int32(pl.cdiv(self.T, TILE))
        b, t = lax.div(i, per_row), lax.rem(i, per_row) * TILE
        rows = pl.ds(t, TILE) if worker is None else pl.ds(t + worker * C, C)
        return ref.at[b, rows, h, columns]


def normalize_rows(tile, size):
    """RMSNorm of the rows of a tile [C, D] in shared memory, in place; returns 1 / RMS [C].

    Rows are divided by their largest magnitude first, as their squares could overflow.
    """
    x = plgpu.load(tile, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    scale = 1.0 / jnp.maximum(jnp.max(jnp.abs(x), axis=1), 1.0)
    x = x * over_columns(scale, x)
    mean = jnp.sum(x * x, axis=1) * (1 / size)
    inverse = lax.rsqrt(mean + 1e-6 * scale * scale)
    tile[...] = (x * over_columns(inverse, x)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    return inverse * scale


def over_columns(a, like):
    """[C] to the shape of `like`, [C, columns]."""
    return lax.broadcast_in_dim(a, like.shape, [0])


def product(operands, constants, factors, columns, y=None):
    """The product over some factors j of operands(j) multiplied + constants(j), and of y.

    Two matrix products are in flight at a time. The result is [C, columns] float32.
    """
    for i in range(0, len(factors), 2):

        def multiply(*accs, pair=factors[i : i + 2], y=y):
            for j, acc in zip(pair, accs, strict=True):
                plgpu.wgmma(acc, *operands(j))
            for j, acc in zip(pair, accs, strict=True):
                b = plgpu.load(constants(j), layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                value = acc[...] + lax.broadcast_in_dim(b, acc.shape, [1])
                y = value if y is None else y * value
            return y

        accs = [plgpu.ACC((C, columns), jnp.float32)] * len(factors[i : i + 2])
        y = pl.run_scoped(multiply, *accs)
    return y
