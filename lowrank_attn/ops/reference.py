"""The oracle: the published recurrences token by token in float32, never optimised."""

import jax
import jax.numpy as jnp

from lowrank_attn.ops.arguments import Arguments, Method, State


def causal(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """Scan `rule.step` over tokens; see `ops.causal`."""
    phi_q, phi_k, v = _features(args, method)
    H = phi_k.shape[2]
    token = _over_heads(method.rule.step, phi_q.shape[2] // H)

    def body(S, x):
        q, k, v, gates, reset = x
        S = jnp.where(reset[:, None, None, None], 0, S)
        y, S = token(S, q, k, v, gates)
        return S, y

    B, T = phi_q.shape[:2]
    reset = jnp.zeros((B, T), bool) if args.reset is None else args.reset
    xs = (phi_q, phi_k, v, dict(args.gates), reset)
    xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), xs)
    with jax.default_matmul_precision("float32"):
        S, y = jax.lax.scan(body, method.join(args.state), xs)
    y = method.finish(jnp.moveaxis(y, 0, 1), args.v.dtype)
    return y, method.split(S)


def bidirectional(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """The quadratic form, all scores explicit; see `ops.bidirectional`."""
    phi_q, phi_k, v = _features(args, method)
    B, T, Hq, M = phi_q.shape
    H = phi_k.shape[2]
    S0 = method.join(args.state)
    grouped = phi_q.reshape(B, T, H, Hq // H, M)
    with jax.default_matmul_precision("float32"):
        scores = jnp.einsum("bthgm,bshm->bhgts", grouped, phi_k)
        from_start = jnp.ones((B, T))
        to_end = jnp.ones(phi_k.shape[:2])
        if args.reset is not None:
            run = jnp.cumsum(args.reset, axis=1)
            same = run[:, :, None] == run[:, None, :]
            scores = jnp.where(same[:, None, None], scores, 0)
            from_start = (run == 0).astype(jnp.float32)
            to_end = (run == run[:, -1:]).astype(jnp.float32)
        y = jnp.einsum("bhgts,bshp->bthgp", scores, v)
        y = y + jnp.einsum("bt,bthgm,bhmp->bthgp", from_start, grouped, S0)
        S = from_start[:, -1, None, None, None] * S0
        S = S + jnp.einsum("bs,bshm,bshp->bhmp", to_end, phi_k, v)
    y = method.finish(y.reshape(B, T, Hq, -1), args.v.dtype)
    return y, method.split(S)


def decode_step(args: Arguments, method: Method) -> tuple[jax.Array, State]:
    """One token through `rule.step`; see `ops.decode_step`. The arguments have T = 1."""
    return causal(args, method)


def _features(args, method):
    return [x.astype(jnp.float32) for x in method.map(args)]


def _over_heads(step, group):
    """Lift `step` from one head to S [B, H, M, P], q [B, Hq, M], k [B, H, M], v [B, H, P]."""
    over_group = jax.vmap(step, (None, 0, None, None, None), (0, None))
    over_batch = jax.vmap(jax.vmap(over_group))

    def lifted(S, q, k, v, gates):
        B, Hq, M = q.shape
        y, S = over_batch(S, q.reshape(B, Hq // group, group, M), k, v, gates)
        return y.reshape(B, Hq, -1), S

    return lifted
