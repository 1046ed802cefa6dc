"""Chunked linear attention in plain `jnp`, for every platform."""

import jax
import jax.numpy as jnp

from lowrank_attn.ops.arguments import Arguments, Method, State
from lowrank_attn.ops.normalize import apply_normalizer
from lowrank_attn.ops.rules.base import dot

# Training keeps the inputs and one state per this many tokens; states inside are recomputed.
TOKENS_PER_SAVED_STATE = 1024


def causal(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """Scan `rule.chunk` over chunks, mapping the features of one chunk at a time.

    Two nested scans: the outer one, over spans of about `TOKENS_PER_SAVED_STATE` tokens, is
    rematerialised, so that its backward pass keeps q, k, v and one state per span, and recomputes
    features and chunk states of one span while it walks back.
    """
    B, T, Hq, _ = args.q.shape
    C = min(method.chunk_size, T)
    chunks = -(-T // C)
    spans = -(-T // max(TOKENS_PER_SAVED_STATE, C))
    per_span = -(-chunks // spans)
    padded = spans * per_span * C

    if args.mask is None and padded != T:
        args = args._replace(mask=jnp.ones((B, T), bool))
    args = args._replace(
        q_positions=jnp.broadcast_to(args.q_positions, (B, T)),
        k_positions=jnp.broadcast_to(args.k_positions, (B, T)),
    )
    no_state = State(None, None)  # type: ignore[arg-type]  # the scan carries it

    def cut(x):  # [B, T, ...] -> [spans, chunks per span, B, C, ...]
        x = jnp.pad(x, [(0, 0), (0, padded - T)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, spans, per_span, C, *x.shape[2:]), 0, 2)

    def chunk(S, args):
        y, S = _chunk_all_heads(S, args._replace(params=params), method)
        return S, method.finish(y, args.v.dtype)

    @jax.checkpoint
    def span(S, args):
        return jax.lax.scan(chunk, S, args)

    S, params = method.join(args.state), args.params
    per_token = jax.tree.map(cut, args._replace(params={}, state=no_state))
    S, y = jax.lax.scan(span, S, per_token)
    y = jnp.moveaxis(y, 2, 0).reshape(B, padded, Hq, -1)[:, :T]
    return y, method.split(S)


def bidirectional(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """Two matrix products: the state of all keys, then what each query reads from it."""
    if args.reset is not None:
        return read_packed(args, method, causal)
    return jax.checkpoint(lambda args: _read_total(args, method))(args)


def read_packed(args: Arguments, method: Method, causal) -> tuple[jax.Array, State]:
    """`bidirectional` for packed documents, each of which has a state of its own.

    They are read twice by `causal` of some implementation: forward and, without the token itself,
    backward.
    """
    S0 = method.join(args.state)
    *_, v = method.map(args)
    sums = method._replace(normalize="none")
    args = args._replace(v=v.astype(jnp.float32))
    y, state = causal(args._replace(state=State(S0, None)), sums)
    later, _ = causal(_strictly_later(args, State(jnp.zeros_like(S0), None)), sums)
    return method.finish(y + jnp.flip(later, 1), v.dtype), method.split(state.S)


def decode_step(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """One token, T = 1, by `rule.step`: on GPUs one fusion that reads and writes the state once.

    S and z advance apart, as joining them would copy S.
    """
    phi_q, phi_k, _ = method._replace(normalize="none").map(args)
    B, _, Hq, M = phi_q.shape
    H = phi_k.shape[2]
    q = phi_q.reshape(B, H, Hq // H, M)
    k, v, gates = (jax.tree.map(lambda x: x[:, 0], x) for x in (phi_k, args.v, dict(args.gates)))
    over_group = jax.vmap(method.rule.step, (None, 0, None, None, None), (0, None))
    over_heads = jax.vmap(jax.vmap(over_group))
    z, d = None, None
    with jax.default_matmul_precision("float32"):
        y, S = over_heads(args.state.S, q, k, v, gates)
        if args.state.z is not None:
            ones = jnp.ones((B, H, 1), v.dtype)
            d, z = over_heads(args.state.z[..., None], q, k, ones, gates)
            d, z = d.reshape(B, 1, Hq), z[..., 0]
    y = apply_normalizer(y.reshape(B, 1, Hq, -1), d, method.normalize, method.epsilon)
    return y.astype(v.dtype), State(S, z)


def _chunk_all_heads(S, args, method):
    """Map one chunk and advance S [B, H, M, P]; returns unnormalised y [B, C, Hq, P] and S.

    Queries of one group share keys, values and state, which are updated once.
    """
    phi_q, phi_k, v = method.map(args)
    B, C, Hq, M = phi_q.shape
    H = phi_k.shape[2]
    run = None if args.reset is None else jnp.cumsum(args.reset.astype(jnp.int32), axis=1)
    over_group = jax.vmap(method.rule.chunk, (None, 1, None, None, None, None), (1, None))
    over_heads = jax.vmap(over_group, (0, 1, 1, 1, 1, None), (1, 0))
    over_batch = jax.vmap(over_heads)
    grouped = phi_q.reshape(B, C, H, Hq // H, M)
    y, S = over_batch(S, grouped, phi_k, v, dict(args.gates), run)
    return y.reshape(B, C, Hq, -1), S


def _read_total(args, method):
    phi_q, phi_k, v = method.map(args)
    B, T, Hq, M = phi_q.shape
    H = phi_k.shape[2]

    def head(S, phi_q, phi_k, v):  # [M, P], [T, G, M], [S, M], [S, P]
        S = S + dot(phi_k, v, (0, 0))
        return dot(phi_q, S, (2, 0)), S

    all_heads = jax.vmap(jax.vmap(head, (0, 1, 1, 1), (1, 0)))
    y, S = all_heads(method.join(args.state), phi_q.reshape(B, T, H, Hq // H, M), phi_k, v)
    return method.finish(y.reshape(B, T, Hq, -1), args.v.dtype), method.split(S)


def _strictly_later(args, state):
    """Arguments of a causal call that reads, at reversed time, only the keys after each token.

    Keys are moved one place on in reversed order, so that the inclusive scan leaves the token
    itself out; a key that lands in the next document is masked.
    """
    B, T = args.reset.shape
    run = jnp.flip(jnp.cumsum(args.reset.astype(jnp.int32), axis=1), 1)
    begins = jnp.concatenate([jnp.zeros((B, 1), bool), run[:, 1:] != run[:, :-1]], axis=1)
    mask = jnp.ones((B, T), bool) if args.mask is None else args.mask

    def later(x):  # the first row is padding
        return jnp.pad(jnp.flip(x, 1)[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))

    return args._replace(
        q=jnp.flip(args.q, 1),
        k=later(args.k),
        v=later(args.v),
        mask=later(mask) & ~begins,
        reset=begins,
        q_positions=jnp.flip(jnp.broadcast_to(args.q_positions, (B, T)), 1),
        k_positions=later(jnp.broadcast_to(args.k_positions, (B, T))),
        state=state,
    )
