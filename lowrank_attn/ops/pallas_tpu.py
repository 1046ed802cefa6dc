"""Attention operations for TPUs: the feature map and the rule run inside Pallas kernels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_attn.ops import pallas_tpu_decode, xla
from lowrank_attn.ops.arguments import Arguments, Method, State
from lowrank_attn.ops.block_sizes import TPUBlocks, tpu_blocks, tpu_name
from lowrank_attn.ops.pallas_tpu_layout import Inputs, Scan, too_large
from lowrank_attn.ops.pallas_tpu_scan import chunk_scan
from lowrank_attn.ops.rules.base import dot

# The backward pass keeps one state per this many tokens; states inside are recomputed.
TOKENS_PER_SAVED_STATE = 1024


def unsuited(args: Arguments) -> str | None:
    """Why the kernels are not made for these arrays; None if they are."""
    for name, x in (("q", args.q), ("k", args.k), ("v", args.v)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} has dtype {x.dtype}, but TPU kernels take float32 and bfloat16."
    return None


def unsupported(op: str, args: Arguments, method: Method) -> str | None:
    """Why this implementation cannot do the call of `op`; None if it can."""
    reason = unsuited(args)
    if reason is not None:
        return reason
    if op == "decode_step":
        if args.gates and tpu_name() == "v4":
            return "TPU v4 cannot broadcast the gates of a single token inside a kernel."
        return pallas_tpu_decode.too_large(args, tpu_blocks().vmem_bytes)
    reasons = []

    def plan(args):
        scans = _totals_and_reads if op == "bidirectional" and args.reset is None else _causal
        reasons.extend(too_large(scan, inputs) for scan, inputs in scans(args, method))

    jax.eval_shape(plan, args)
    return next(filter(None, reasons), None)


def causal(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """Scan `rule.chunk` over chunks with the state in vector memory; see `ops.causal`."""
    _check("causal", args, method)
    ((scan, inputs),) = _causal(args, method)
    y, S = chunk_scan(scan, inputs)
    return _tokens_first(y, args.q.shape[1]), method.split(S)


def bidirectional(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """Two scans: the state of all keys, then what each query reads; see `ops.bidirectional`."""
    _check("bidirectional", args, method)
    if args.reset is not None:
        return xla.read_packed(args, method, causal)
    (total, keys), (read, queries) = _totals_and_reads(args, method)
    _, S = chunk_scan(total, keys)
    y, _ = chunk_scan(read, queries._replace(S=S))
    return _tokens_first(y, args.q.shape[1]), method.split(S)


def decode_step(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """One token for all heads in one kernel; its gradient is that of `xla`."""
    _check("decode_step", args, method)

    @jax.custom_vjp
    def step(args):
        outside, features = _map_outside(args, method)
        return pallas_tpu_decode.decode(outside, method, features, tpu_blocks().vmem_bytes)

    def backward(args, cotangents):
        return jax.vjp(lambda args: xla.decode_step(args, method), args)[1](cotangents)

    step.defvjp(lambda args: (step(args), args), backward)
    return step(args)


def _check(op, args, method):
    reason = unsupported(op, args, method)
    if reason is not None:
        raise NotImplementedError(reason)


def _causal(args, method):
    """The one scan of `causal` and its arrays."""
    args, features = _map_outside(args, method)
    T, Hq = args.q.shape[1:3]
    H, P = args.v.shape[2:]

    def body(S, blocks, rows, params, tokens):
        phi_k = _map_keys(features, blocks["k"][0], params, tokens)
        v = method.with_ones(blocks["v"][0])
        gates = {n: rows[n] if n in rows else blocks[n][0] for n in method.rule.gates}
        run = None
        if "reset" in tokens:
            run = tokens["resets"] - tokens["resets"][0] + tokens["reset"][0]
        ys = []
        for q in blocks["q"]:
            phi_q = features(params, q, is_query=True, positions=tokens["q_positions"])
            y, S_next = method.rule.chunk(S, phi_q, phi_k, v, gates, run)
            ys.append(method.finish(y, args.v.dtype))
        return ys, S_next

    scan, padded = _plan(method, T, body, (Hq // H, P, args.v.dtype), "causal", replay=True)
    blocks = {"q": _heads_first(args.q, H), "k": _heads_first(args.k), "v": _heads_first(args.v)}
    blocks |= {n: _heads_first(g) for n, g in args.gates.items() if g.ndim == 4}
    rows = {n: jnp.swapaxes(g, 1, 2) for n, g in args.gates.items() if g.ndim == 3}
    tokens = _query_tokens(args) | _key_tokens(args, padded)
    if args.reset is not None:
        tokens["reset"] = args.reset.astype(jnp.int32)
    tokens = _pad(tokens, 1, padded)
    if args.reset is not None:
        tokens["resets"] = jnp.cumsum(tokens["reset"], axis=1)
    blocks, rows = _pad(blocks, 3, padded), _pad(rows, 2, padded)
    return [(scan, Inputs(method.join(args.state), blocks, rows, args.params, {}, tokens))]


def _totals_and_reads(args, method):
    """The two scans of `bidirectional`; the second one still has the initial state."""
    args, features = _map_outside(args, method)
    T, Hq = args.q.shape[1:3]
    S, H, P = args.v.shape[1:]
    state = method.join(args.state)

    def add(S, blocks, rows, params, tokens):
        phi_k = _map_keys(features, blocks["k"][0], params, tokens)
        return [], S + dot(phi_k, method.with_ones(blocks["v"][0]), (0, 0))

    def read(S, blocks, rows, params, tokens):
        ys = []
        for q in blocks["q"]:
            phi_q = features(params, q, is_query=True, positions=tokens["q_positions"])
            ys.append(method.finish(dot(phi_q, S, (1, 0)), args.v.dtype))
        return ys, S

    total, padded = _plan(method, S, add, (0, P, args.v.dtype), "total", replay=False)
    blocks = _pad({"k": _heads_first(args.k), "v": _heads_first(args.v)}, 3, padded)
    tokens = _pad(_key_tokens(args, padded), 1, padded)
    keys = Inputs(state, blocks, {}, args.params, {}, tokens)
    reads, padded = _plan(method, T, read, (Hq // H, P, args.v.dtype), "read", replay=False)
    blocks = _pad({"q": _heads_first(args.q, H)}, 3, padded)
    queries = Inputs(state, blocks, {}, args.params, {}, _pad(_query_tokens(args), 1, padded))
    return [(total, keys), (reads, queries)]


def _map_outside(args, method):
    """The function that maps one head in a kernel; maps that have none are applied here, by XLA."""
    if hasattr(method.features, "apply") and not _holds_constants(args, method.features.apply):
        H = args.k.shape[2]  # consecutive heads may share parameters
        params = {n: jnp.repeat(p, H // p.shape[0], axis=0) for n, p in args.params.items()}
        return args._replace(params=params), method.features.apply
    q = method.features(args.params, args.q, is_query=True, positions=args.q_positions)
    k = method.features(args.params, args.k, is_query=False, positions=args.k_positions)
    return args._replace(q=q, k=k, params={}), lambda params, x, *, is_query, positions: x


def _holds_constants(args, apply):
    """Whether `apply` of one head refers to arrays of its own, which a kernel cannot capture."""
    params = {n: jax.ShapeDtypeStruct(p.shape[1:], p.dtype) for n, p in args.params.items()}
    rows = jax.ShapeDtypeStruct((16, args.q.shape[-1]), args.q.dtype)
    positions = jax.ShapeDtypeStruct((16,), jnp.int32)

    def one_head(params, rows, positions):
        return apply(params, rows, is_query=True, positions=positions)

    return bool(jax.make_jaxpr(one_head)(params, rows, positions).consts)


def _map_keys(features, k, params, tokens):
    phi_k = features(params, k, is_query=False, positions=tokens["k_positions"])
    if "mask" in tokens:
        phi_k = jnp.where(tokens["mask"][:, None] > 0, phi_k, 0)
    return phi_k


class Chunks(NamedTuple):
    """How T tokens are cut; see `Scan`. `padded` is T rounded up to whole spans."""

    chunk: int
    backward_chunk: int
    span: int
    padded: int


def plan_chunks(sizes: TPUBlocks, T: int, chunk_size: int) -> Chunks:
    """Chunks of the size in the table, of T if that is less, of `chunk_size` if that is below 128.

    Chunks are multiples of 16 tokens, the rows of one tile of bfloat16.
    """
    smaller = min(T, chunk_size) if chunk_size < 128 else T
    backward_chunk = min(sizes.backward_chunk, _round_up(smaller, 16))
    chunk = min(sizes.chunk, _round_up(smaller, backward_chunk))
    chunks = -(-T // chunk)
    spans = -(-chunks * chunk // TOKENS_PER_SAVED_STATE)
    span = -(-chunks // spans) * chunk
    return Chunks(chunk, backward_chunk, span, spans * span)


def _plan(method, T, body, output, name, replay):
    """The scan over T tokens, and T padded to whole spans."""
    sizes = tpu_blocks()
    chunks = plan_chunks(sizes, T, method.chunk_size)
    scan = Scan(
        body,
        output,
        chunks.chunk,
        sizes.heads,
        chunks.backward_chunk,
        sizes.backward_heads,
        chunks.span,
        replay,
        sizes.vmem_bytes,
        f"{name}_attention",
    )
    return scan, chunks.padded


def _round_up(n, multiple):
    return -(-n // multiple) * multiple


def _heads_first(x, H=None):
    """[B, T, H * G, X] -> [B, H, G, T, X]."""
    B, T, heads, X = x.shape
    H = H or heads
    return x.reshape(B, T, H, heads // H, X).transpose(0, 2, 3, 1, 4)


def _tokens_first(y, T):
    """[B, H, G, padded T, P] -> [B, T, H * G, P]."""
    B, H, G, _, P = y.shape
    return y[:, :, :, :T].transpose(0, 3, 1, 2, 4).reshape(B, T, H * G, P)


def _query_tokens(args):
    return {"q_positions": jnp.broadcast_to(args.q_positions, args.q.shape[:2])}


def _key_tokens(args, padded):
    B, S = args.k.shape[:2]
    tokens = {"k_positions": jnp.broadcast_to(args.k_positions, (B, S))}
    if args.mask is not None:
        tokens["mask"] = args.mask.astype(jnp.int32)
    elif padded != S:
        tokens["mask"] = jnp.ones((B, S), jnp.int32)
    return tokens


def _pad(arrays, axis, length):
    """Append zeros to the token axis of every array."""

    def pad(x):
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, length - x.shape[axis])
        return jnp.pad(x, widths)

    return {name: pad(x) for name, x in arrays.items()}
