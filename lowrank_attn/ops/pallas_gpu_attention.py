"""Differentiable causal attention from the Hopper kernels.

The gradients of a scan are scans: of dy and v over phi(k), and backwards in time of v and dy over
phi(q), and of phi(k) and phi(q) over dy. A denominator is one more column of v, of ones, whose
gradient joins that of the other columns.
"""

import functools

import jax
import jax.numpy as jnp

from lowrank_attn.ops.pallas_gpu_base import pad_to
from lowrank_attn.ops.pallas_gpu_feature_gradients import feature_gradients
from lowrank_attn.ops.pallas_gpu_features import Form, features
from lowrank_attn.ops.pallas_gpu_scan import Denominator, scan


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(q, k, v, S, z, denominator: Denominator | None, interpret):
    """Causal attention over features.

    Args:
        q: [B, T, Hq, M] bfloat16, M a multiple of 64 up to 256; k: [B, T, H, M].
        v: [B, T, H, P] bfloat16, P 64 or 128.
        S: [B, H, M, P] float32 and z: [B, H, M] float32 (None without a denominator), the state.
        denominator: divide by the sum of the scores, or None.
        interpret: see `pallas_gpu_base.launch`.

    Returns:
        y [B, T, Hq, P] bfloat16, and S and z after the last token.

    The backward pass keeps the arguments and, with a denominator, y and the denominators.
    """
    return _attend(q, k, v, S, z, denominator, interpret)[0]


def _attend(q, k, v, S, z, denominator, interpret):
    """The results, and what the gradient needs of them."""
    G = q.shape[2] // k.shape[2]
    S, z = _of_queries(S, G), None if z is None else _of_queries(z, G)
    out = scan(q, k, v, S, z, denominator=denominator, interpret=interpret)
    state = (out.S[:, ::G], None if z is None else out.z[:, ::G])
    return (out.y, *state), None if denominator is None else (out.y, out.d)


def _attend_fwd(q, k, v, S, z, denominator, interpret):
    out, divided = _attend(q, k, v, S, z, denominator, interpret)
    return out, (q, k, v, S, z, divided)


def _attend_bwd(denominator, interpret, kept, cotangents):
    return _gradients(*kept, *cotangents, denominator, interpret)


attend.defvjp(_attend_fwd, _attend_bwd)


def _gradients(q, k, v, S, z, divided, dy, dS, dz, denominator, interpret):
    """Gradients for the first five arguments of `attend`."""
    run = functools.partial(scan, interpret=interpret)
    G, P = q.shape[2] // k.shape[2], v.shape[-1]
    rows, columns, S_t, dS_t = dy, v, jnp.swapaxes(S, 2, 3), jnp.swapaxes(dS, 2, 3)
    if denominator is not None:
        y, d = divided
        d = (d + jnp.where(d < 0, -denominator.epsilon, denominator.epsilon))[..., None]
        dd = -jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), -1, keepdims=True) / d
        dy = (dy / d).astype(jnp.bfloat16)
        rows = jnp.concatenate([dy, dd.astype(jnp.bfloat16)], axis=-1)
        columns = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
        rows, columns = pad_to(rows, 3, P + 64), pad_to(columns, 3, P + 64)
        S_t = pad_to(jnp.concatenate([S_t, z[:, :, None]], axis=2), 2, P + 64)
        dS_t = pad_to(jnp.concatenate([dS_t, dz[:, :, None]], axis=2), 2, P + 64)
    dq = run(rows, columns, k, _of_queries(S_t, G)).y
    back = run(columns, rows, q, _of_first_queries(dS_t, G), reverse=True)
    dv = run(k, q, dy, _of_first_queries(dS, G), reverse=True).y
    dS_t = _sum_queries(back.S, 1, G)
    dz = None if z is None else dS_t[:, :, P]
    dk, dv = (_sum_queries(x, 2, G) for x in (back.y, dv))
    return dq, dk, dv, jnp.swapaxes(dS_t[:, :, :P], 2, 3), dz


def _of_queries(state, G):
    """State of key heads [B, H, ...] to that of query heads [B, H * G, ...]."""
    return state if G == 1 else jnp.repeat(state, G, axis=1)


def _of_first_queries(state, G):
    """The same for a gradient, which only the first query head of each group receives."""
    if G == 1:
        return state
    first = jnp.arange(state.shape[1] * G) % G == 0
    return jnp.where(first[:, None, None], _of_queries(state, G), 0)


def _sum_queries(x, axis, G):
    """Sum over the G query heads that share one key head."""
    if G == 1:
        return x
    groups = x.reshape(*x.shape[:axis], x.shape[axis] // G, G, *x.shape[axis + 1 :])
    return jnp.sum(groups, axis=axis + 1, dtype=jnp.float32).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def map_and_attend(q, k, v, Theta, b, S, z, form: Form, denominator, interpret):
    """`attend` over the features that `Form`, Theta and b describe.

    Args:
        q: [B, T, Hq, D] bfloat16, D 64 or 128; k: [B, T, H, D].
        Theta: [2, H, p, D, M] float32 for queries and keys, b: [2, H, p, M] float32.
        v, S, z, denominator, interpret: as in `attend`.

    The backward pass keeps what that of `attend` does, with q and k in place of their features,
    which are computed again.
    """
    return _map_and_attend(q, k, v, Theta, b, S, z, form, denominator, interpret)[0]


def _map_and_attend(q, k, v, Theta, b, S, z, form, denominator, interpret):
    (phi_q, phi_k), _ = map_sides(q, k, Theta, b, form, interpret)
    return _attend(phi_q, phi_k, v, S, z, denominator, interpret)


def map_sides(q, k, Theta, b, form, interpret):
    Theta = Theta.astype(jnp.bfloat16)
    if q.shape == k.shape:
        return features((q, k), Theta, b, form, interpret)
    sides = ((q,), Theta[:1], b[:1]), ((k,), Theta[1:], b[1:])
    phi, inverses = zip(*(features(*side, form, interpret) for side in sides), strict=True)
    return (phi[0][0], phi[1][0]), (inverses[0][0], inverses[1][0])


def _map_and_attend_fwd(q, k, v, Theta, b, S, z, form, denominator, interpret):
    out, divided = _map_and_attend(q, k, v, Theta, b, S, z, form, denominator, interpret)
    return out, (q, k, v, Theta, b, S, z, divided)


def _map_and_attend_bwd(form, denominator, interpret, kept, cotangents):
    q, k, v, Theta, b, S, z, divided = kept
    (phi_q, phi_k), inverses = map_sides(q, k, Theta, b, form, interpret)
    dphi_q, dphi_k, dv, dS, dz = _gradients(
        phi_q, phi_k, v, S, z, divided, *cotangents, denominator, interpret
    )
    Theta = Theta.astype(jnp.bfloat16)
    (dq, *of_q), (dk, *of_k) = (
        feature_gradients(x, inverse, Theta[i], b[i], dphi, form, interpret)
        for i, (x, inverse, dphi) in enumerate(zip((q, k), inverses, (dphi_q, dphi_k), strict=True))
    )
    dTheta, db = (jnp.stack(pair) for pair in zip(of_q, of_k, strict=True))
    return dq, dk, dv, dTheta, db, dS, dz


map_and_attend.defvjp(_map_and_attend_fwd, _map_and_attend_bwd)
