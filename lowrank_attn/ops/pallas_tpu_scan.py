"""A scan over chunks of tokens as two Pallas TPU kernels, forward and backward, for any body."""

import functools
import itertools
import math
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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


def chunk_scan(scan: Scan, inputs: Inputs) -> tuple[jax.Array | None, jax.Array]:
    """Scan `scan.body` over the chunks of every head.

    Returns:
        y [B, H, G, T, P] (None if there is no output) and the last S [B, H, M, P], float32.
    """
    shapes = {name: leaf.shape[1:] for name, leaf in inputs.params.items()}

    def body(S, blocks, rows, params, tokens):
        params = {name: leaf.reshape(shapes[name]) for name, leaf in params.items()}
        return scan.body(S, blocks, rows, params, tokens)

    params = {  # a block of one head needs two axes behind the head axis
        name: leaf.reshape(leaf.shape[0], *(1,) * (3 - leaf.ndim), *leaf.shape[1:])
        for name, leaf in inputs.params.items()
    }
    floating = {n: p for n, p in params.items() if jnp.issubdtype(p.dtype, jnp.floating)}
    constants = {n: p for n, p in params.items() if n not in floating}
    inputs = _vary_alike(inputs._replace(params=floating, constants=constants))
    return _scan(scan._replace(body=body), *inputs)


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


def _vary_alike(tree):
    """Let all arrays vary over the same manual axes of a mesh, as kernels in `shard_map` need."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))

    def vary(x):
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(scan, *inputs):
    y, S, _ = _forward(scan, Inputs(*inputs), keep=False)
    return y, S


def _scan_forward(scan, *inputs):
    y, S, kept = _forward(scan, Inputs(*inputs), keep=scan.replay)
    return (y, S), (inputs, kept)


def _scan_backward(scan, residuals, cotangents):
    inputs, kept = residuals
    return (*_backward(scan, Inputs(*inputs), kept, *cotangents), None, None)


_scan.defvjp(_scan_forward, _scan_backward)


class _Layout(NamedTuple):
    """How one kernel cuts its arrays: `chunks` chunks of C tokens and b x h heads per grid step."""

    C: int
    chunks: int
    b: int
    h: int
    steps: int
    reverse: bool

    def at(self, step):
        return self.steps - 1 - step if self.reverse else step

    def specs(self, inputs: Inputs) -> Inputs:
        """Block specs of the inputs, for a grid over (head blocks, sequence blocks, steps)."""
        return Inputs(
            self.state(inputs.S.shape),
            {n: self.block(x.shape) for n, x in inputs.blocks.items()},
            {n: self.row() for n in inputs.rows},
            {n: self.param(x.shape) for n, x in inputs.params.items()},
            {n: self.param(x.shape) for n, x in inputs.constants.items()},
            {
                n: pl.BlockSpec(
                    (self.b, self.chunks, 1, self.C), lambda h, b, s: (b, self.at(s), 0, 0)
                )
                for n in inputs.tokens
            },
        )

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


def _layout(scan, inputs, backward):
    """As many heads per step as `scan` allows and vector memory holds."""
    B, H = inputs.S.shape[:2]
    T = next(iter(inputs.blocks.values())).shape[3]
    C, heads = (
        (scan.backward_chunk, scan.backward_heads) if backward else (scan.chunk, scan.heads)
    )
    chunks = scan.span // C if backward else 1
    heads = min(heads, max(1, scan.vmem_bytes // _head_bytes(scan, inputs, backward)))
    h = divisor(H, heads)
    b = divisor(B, heads // h)
    return _Layout(C, chunks, b, h, T // (chunks * C), backward)


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


def _cut(inputs, C):
    """Cut the token axis of rows and tokens into lines of C, which are legal tiles for any C."""
    return inputs._replace(
        rows={n: x.reshape(*x.shape[:2], -1, 1, C) for n, x in inputs.rows.items()},
        tokens={n: x.reshape(x.shape[0], -1, 1, C) for n, x in inputs.tokens.items()},
    )


def _shape(shape, dtype, like):
    varying = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def _forward(scan, inputs, keep):
    """Returns y, the last S, and (keep) S at the start of every span [B, H, T / span, M, P]."""
    layout = _layout(scan, inputs, backward=False)
    B, H, M, P = inputs.S.shape
    T = next(iter(inputs.blocks.values())).shape[3]
    out_specs = {"S": layout.state(inputs.S.shape)}
    out_shape = {"S": _shape(inputs.S.shape, jnp.float32, inputs.S)}
    G, width, dtype = scan.output
    if G:
        out_shape["y"] = _shape((B, H, G, T, width), dtype, inputs.S)
        out_specs["y"] = layout.block(out_shape["y"].shape)
    per_span = scan.span // scan.chunk
    if keep:
        out_shape["kept"] = _shape((B, H, T // scan.span, M, P), jnp.float32, inputs.S)
        out_specs["kept"] = pl.BlockSpec(
            (layout.b, layout.h, 1, M, P), lambda h, b, s: (b, h, s // per_span, 0, 0)
        )

    def kernel(refs, out, S):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            S[...] = refs.S[...]

        if keep:

            @pl.when(step % per_span == 0)
            def _():
                out["kept"][:, :, 0] = S[...]

        for b, h in layout.units():
            blocks, rows, params, constants, tokens = layout.load(refs, 0, b, h)
            y, S_next = scan.body(S[b, h], blocks, rows, params | constants, tokens)
            for g in range(G):
                out["y"][b, h, g] = y[g].astype(dtype)
            S[b, h] = S_next

        @pl.when(step == layout.steps - 1)
        def _():
            out["S"][...] = S[...]

    out = pl.pallas_call(
        kernel,
        grid=(H // layout.h, B // layout.b, layout.steps),
        in_specs=[layout.specs(inputs)],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM((layout.b, layout.h, M, P), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=scan.vmem_bytes,
        ),
        name=f"{scan.name}_forward",
    )(_cut(inputs, layout.C))
    return out.get("y"), out["S"], out.get("kept")


def _backward(scan, inputs, kept, dy, dS):
    """Returns the gradients of S, blocks, rows and params, by one scan from the last span back."""
    layout = _layout(scan, inputs, backward=True)
    B, H, M, P = inputs.S.shape
    G, _, dtype = scan.output
    cut = _cut(inputs, layout.C)
    specs = layout.specs(cut)
    like = jax.tree.map(lambda x: _shape(x.shape, x.dtype, x), cut)
    out_shape = {"S": like.S, "blocks": like.blocks, "rows": like.rows, "params": {
        n: _shape(x.shape, jnp.float32, x) for n, x in cut.params.items()}}  # fmt: skip
    out_specs = {n: getattr(specs, n) for n in out_shape}
    given = {"S": dS} | ({"y": dy} if G else {}) | ({"kept": kept} if scan.replay else {})
    given_specs = {"S": specs.S}
    if G:
        given_specs["y"] = layout.block(dy.shape)
    if scan.replay:
        given_specs["kept"] = pl.BlockSpec(
            (layout.b, layout.h, 1, M, P), lambda h, b, s: (b, h, layout.at(s), 0, 0)
        )

    def kernel(refs, given, out, dS, states):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            dS[...] = given["S"][...]

        @pl.when((step == 0) & (pl.program_id(1) == 0))
        def _():
            for x in out["params"].values():
                x[...] = jnp.zeros_like(x)

        if scan.replay:
            states[0] = given["kept"][:, :, 0]

        def replay(i, _):
            for b, h in layout.units():
                blocks, rows, params, constants, tokens = layout.load(refs, i, b, h)
                states[i + 1, b, h] = scan.body(
                    states[i, b, h], blocks, rows, params | constants, tokens
                )[1]

        def back(i, _):
            i = layout.chunks - 1 - i
            at = layout.tokens(i)
            for b, h in layout.units():
                *floating, constants, tokens = layout.load(refs, i, b, h)

                def body(S, blocks, rows, params):
                    return scan.body(S, blocks, rows, params | constants, tokens)

                S = states[i, b, h] if scan.replay else refs.S[b, h]
                _, pull = jax.vjp(body, S, *floating)
                dy = [given["y"][b, h, g, at] for g in range(G)]
                dS[b, h], blocks, rows, params = pull((dy, dS[b, h]))
                for n, dx in blocks.items():
                    for g in range(len(dx)):
                        out["blocks"][n][b, h, g, at] = dx[g]
                for n, dx in rows.items():
                    out["rows"][n][b, h, i] = dx.reshape(1, layout.C)
                for n, dx in params.items():
                    out["params"][n][h] += dx.astype(jnp.float32)

        if scan.replay:
            jax.lax.fori_loop(0, layout.chunks - 1, replay, None)
        jax.lax.fori_loop(0, layout.chunks, back, None)

        @pl.when(step == layout.steps - 1)
        def _():
            out["S"][...] = dS[...]

    states = (layout.chunks if scan.replay else 1, layout.b, layout.h, M, P)
    out = pl.pallas_call(
        kernel,
        grid=(H // layout.h, B // layout.b, layout.steps),
        in_specs=[specs, given_specs],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((layout.b, layout.h, M, P), jnp.float32),
            pltpu.VMEM(states, jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=scan.vmem_bytes,
        ),
        name=f"{scan.name}_backward",
    )(cut, given)
    rows = {n: x.reshape(inputs.rows[n].shape) for n, x in out["rows"].items()}
    params = {n: x.astype(inputs.params[n].dtype) for n, x in out["params"].items()}
    return out["S"], out["blocks"], rows, params
