"""One decoding step for a batch of heads as one Pallas TPU kernel."""

import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowrank_attn.ops.arguments import Arguments, Method, State
from lowrank_attn.ops.normalize import apply_normalizer
from lowrank_attn.ops.pallas_tpu_layout import divisor

# States per grid step. Sequences come first: their rows share a head's parameters.
STATES = 16
# The normaliser z is advanced as this many equal columns: single columns are no legal operands.
LANES = 128


def too_large(args: Arguments, vmem_bytes: int) -> str | None:
    """Why the state of one head does not fit into vector memory; None if it does."""
    needed = _state_bytes(args)
    if needed <= vmem_bytes:
        return None
    return (
        f"decode_step: the state of one head needs about {needed >> 20} MiB of vector memory, more "
        f"than the {vmem_bytes >> 20} MiB of this TPU; lower the number of features."
    )


def decode(args: Arguments, method: Method, features, vmem_bytes: int) -> tuple[jax.Array, State]:
    """Map q and k of many sequences by one product a head, and advance their states in place.

    Args:
        args: one token, T = 1.
        features: `features(params, x, is_query=..., positions=...)` of one head.
        vmem_bytes: limit of the kernel's vector memory.

    Returns:
        y [B, 1, Hq, P] and the next `State`.
    """
    B, _, Hq, _ = args.q.shape
    _, H, M, P = args.state.S.shape
    G = Hq // H
    most = min(STATES, vmem_bytes // _state_bytes(args))
    b = divisor(B, most)
    h = divisor(H, most // b)

    def sequences(x):  # [B, ...] -> [B / b, b, ...], whose blocks are legal tiles for any b
        return x.reshape(B // b, b, *x.shape[1:])

    def heads(x, G=1):  # [B, 1, H * G, X] -> [B / b, H, G, b, X]
        return sequences(x.reshape(B, H, G, -1)).transpose(0, 2, 3, 1, 4)

    inputs = {
        "q": heads(args.q, G),
        "k": heads(args.k),
        "v": args.v.swapaxes(1, 2),
        "gates": {n: g.reshape(B, H, 1, -1) for n, g in args.gates.items()},
        "positions": [
            sequences(jnp.broadcast_to(x, (B, 1))) for x in (args.q_positions, args.k_positions)
        ],
        "mask": [] if args.mask is None else [sequences(args.mask.astype(jnp.int32))],
        "params": {n: _matrices(p) for n, p in args.params.items()},
    }
    state = {"S": args.state.S}
    if args.state.z is not None:
        state["z"] = args.state.z[:, :, None]

    def kernel(refs, state, y_ref, next_state):
        q_positions, k_positions = (x[0].reshape(b) for x in refs["positions"])
        ones = jnp.ones((1, LANES), args.v.dtype)
        for j in range(h):
            params = {n: x[j].reshape(args.params[n].shape[1:]) for n, x in refs["params"].items()}
            phi_q = [
                features(params, refs["q"][0, j, g], is_query=True, positions=q_positions)
                for g in range(G)
            ]
            phi_k = features(params, refs["k"][0, j, 0], is_query=False, positions=k_positions)
            for mask in refs["mask"]:
                phi_k = jnp.where(mask[0] > 0, phi_k, 0)
            for i, g in itertools.product(range(b), range(G)):
                row = slice(i, i + 1)
                gates = {
                    n: x[i, j].reshape(1) if args.gates[n].ndim == 3 else x[i, j]
                    for n, x in refs["gates"].items()
                }

                def advance(S, v, q=phi_q[g][row], k=phi_k[row], gates=gates):
                    return method.rule.chunk(S, q, k, v, gates, None)

                y, next_state["S"][i, j] = advance(state["S"][i, j], refs["v"][i, j])
                total = None
                if "z" in state:
                    z = jnp.broadcast_to(state["z"][i, j].reshape(M, 1), (M, LANES))
                    total, z = advance(z, ones)
                    total = total[:, 0]
                    next_state["z"][i, j] = z[:, :1].reshape(1, M)
                y = apply_normalizer(y, total, method.normalize, method.epsilon)
                y_ref[0, j, g, row] = y.astype(args.v.dtype)

    def per_head(x):
        return pl.BlockSpec((1, h, *x.shape[2:]), lambda j, s: (s, j, 0, 0, 0))

    def per_state(x):
        return pl.BlockSpec((b, h, *x.shape[2:]), lambda j, s: (s, j, 0, 0))

    per_token = pl.BlockSpec((1, b, 1), lambda j, s: (s, 0, 0))
    in_specs = {
        "q": per_head(inputs["q"]),
        "k": per_head(inputs["k"]),
        "v": per_state(inputs["v"]),
        "gates": jax.tree.map(per_state, inputs["gates"]),
        "positions": [per_token, per_token],
        "mask": [per_token for _ in inputs["mask"]],
        "params": {
            n: pl.BlockSpec((h, *p.shape[1:]), lambda j, s, nd=p.ndim: (j,) + (0,) * (nd - 1))
            for n, p in inputs["params"].items()
        },
    }
    state_specs = jax.tree.map(per_state, state)
    y_shape = (B // b, H, G, b, P)
    varying = jax.typeof(args.v).manual_axis_type

    def like(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)

    y, state = pl.pallas_call(
        kernel,
        grid=(H // h, B // b),
        in_specs=[in_specs, state_specs],
        out_specs=[
            pl.BlockSpec((1, h, G, b, P), lambda j, s: (s, j, 0, 0, 0)),
            state_specs,
        ],
        out_shape=[
            like(y_shape, args.v.dtype),
            {n: like(x.shape, x.dtype) for n, x in state.items()},
        ],
        input_output_aliases={len(jax.tree.leaves(inputs)) + i: 1 + i for i in range(len(state))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem_bytes
        ),
        name="decode_attention",
    )(inputs, state)
    y = y.transpose(0, 3, 1, 2, 4).reshape(B, 1, Hq, P)
    return y, State(state["S"], state["z"][:, :, 0] if "z" in state else None)


def _matrices(p):
    """[H, ...] with at least two axes behind the head axis, as a block of one head needs them."""
    return p.reshape(p.shape[0], *(1,) * (3 - p.ndim), *p.shape[1:])


def _state_bytes(args):
    """About how much vector memory one state takes: in and out, in use and being copied."""
    M, P = args.state.S.shape[2:]
    params = sum(p.size // p.shape[0] for p in args.params.values())
    return 4 * (4 * M * -(-P // 128) * 128 + 2 * params)
