"""Products of learned projections as features, for Hopper GPUs.

    phi(x) = prod_{j=1..p} (b_j + x_hat Theta_j), squared if asked for; x_hat = RMSNorm(x) or x

Theta stays in shared memory; tiles of tokens pass by. Products are taken of the rows as they are
and multiplied by the inverse norms after. Tokens beyond T are read as zeros and never written, by
the bounds of the tensor maps.
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
        norm_size: the number of entries of a row of x that count, 0 for no RMSNorm of rows. Rows
            whose squares overflow float32 (|x| > 1e18) get no meaningful features.
        squared: whether features are squared.
    """

    norm_size: int
    squared: bool


def features(
    xs, Theta: jax.Array, b: jax.Array, form: Form, interpret=None
) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """Map one side (queries or keys), or both in one launch.

    Args:
        xs: one or two arrays [B, T, Hx, D] bfloat16, D 64 or 128.
        Theta: [len(xs), H, p, D, M] bfloat16, M a multiple of 64; consecutive groups of Hx / H
            heads of x share one head.
        b: [len(xs), H, p, M] float32.
        form: the static part of the map.
        interpret: see `pallas_gpu_base.launch`.

    Returns:
        For each x the features [B, T, Hx, M], bfloat16, and 1 / RMS of its rows, float32
        [B, Hx, T rounded up to tiles], or None without norm.
    """
    B, T, Hx, D = xs[0].shape
    sides, H, p, _, M = Theta.shape
    block = max(n for n in range(64, M + 1, 64) if M % n == 0 and p * D * n * 2 <= THETA_BYTES)
    sub = 128 if p <= 2 and block % 128 == 0 else 64
    tokens = Tokens(B, T)
    parts, each = tokens.split(sides * Hx * (M // block))

    def body(theta_ref, b_ref, *refs):
        x_refs, y_refs, refs = refs[:sides], refs[sides : 2 * sides], refs[2 * sides :]
        inverse_refs, refs = (refs[:sides], refs[sides:]) if form.norm_size else ((), refs)
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
                inverse = inverse_rms(x, form.norm_size) if form.norm_size else None

                def store_inverse(ref):
                    ref[tokens.row(first + i, h, wg)] = inverse

                if form.norm_size:
                    pl.when(m == 0)(lambda: of_side(inverse_refs, store_inverse))

                @pl.loop(0, block // sub)
                def _(n):
                    at = pl.multiple_of(n * sub, sub)
                    to = pl.ds(m * block + at, sub)
                    y = product(
                        lambda j: (x, theta_s.at[j, :, pl.ds(at, sub)]),
                        lambda j: b_ref.at[side, head, j, to],
                        inverse,
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
    if form.norm_size:
        out_type += [jax.ShapeDtypeStruct((B, Hx, tokens.rounded), jnp.float32)] * sides
    out = launch(
        body, out_type, grid=grid, warpgroups=WORKERS + 1, scratch=scratch, interpret=interpret
    )(Theta, b, *xs)
    return out[:sides], out[sides:] or [None] * sides


class Tokens(NamedTuple):
    """The tiles of TILE tokens of a batch, numbered from the first row on."""

    B: int
    T: int

    @property
    def rounded(self):
        """T rounded up to tiles."""
        return pl.cdiv(self.T, TILE) * TILE

    def split(self, blocks):
        """Cut the tiles of each of `blocks` blocks into (parts, tiles per part)."""
        n = self.B * self.rounded // TILE
        each = pl.cdiv(n, best_split(blocks, min(n, 32)))
        return pl.cdiv(n, each), each

    def count(self, part, each):
        """Tiles of one part: the last may have fewer."""
        return jnp.minimum(each, self.B * self.rounded // TILE - part * each)

    def place(self, i):
        """The batch and the first token of tile i."""
        per_row = jnp.int32(self.rounded // TILE)
        return lax.div(i, per_row), lax.rem(i, per_row) * TILE

    def rows(self, ref, i, h, columns=slice(None), worker=None):
        """Tile i of head h of [B, T, H, columns], or the rows of one worker of it."""
        b, t = self.place(i)
        rows = pl.ds(t, TILE) if worker is None else pl.ds(t + worker * C, C)
        return ref.at[b, rows, h, columns]

    def row(self, i, h, worker):
        """The index of the same rows in an array [B, H, rounded T]."""
        b, t = self.place(i)
        return b, h, pl.ds(t + worker * C, C)


def inverse_rms(tile, size):
    """[C]: 1 / sqrt(mean(x^2) + 1e-6) of the rows of a tile in shared memory."""
    x = plgpu.load(tile, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x, axis=1) * (1 / size) + 1e-6)


def over_columns(a, like):
    """[C] to the shape of `like`, [C, columns]."""
    return lax.broadcast_in_dim(a, like.shape, [0])


def multiply(operands, constants, inverse, factors, accs):
    """The factors inverse * (operands(j) multiplied) + constants(j), [C, columns] float32."""
    for j, acc in zip(factors, accs, strict=True):
        plgpu.wgmma(acc, *operands(j))
    bs = [
        plgpu.load(constants(j), layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        for j in factors
    ]
    values = []
    for b, acc in zip(bs, accs, strict=True):
        y = acc[...]
        y = y if inverse is None else y * over_columns(inverse, y)
        values.append(y + lax.broadcast_in_dim(b, y.shape, [1]))
    return values


def product(operands, constants, inverse, factors, columns, y=None):
    """The product of some factors, as in `multiply`, and of y; two are in flight at a time."""
    for i in range(0, len(factors), 2):

        def product_of_pair(*accs, pair=factors[i : i + 2], y=y):
            for value in multiply(operands, constants, inverse, pair, accs):
                y = value if y is None else y * value
            return y

        accs = [plgpu.ACC((C, columns), jnp.float32)] * len(factors[i : i + 2])
        y = pl.run_scoped(product_of_pair, *accs)
    return y
