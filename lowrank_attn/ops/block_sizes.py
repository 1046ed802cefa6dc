"""Block sizes by chip: of the Pallas kernels by static schedules, of `xla` on GPUs as measured."""

from typing import NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu

MIB = 2**20


class TPUBlocks(NamedTuple):
    """Block sizes of the TPU kernels.

    Attributes:
        chunk: tokens per matrix product in the forward scan.
        heads: heads (or sequences, where heads are few) per grid step of the forward scan.
        backward_chunk: as `chunk`, in the backward scan.
        backward_heads: as `heads`, in the backward scan.
        vmem_bytes: the vector memory that one kernel may use.
    """

    chunk: int
    heads: int
    backward_chunk: int
    backward_heads: int
    vmem_bytes: int


TPU = {
    "v4": TPUBlocks(256, 4, 256, 1, 15 * MIB),
    "v5e": TPUBlocks(256, 8, 256, 4, 96 * MIB),
    "v5p": TPUBlocks(256, 8, 256, 4, 48 * MIB),
    "v6e": TPUBlocks(512, 4, 512, 2, 96 * MIB),
    "7x": TPUBlocks(512, 4, 512, 2, 48 * MIB),
}
TPU_FALLBACK = TPUBlocks(256, 4, 256, 1, 15 * MIB)


def tpu_name() -> str | None:
    """The TPU that is compiled for: of the mesh in scope, else the default device; None: no TPU."""
    return pltpu.get_tpu_info().chip_version.value if pltpu.is_tpu_device() else None


def tpu_blocks() -> TPUBlocks:
    """The row of the TPU that is compiled for, or the one that fits everywhere."""
    return TPU.get(tpu_name() or "", TPU_FALLBACK)


class XLABlocks(NamedTuple):
    """How `xla` walks over the chunks of a span, for rules that have `parts`.

    Attributes:
        chunk: tokens per chunk.
        at_once: whether all chunks of a span are computed at once, else one after another.
    """

    chunk: int
    at_once: bool


def xla_blocks(chunk_size: int) -> XLABlocks:
    """What is fastest on the default device: large products on GPUs, cached chunks elsewhere.

    A `chunk_size` outside 128 to 255 stays as it is.
    """
    if jax.default_backend() != "gpu":
        return XLABlocks(chunk_size, at_once=False)
    return XLABlocks(256 if 128 <= chunk_size < 256 else chunk_size, at_once=True)
