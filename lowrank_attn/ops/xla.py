"""Chunked linear attention in plain `jnp`, for every platform."""

import functools

import jax
import jax.numpy as jnp

from lowrank_attn.ops.arguments import Arguments, Method, State
from lowrank_attn.ops.product_features import by_products
from lowrank_attn.ops.rules.base import Parts, dot, visibility

# Training keeps the inputs and one state per this many tokens; states inside are recomputed.
TOKENS_PER_SAVED_STATE = 1024
UNROLLED = 4  # states between chunks of one span, at most


def causal(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """Scan over spans of about `TOKENS_PER_SAVED_STATE` tokens, mapping the features of one at a time.

    A span is rematerialised: the backward pass keeps q, k, v and one state per span, and recomputes
    features and chunk states of one span while it walks back. Inside a span, a rule that has
    `parts` computes all chunks at once, another rule one after another.
    """
    B, T, Hq, _ = args.q.shape
    C = min(method.chunk_size, T)
    chunks = -(-T // C)
    spans = -(-T // max(TOKENS_PER_SAVED_STATE, C))
    per_span = -(-chunks // spans)
    width = per_span * C
    padded = spans * width

    if args.mask is None and padded != T:
        args = args._replace(mask=jnp.ones((B, T), bool))
    args = args._replace(
        q_positions=jnp.broadcast_to(args.q_positions, (B, T)),
        k_positions=jnp.broadcast_to(args.k_positions, (B, T)),
    )
    no_state = State(None, None)  # type: ignore[arg-type]  # the scan carries it
    method = method._replace(features=by_products(method.features))
    advance = _one_after_another if method.rule.parts is None else _all_at_once
    S, params = method.join(args.state), args.params

    def pad(x):
        return jnp.pad(x, [(0, 0), (0, padded - T)] + [(0, 0)] * (x.ndim - 2))

    def cut(x):  # [B, T, ...] -> [spans, B, width, ...]
        return jnp.moveaxis(x.reshape(B, spans, width, *x.shape[2:]), 1, 0)

    whole = jax.tree.map(pad, args._replace(params={}, state=no_state))

    @jax.checkpoint
    def span(S, start, part):
        part = jax.tree.map(functools.partial(_part_of, start), whole, part)
        return advance(S, part._replace(params=params), C, method)

    starts = jnp.arange(spans) * width
    S, y = jax.lax.scan(lambda S, x: span(S, *x), S, (starts, jax.tree.map(cut, whole)))
    y = jnp.moveaxis(y, 0, 1).reshape(B, padded, Hq, -1)[:, :T]
    return y, method.split(S)


@jax.custom_jvp
def _part_of(start, whole, part):
    """`part`, read as a slice of the array that it was cut from, which then needs no copy.

    Its tangent is the tangent of `part`: the transpose of slicing would add up arrays of the size
    of `whole`.
    """
    return jax.lax.dynamic_slice_in_dim(whole, start, part.shape[1], 1)


@_part_of.defjvp
def _(primals, tangents):
    return _part_of(*primals), tangents[2]


def _one_after_another(S, args, C, method):
    """Outputs [B, T, Hq, P] of one span and the next state, chunk after chunk."""
    B, T = args.q.shape[:2]

    def cut(x):
        return jnp.moveaxis(x.reshape(B, T // C, C, *x.shape[2:]), 1, 0)

    def chunk(S, part):
        y, S = _chunk_all_heads(S, part._replace(params=args.params), method)
        return S, method.finish(y, args.v.dtype)

    S, y = jax.lax.scan(chunk, S, jax.tree.map(cut, args._replace(params={})))
    return S, jnp.moveaxis(y, 0, 1).reshape(B, T, *y.shape[3:])


def _all_at_once(S, args, C, method):
    """The same by `rule.parts`: only the states between chunks are added one after another."""
    phi_q, phi_k, v = method.map(args)
    B, T, Hq, M = phi_q.shape
    H = phi_k.shape[2]
    N = T // C

    def cut(x):
        return x.reshape(B, N, C, *x.shape[2:])

    # an array of its own can be fused into the product of queries and keys, a comparison cannot
    shared = visibility(C, None)
    shared = shared._replace(pairs=jax.lax.optimization_barrier(shared.pairs))
    run = None if args.reset is None else jnp.cumsum(cut(args.reset).astype(jnp.int32), axis=2)

    def alone(q, k, v, gates, run):
        return method.rule.parts(q, k, v, gates, shared if run is None else visibility(C, run))

    def read(q, S, start, y):
        S = S.astype(q.dtype) if q.dtype == jnp.bfloat16 else S
        return y + start * dot(q, S, (1, 0))

    def add(S, x):
        keep, added = x
        return jax.vmap(jax.vmap(lambda S, keep, added: keep * S + added))(S, keep, added), S

    of_group = jax.vmap(alone, (1, None, None, None, None), Parts(0, None, None, None))
    of_heads = jax.vmap(of_group, (1, 1, 1, 1, None))
    of_chunks = jax.vmap(jax.vmap(of_heads))
    q = cut(phi_q).reshape(B, N, C, H, Hq // H, M)
    parts = of_chunks(q, cut(phi_k), cut(v), jax.tree.map(cut, dict(args.gates)), run)
    steps = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (parts.keep, parts.S))
    S, before = jax.lax.scan(add, S, steps, unroll=N if N <= UNROLLED else 1)
    of_group = jax.vmap(read, (1, None, None, 0))
    of_chunks = jax.vmap(jax.vmap(jax.vmap(of_group, (1, 0, 0, 0))), (0, 1, 0, 0))
    y = method.finish(of_chunks(q, before, parts.start, parts.y), args.v.dtype)
    return S, jnp.moveaxis(y, 4, 2).reshape(B, T, Hq, -1)


def bidirectional(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """Two matrix products: the state of all keys, then what each query reads from it."""
    if args.reset is not None:
        return read_packed(args, method, causal)
    method = method._replace(features=by_products(method.features))
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
    """One token, T = 1, as a chunk of one."""
    method = method._replace(features=by_products(method.features))
    y, S = _chunk_all_heads(method.join(args.state), args, method)
    return method.finish(y, args.v.dtype), method.split(S)


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
