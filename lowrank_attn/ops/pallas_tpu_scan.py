"""A scan over chunks of tokens as two Pallas TPU kernels, forward and backward, for any body."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowrank_attn.ops.manual_axes import vary, varying_axes
from lowrank_attn.ops.pallas_tpu_layout import Inputs, Scan, cut, make_layout


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
    inputs = inputs._replace(params=floating, constants=constants)
    inputs = vary(inputs, varying_axes(inputs))
    return _scan(scan._replace(body=body), *inputs)


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


def _shape(shape, dtype, like):
    varying = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def _forward(scan, inputs, keep):
    """Returns y, the last S, and (keep) S at the start of every span [B, H, T / span, M, P]."""
    layout = make_layout(scan, inputs, backward=False)
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
    )(cut(inputs, layout.C))
    return out.get("y"), out["S"], out.get("kept")


def _backward(scan, inputs, kept, dy, dS):
    """Returns the gradients of S, blocks, rows and params, by one scan from the last span back."""
    layout = make_layout(scan, inputs, backward=True)
    B, H, M, P = inputs.S.shape
    G, _, dtype = scan.output
    lines = cut(inputs, layout.C)
    specs = layout.specs(lines)
    like = jax.tree.map(lambda x: _shape(x.shape, x.dtype, x), lines)
    out_shape = {"S": like.S, "blocks": like.blocks, "rows": like.rows, "params": {
        n: _shape(x.shape, jnp.float32, x) for n, x in lines.params.items()}}  # fmt: skip
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

                def body(S, blocks, rows, params, constants=constants, tokens=tokens):
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
            jax.lax.fori_loop(0, layout.chunks - 1, replay, None, unroll=True)
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
    )(lines, given)
    rows = {n: x.reshape(inputs.rows[n].shape) for n, x in out["rows"].items()}
    params = {n: x.astype(inputs.params[n].dtype) for n, x in out["params"].items()}
    return out["S"], out["blocks"], rows, params
