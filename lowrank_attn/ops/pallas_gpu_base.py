"""What the Hopper kernels share: shared-memory tiles, launches and the split of work over a GPU."""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.manual_axes import vary, varying_axes

C = 64  # tokens per chunk: the number of rows of one wgmma
SHARED_BYTES = 232448 - 1024  # of one block on Hopper, less room for barriers and alignment
SMS = 132


def tiles(*shape: int):
    """A bfloat16 buffer in shared memory, tiled and swizzled as TMA and wgmma want it.

    The last axis is 32 or a multiple of 64, the same of both operands of a product that lie there.
    """
    columns = min(shape[-1], 64)
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def launch(body, out_type, *, grid: dict[str, int], warpgroups: int, scratch, interpret):
    """`plgpu.kernel` with one thread axis `wg` of warpgroups and the named grid axes.

    Args:
        interpret: None, or `plgpu.InterpretGPUParams` to run on a CPU.
    """
    options = {} if interpret is None else {"interpret": interpret}
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=scratch,
        # sums run within the quads of lanes that hold a row, so that they need no shared memory
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **options,
    )

    def run(*operands):  # the kernel's results do not say that they vary as its operands do
        return vary(kernel(*operands), varying_axes(operands))

    return run


def mod(n: jax.Array, k: int) -> jax.Array:
    """Remainder of n >= 0; `%` would add the handling of negative n."""
    return jax.lax.rem(n, jnp.asarray(k, n.dtype))


def ring(n: int | jax.Array, slots: int, free, fill) -> None:
    """The loop of a producer: call `fill(i, slot)` n times over a ring of slots.

    Waits at `free` until the consumers are done with a slot, and at the end until they are done
    with all of them, so that no barrier is left with an arrival that nobody waited for.
    """

    @pl.loop(0, n)
    def _(i):
        slot = mod(i, slots)

        @pl.when(i >= slots)
        def _():
            plgpu.barrier_wait(free.at[slot])

        fill(i, slot)

    drain(n, slots, free)


def drain(n: int | jax.Array, slots: int, free) -> None:
    """Wait until the last users of a ring that was filled n times are done."""

    @pl.loop(jnp.maximum(n - slots, 0), n)
    def _(i):
        plgpu.barrier_wait(free.at[mod(i, slots)])


def as_operand(value: jax.Array, scratch):
    """`value`, as the left operand of a product: itself, or in `scratch` if there is some.

    The interpreter has no operands in registers; only for it is there scratch memory.
    """
    if scratch is None:
        return value
    scratch[...] = value
    plgpu.commit_smem()
    return scratch


def accumulate(body, *shapes: tuple[int, int], spare=()):
    """`body(*accumulators)`: float32 sums of products, zero at first, that may also be written.

    Accumulators are registers; the interpreter cannot write to these and takes `spare` memory.
    """
    if not spare:
        return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
    for ref, shape in zip(spare, shapes, strict=True):
        ref[...] = jnp.zeros(shape, jnp.float32)
    return body(*spare)


def add_product(acc, a, b, interpret) -> None:
    """Add a @ b to an accumulator of `accumulate`."""
    if interpret is None:
        plgpu.wgmma(acc, a, b)
        return

    def product(room):
        plgpu.wgmma(room, a, b)
        return room[...]

    acc[...] += pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))


def pad_to(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Pad one axis with zeros up to `size`."""
    missing = size - x.shape[axis]
    return jnp.pad(x, [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)])


def best_split(blocks: int, most: int, overhead: float = 0.0) -> int:
    """Into how many parts to cut each of `blocks` equal pieces of work.

    Minimises the time of the last wave over the GPU, where cutting at all costs `overhead` of the
    time of one piece and each part a little more.
    """

    def time(parts):
        waves = math.ceil(blocks * parts / SMS)
        return waves / parts * (1 + (overhead if parts > 1 else 0)) + 0.004 * parts

    return min(range(1, max(most, 1) + 1), key=time)
