"""Attention operations for TPUs: the feature map and the rule run inside Pallas kernels."""

import jax
import jax.numpy as jnp

from lowrank_attn.ops.arguments import Arguments, Method, State
from lowrank_attn.ops.block_sizes import tpu_blocks
from lowrank_attn.ops.pallas_tpu_scan import Scan, chunk_scan
from lowrank_attn.ops.rules.base import dot

# The backward pass keeps one state per this many tokens; states inside are recomputed.
TOKENS_PER_SAVED_STATE = 1024


def causal(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """Scan `rule.chunk` over chunks with the state in vector memory; see `ops.causal`."""
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
    y, S = chunk_scan(
        scan,
        method.join(args.state),
        _pad(blocks, 3, padded),
        _pad(rows, 2, padded),
        args.params,
        tokens,
    )
    return _tokens_first(y, T), method.split(S)


def bidirectional(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """Two scans: the state of all keys, then what each query reads; see `ops.bidirectional`."""
    args, features = _map_outside(args, method)
    T, Hq = args.q.shape[1:3]
    S, H, P = args.v.shape[1:]

    def add(S, blocks, rows, params, tokens):
        phi_k = _map_keys(features, blocks["k"][0], params, tokens)
        return [], S + dot(phi_k, method.with_ones(blocks["v"][0]), (0, 0))

    def read(S, blocks, rows, params, tokens):
        ys = []
        for q in blocks["q"]:
            phi_q = features(params, q, is_query=True, positions=tokens["q_positions"])
            ys.append(method.finish(dot(phi_q, S, (1, 0)), args.v.dtype))
        return ys, S

    scan, padded = _plan(method, S, add, (0, P, args.v.dtype), "total", replay=False)
    _, total = chunk_scan(
        scan,
        method.join(args.state),
        _pad({"k": _heads_first(args.k), "v": _heads_first(args.v)}, 3, padded),
        {},
        args.params,
        _pad(_key_tokens(args, padded), 1, padded),
    )
    scan, padded = _plan(method, T, read, (Hq // H, P, args.v.dtype), "read", replay=False)
    y, _ = chunk_scan(
        scan,
        total,
        _pad({"q": _heads_first(args.q, H)}, 3, padded),
        {},
        args.params,
        _pad(_query_tokens(args), 1, padded),
    )
    return _tokens_first(y, T), method.split(total)


def _map_outside(args, method):
    """The function that maps one head in a kernel; maps without one are applied here, by XLA."""
    if hasattr(method.features, "apply"):
        return args, method.features.apply
    q = method.features(args.params, args.q, is_query=True, positions=args.q_positions)
    k = method.features(args.params, args.k, is_query=False, positions=args.k_positions)
    return args._replace(q=q, k=k, params={}), lambda params, x, *, is_query, positions: x


def _map_keys(features, k, params, tokens):
    phi_k = features(params, k, is_query=False, positions=tokens["k_positions"])
    if "mask" in tokens:
        phi_k = jnp.where(tokens["mask"][:, None] > 0, phi_k, 0)
    return phi_k


def _plan(method, T, body, output, name, replay):
    """The scan over T tokens, and T padded to whole spans."""
    sizes = tpu_blocks()
    unit = min(sizes.backward_chunk, _round_up(T, 16))
    C = min(sizes.chunk, _round_up(T, unit))
    if method.chunk_size < 128:
        unit = C = min(unit, _round_up(method.chunk_size, 16))
    chunks = -(-T // C)
    spans = -(-chunks * C // TOKENS_PER_SAVED_STATE)
    span = -(-chunks // spans) * C
    scan = Scan(
        body, output, C, sizes.heads, unit, sizes.backward_heads, span, replay, sizes.vmem_bytes,
        f"{name}_attention",
    )  # fmt: skip
    return scan, spans * span


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
