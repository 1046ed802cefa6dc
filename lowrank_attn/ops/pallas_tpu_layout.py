"""How the TPU scan kernels cut their arrays into blocks, and how much memory that takes."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

Arrays = dict[str, jax.Array]


class Scan(NamedTuple):
    """The static part of a scan.

    Attributes:
        body: `body(S, blocks, rows, params, tokens)` advances ONE head by one chunk of C tokens and
            returns (list of y [C, P], S). It gets S [M, P], blocks name -> list of G arrays [C, X],
            rows name -> [C], the head's parameters, and tokens name -> [C]. The backward kernel
            differentiates it by `jax.vjp`.
        output: (how many y, P, dtype); none for a scan that only sums.
        chunk: C.
        heads: the most heads times sequences in one grid step.
        backward_chunk, backward_heads: the same for the backward kernel.
        span: tokens per state that is kept for the backward kernel; a multiple of both chunks and a
            divisor of T.
        replay: whether the backward kernel recomputes the state at the start of every chunk from
            those kept. False: the initial state does everywhere, because the body does not change
            the state or has no gradient that depends on it.
        vmem_bytes: limit of the vector memory of one kernel.
        name: name of the kernels.
    """

    body: Callable[..., tuple[list[jax.Array], jax.Array]]
    output: tuple[int, int, Any]
    chunk: int
    heads: int
    backward_chunk: int
    backward_heads: int
    span: int
    replay: bool
    vmem_bytes: int
    name: str


class Inputs(NamedTuple):
    """The arrays of a scan, of which the floating ones have gradients.

    Attributes:
        S: [B, H, M, P], float32.
        blocks: name -> [B, H, G, T, X], floating.
        rows: name -> [B, H, T], floating.
        params: name -> [H, ...], floating.
        constants: name -> [H, ...], parameters of other dtypes; `chunk_scan` moves them here.
        tokens: name -> [B, T], int32.
    """

    S: jax.Array
    blocks: Arrays
    rows: Arrays
    params: Arrays
    constants: Arrays
    tokens: Arrays


class Layout(NamedTuple):
    """How one kernel cuts its arrays: `chunks` chunks of C tokens and b x h heads per grid step."""

    C: int
    chunks: int
    b: int
    h: int
    steps: int
    reverse: bool

    def at(self, step):
        return self.steps - 1 - step if self.reverse else step

    def specs(self, inputs: Inputs) -> Any:
        """Block specs of the inputs, for a grid over (head blocks, sequence blocks, steps)."""
        line = pl.BlockSpec((self.b, self.chunks, 1, self.C), lambda h, b, s: (b, self.at(s), 0, 0))
        parts: list[Any] = [
            self.state(inputs.S.shape),
            {n: self.block(x.shape) for n, x in inputs.blocks.items()},
            {n: self.row() for n in inputs.rows},
            {n: self.param(x.shape) for n, x in inputs.params.items()},
            {n: self.param(x.shape) for n, x in inputs.constants.items()},
            dict.fromkeys(inputs.tokens, line),
        ]
        return Inputs(*parts)

    def state(self, shape):
        return pl.BlockSpec((self.b, self.h, *shape[2:]), lambda h, b, s: (b, h, 0, 0))

    def block(self, shape):
        return pl.BlockSpec(
            (self.b, self.h, shape[2], self.chunks * self.C, shape[4]),
            lambda h, b, s: (b, h, 0, self.at(s), 0),
        )

    def row(self):
        return pl.BlockSpec(
            (self.b, self.h, self.chunks, 1, self.C), lambda h, b, s: (b, h, self.at(s), 0, 0)
        )

    def param(self, shape):
        return pl.BlockSpec((self.h, *shape[1:]), lambda h, b, s: (h,) + (0,) * (len(shape) - 1))

    def units(self):
        """The (sequence, head) pairs of one grid step."""
        return list(itertools.product(range(self.b), range(self.h)))

    def tokens(self, i):
        """The tokens of chunk i of a block."""
        start = i * self.C
        return pl.ds(start if isinstance(i, int) else pl.multiple_of(start, self.C), self.C)

    def load(self, refs: Inputs, i, b, h):
        """What the body takes for chunk i of head (b, h), without the state."""
        rows = self.tokens(i)
        return (
            {n: [x[b, h, g, rows] for g in range(x.shape[2])] for n, x in refs.blocks.items()},
            {n: x[b, h, i].reshape(self.C) for n, x in refs.rows.items()},
            {n: x[h] for n, x in refs.params.items()},
            {n: x[h] for n, x in refs.constants.items()},
            {n: x[b, i].reshape(self.C) for n, x in refs.tokens.items()},
        )


def make_layout(scan, inputs, backward):
    """As many heads per step as `scan` allows and vector memory holds."""
    B, H = inputs.S.shape[:2]
    T = next(iter(inputs.blocks.values())).shape[3]
    C, heads = (scan.backward_chunk, scan.backward_heads) if backward else (scan.chunk, scan.heads)
    chunks = scan.span // C if backward else 1
    heads = min(heads, max(1, scan.vmem_bytes // _head_bytes(scan, inputs, backward)))
    h = divisor(H, heads)
    b = divisor(B, heads // h)
    return Layout(C, chunks, b, h, T // (chunks * C), backward)


def _head_bytes(scan, inputs, backward):
    """About how much vector memory one head takes; blocks count twice as copies overlap work."""

    def tile(x, rows=None):
        rows = x.shape[-2] if rows is None else rows
        bytes_of_row = -(-x.shape[-1] // 128) * 128 * x.dtype.itemsize
        return -(-rows // 8) * 8 * bytes_of_row

    C = scan.backward_chunk if backward else scan.chunk
    tokens = scan.span if backward else C
    M = inputs.S.shape[2]
    G, width, dtype = scan.output
    state = tile(inputs.S)
    blocks = sum(x.shape[2] * tile(x, tokens) for x in inputs.blocks.values())
    params = sum(math.prod(x.shape[1:-2]) * tile(x) for x in inputs.params.values() if x.ndim > 2)
    y = G * tile(jax.ShapeDtypeStruct((tokens, width), dtype))
    temporary = 2 * (1 + G) * C * (C + 3 * M)
    if backward:
        return 2 * (2 * blocks + 2 * params + y + 4 * state + temporary) + tokens // C * state
    return 2 * (blocks + params + y + 3 * state) + state + temporary


def divisor(n, most):
    """The largest divisor of n up to `most`."""
    return max(i for i in range(1, most + 1) if n % i == 0)


def cut(inputs, C):
    """Cut the token axis of rows and tokens into lines of C, which are legal tiles for any C."""
    return inputs._replace(
        rows={n: x.reshape(*x.shape[:2], -1, 1, C) for n, x in inputs.rows.items()},
        tokens={n: x.reshape(x.shape[0], -1, 1, C) for n, x in inputs.tokens.items()},
    )


def too_large(scan: Scan, inputs: Inputs) -> str | None:
    """Why a grid step of one head does not fit into vector memory; None if it does."""
    for backward in (False, True):
        needed = _head_bytes(scan, inputs, backward)
        if needed > scan.vmem_bytes:
            return (
                f"{scan.name}: one head in chunks of {scan.chunk} tokens needs about "
                f"{needed >> 20} MiB of vector memory, more than the {scan.vmem_bytes >> 20} MiB "
                "of this TPU; lower the number of features, or chunk_size below 128."
            )
    return None
