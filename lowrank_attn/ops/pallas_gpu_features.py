"""Products of learned projections as features, for Hopper GPUs.

    phi(x) = prod_{j=1..p} (b_j + x_hat Theta_j), squared if asked for; x_hat = RMSNorm(x) or x

Theta stays in shared memory; chunks of tokens pass by. Each of three warpgroups takes every third
chunk and holds it in registers, the left operand of all products and the source of the norm: while
one multiplies, the others combine factors. Products are taken of the rows as they are and
multiplied by the inverse norms after. Tokens beyond T are read as zeros and never written, by the
bounds of the tensor maps.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.pallas_gpu_base import SHARED_BYTES, C, best_split, launch, mod, ring, tiles

WORKERS = 3  # warpgroups that compute
TILE = 2 * C  # what T is rounded up to
COLUMNS = 64  # of Theta, at a time
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
        xs: one or two arrays [B, T, Hx, D] bfloat16, T a multiple of 8, D 64 or 128.
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
    block = max(
        n for n in range(64, min(M, 256) + 1, 64) if M % n == 0 and p * D * n * 2 <= THETA_BYTES
    )
    together = 2 if p % 2 == 0 else 1  # factors whose products are in flight; 3 do not fit
    fixed = p * block * (D * 2 + 4) + WORKERS * 2 * C * COLUMNS * 2
    slots = min((SHARED_BYTES - fixed) // (C * D * 2), 2 * WORKERS) // WORKERS * WORKERS
    tokens = Tokens(B, T)
    parts, each = tokens.split(sides * Hx * (M // block))

    def body(theta_ref, b_ref, *refs):
        x_refs, y_refs, refs = refs[:sides], refs[sides : 2 * sides], refs[2 * sides :]
        inverse_refs, refs = (refs[:sides], refs[sides:]) if form.norm_size else ((), refs)
        theta_s, b_s, x_s, y_s, once, full, free = refs
        wg, side, h, m, part = (lax.axis_index(i) for i in ("wg", "side", "h", "m", "part"))
        first, count = part * each, tokens.count(part, each)
        head = lax.div(h, jnp.int32(Hx // H))

        def of_side(refs, use):
            for i, ref in enumerate(refs):
                pl.when(side == i)(lambda ref=ref: use(ref))

        @pl.when(wg == WORKERS)
        def _move_tiles():
            plgpu.set_max_registers(40, action="decrease")
            columns = pl.ds(m * block, block)
            plgpu.copy_gmem_to_smem(b_ref.at[side, head, :, columns], b_s, once)
            for j in range(p):
                plgpu.copy_gmem_to_smem(
                    theta_ref.at[side, head, j, :, columns], theta_s.at[j], once
                )

            def load(x_ref):
                def fill(i, slot):
                    rows = tokens.rows(x_ref, first + i, h)
                    plgpu.copy_gmem_to_smem(rows, x_s.at[slot], full.at[slot])

                ring(count, slots, free, fill)

            of_side(x_refs, load)

        @pl.when(wg < WORKERS)
        def _compute():
            plgpu.set_max_registers(152, action="increase")
            plgpu.barrier_wait(once)

            @pl.loop(0, lax.div(count - wg + WORKERS - 1, jnp.int32(WORKERS)))
            def _(turn):
                i = turn * WORKERS + wg
                slot = mod(i, slots)
                plgpu.barrier_wait(full.at[slot])
                x = rows = lax.optimization_barrier(
                    plgpu.load(x_s.at[slot], layout=plgpu.Layout.WGMMA)
                )
                if interpret is None:
                    plgpu.commit_smem()  # orders these loads before the refill
                    plgpu.barrier_arrive(free.at[slot])
                else:  # has no operands in registers
                    x = x_s.at[slot]
                inverse = inverse_rms(rows, form.norm_size) if form.norm_size else None

                def store_inverse(ref):
                    ref[tokens.row(first + i, h)] = inverse

                if form.norm_size:
                    pl.when(m == 0)(lambda: of_side(inverse_refs, store_inverse))

                @pl.loop(0, block // COLUMNS)
                def _(n):
                    at = pl.multiple_of(n * COLUMNS, COLUMNS)
                    own = pl.ds(at, COLUMNS)

                    def multiply(k, y):
                        """The product of the k-th factors together and of y, if there is one."""

                        def run(*accs):
                            ys = factors(
                                lambda j: (x, theta_s.at[k * together + j, :, own]),
                                lambda j: load_row(b_s.at[k * together + j, own]),
                                inverse,
                                accs,
                            )
                            return math.prod(ys[1:], start=ys[0] if y is None else y * ys[0])

                        accs = [plgpu.ACC((C, COLUMNS), jnp.float32)] * together
                        return pl.run_scoped(run, *accs)

                    y = lax.fori_loop(1, p // together, multiply, multiply(0, None))
                    y = y * y if form.squared else y
                    copy = mod(turn * (block // COLUMNS) + n, 2)
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    y_s[wg, copy] = y.astype(jnp.bfloat16)
                    plgpu.commit_smem()

                    def store(y_ref):
                        columns = pl.ds(m * block + at, COLUMNS)
                        rows = tokens.rows(y_ref, first + i, h, columns)
                        plgpu.copy_smem_to_gmem(y_s.at[wg, copy], rows)

                    of_side(y_refs, store)

                if interpret is not None:
                    plgpu.barrier_arrive(free.at[slot])

            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tiles(p, D, block), plgpu.SMEM((p, block), jnp.float32), tiles(slots, C, D),
        tiles(WORKERS, 2, C, COLUMNS),
        plgpu.Barrier(num_arrivals=p + 1), plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_barriers=slots),
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
    """The chunks of C tokens of a batch with T rounded up to tiles, numbered from the first row."""

    B: int
    T: int

    @property
    def rounded(self):
        """T rounded up to tiles."""
        return pl.cdiv(self.T, TILE) * TILE

    def split(self, blocks):
        """Cut the chunks of each of `blocks` blocks into (parts, chunks per part), whole tiles."""
        n = self.B * self.rounded // TILE
        each = pl.cdiv(n, best_split(blocks, min(n, 32)))
        return pl.cdiv(n, each), each * (TILE // C)

    def count(self, part, each):
        """Chunks of one part: the last may have fewer."""
        return jnp.minimum(each, self.B * self.rounded // C - part * each)

    def place(self, i):
        """The batch and the first token of chunk i."""
        per_row = jnp.int32(self.rounded // C)
        return lax.div(i, per_row), lax.rem(i, per_row) * C

    def rows(self, ref, i, h, *columns):
        """Chunk i of head h of [B, T, H, ...]."""
        b, t = self.place(i)
        return ref.at[b, pl.ds(t, C), h, *columns]

    def row(self, i, h):
        """The index of the same tokens in an array [B, H, rounded T]."""
        b, t = self.place(i)
        return b, h, pl.ds(t, C)


def inverse_rms(x, size):
    """[C]: 1 / sqrt(mean(x^2) + 1e-6) of rows of `size` entries."""
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x, axis=1) * (1 / size) + 1e-6)


def load_row(ref):
    """[columns] of shared memory, to be added to the rows of a product."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def over_columns(a, like):
    """[C] to the shape of `like`, [C, columns]."""
    return lax.broadcast_in_dim(a, like.shape, [0])


def factors(operands, constants, inverse, accs):
    """Factors inverse * (operands(j) multiplied) + constants(j), [C, columns] float32."""
    for j, acc in enumerate(accs):
        plgpu.wgmma(acc, *operands(j))
    ys = []
    for j, acc in enumerate(accs):
        y = acc[...]
        y = y if inverse is None else y * over_columns(inverse, y)
        ys.append(y + lax.broadcast_in_dim(constants(j), y.shape, [1]))
    return ys
