"""Chunked linear attention in plain `jnp`, for every platform."""

import functools

import jax
import jax.numpy as jnp

from lowrank_attn.ops.arguments import Arguments, Method, State
from lowrank_attn.ops.block_sizes import XLABlocks, xla_blocks
from lowrank_attn.ops.normalize import apply_normalizer
from lowrank_attn.ops.product_features import by_products
from lowrank_attn.ops.rules.base import Parts, dot, visibility

# Training keeps the inputs and one state per this many tokens; states inside are recomputed.
TOKENS_PER_SAVED_STATE = 1024
UNROLLED = 4  # states between chunks of one span, at most


def causal(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """Scan over spans of about `TOKENS_PER_SAVED_STATE` tokens, whose features are mapped at once.

    A span is rematerialised: the backward pass keeps q, k, v and one state per span, and recomputes
    features and chunk states of one span while it walks back. Inside a span, chunks are computed
    one after another or, by `rule.parts`, all at once; see `block_sizes.xla_blocks`.
    """
    B, T, Hq, _ = args.q.shape
    blocks = XLABlocks(method.chunk_size, at_once=False)
    if method.rule.parts is not None:
        blocks = xla_blocks(method.chunk_size)
    C = min(blocks.chunk, T)
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
    advance = _all_at_once if blocks.at_once else _one_after_another
    S, params = method.join(args.state), args.params

    def pad(x):
        return jnp.pad(x, [(0, 0), (0, padded - T)] + [(0, 0)] * (x.ndim - 2))

    def cut(x):  # [B, T, ...] -> [spans, B, width, ...]
        return jnp.moveaxis(x.reshape(B, spans, width, *x.shape[2:]), 1, 0)

    # as an array of its own the mask can be fused into a matrix product, as a comparison it cannot
    see = visibility(C, None)
    see = see._replace(pairs=jax.lax.optimization_barrier(see.pairs))
    whole = jax.tree.map(pad, args._replace(params={}, state=no_state))

    @jax.checkpoint
    def span(S, start, part):
        part = jax.tree.map(functools.partial(_part_of, start), whole, part)
        return advance(S, part._replace(params=params), see, method)

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
    return _slice(start, whole, part)


@_part_of.defjvp
def _(primals, tangents):
    return _slice(*primals), tangents[2]


def _slice(start, whole, part):
    # without the reshapes XLA would transpose all of `whole` to put the heads first
    rows = whole.reshape(*whole.shape[:2], -1)
    return jax.lax.dynamic_slice_in_dim(rows, start, part.shape[1], 1).reshape(part.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _product(a, b, contract):
    """`dot`, whose gradients for bfloat16 operands are products of bfloat16, not of float32."""
    return dot(a, b, contract)


@_product.defjvp
def _(contract, primals, tangents):
    (a, b), (da, db) = primals, tangents

    def tangent(a, b):
        if not a.dtype == b.dtype == jnp.bfloat16:
            return dot(a, b, contract)
        dims = (((contract[0],), (contract[1],)), ((), ()))
        t = jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16)
        return t.astype(jnp.float32)

    return _product(a, b, contract), tangent(da, b) + tangent(a, db)


def _one_after_another(S, args, causal, method):
    """Outputs [B, T, Hq, P] of one span and the next state, chunk after chunk."""
    B, T = args.q.shape[:2]
    C = causal.pairs.shape[0]

    def cut(x):
        return jnp.moveaxis(x.reshape(B, T // C, C, *x.shape[2:]), 1, 0)

    def chunk(S, part):
        y, S = _chunk_all_heads(S, part._replace(params=args.params), method)
        return S, method.finish(y, args.v.dtype)

    S, y = jax.lax.scan(chunk, S, jax.tree.map(cut, args._replace(params={})))
    return S, jnp.moveaxis(y, 0, 1).reshape(B, T, *y.shape[3:])


def _all_at_once(S, args, causal, method):
    """The same by `rule.parts`: only the states between chunks are added one after another."""
    phi_q, phi_k, v = method.map(args)
    B, T, Hq, M = phi_q.shape
    H = phi_k.shape[2]
    C = causal.pairs.shape[0]
    N = T // C

    def heads_first(x):  # as maps compute them: [B, T, H, ...] -> [H, B, N, C, ...]
        return jnp.moveaxis(x, 2, 0).reshape(H, B, N, C, *x.shape[3:])

    def parts(q, k, v, gates, run):
        see = causal if run is None else visibility(C, run)
        # two products with v would be merged into one, for which their operands are copied
        other = method.rule.parts(q, k, jax.lax.optimization_barrier(v), gates, see, _product)
        return method.rule.parts(q, k, v, gates, see, _product)._replace(S=other.S)

    def add(S, x):
        keep, added = x
        return jax.vmap(jax.vmap(lambda S, keep, added: keep * S + added))(S, keep, added), S

    def read(q, S, start, y):
        S = S.astype(q.dtype) if q.dtype == jnp.bfloat16 else S
        return y + start * _product(q, S, (1, 0))

    q = heads_first(phi_q.reshape(B, T, H, Hq // H, M))  # [H, B, N, C, G, M]
    run = None
    if args.reset is not None:
        run = jnp.cumsum(args.reset.reshape(B, N, C).astype(jnp.int32), axis=2)
    of_group = jax.vmap(parts, (1, None, None, None, None), Parts(0, None, None, None))
    of_heads = jax.vmap(jax.vmap(jax.vmap(of_group)), (0, 0, 0, 0, None))
    gates = jax.tree.map(heads_first, dict(args.gates))
    alone = of_heads(q, heads_first(phi_k), heads_first(v), gates, run)

    steps = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), (alone.keep, alone.S))
    S, before = jax.lax.scan(add, jnp.swapaxes(S, 0, 1), steps, unroll=N if N <= UNROLLED else 1)
    of_group = jax.vmap(read, (1, None, None, 0))
    of_heads = jax.vmap(jax.vmap(jax.vmap(of_group)))
    before = jnp.moveaxis(before, 0, 2)
    y = of_heads(jax.lax.optimization_barrier(q), before, alone.start, alone.y)
    y = method.finish(y, args.v.dtype)  # [H, B, N, G, C, P]
    y = jnp.moveaxis(y, (0, 3), (3, 4)).reshape(B, T, Hq, -1)
    return jnp.swapaxes(S, 0, 1), y


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
    """One token, T = 1, by `rule.step`: on GPUs one fusion that reads and writes the state once.

    S and z advance apart, as joining them would copy S.
    """
    phi_q, phi_k, _ = method._replace(features=by_products(method.features), normalize="none").map(
        args
    )
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
