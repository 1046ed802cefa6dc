"""Differentiable causal attention from the Hopper kernels.

The gradients of a scan are scans: of dy and v over phi(k), and backwards in time of v and dy over
phi(q), and of phi(k) and phi(q) over dy. A denominator is one more column of v, of ones, whose
gradient joins that of the other columns.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_attn.ops.pallas_gpu_base import C, pad_to
from lowrank_attn.ops.pallas_gpu_feature_gradients import feature_gradients
from lowrank_attn.ops.pallas_gpu_features import Form, features
from lowrank_attn.ops.pallas_gpu_scan import CHUNKS_PER_STATE, Denominator, feature_parts, scan

IN_FLOAT32 = {"preferred_element_type": jnp.float32}
LOG_OF_ALMOST_NOTHING = -16.0  # what passes such a decay is less than the rounding of float32


class Settings(NamedTuple):
    """The static part of a call.

    Attributes:
        denominator: divide by the sum of the scores, or None.
        learned_decay: whether `log_decay` has a gradient.
        interpret: see `pallas_gpu_base.launch`.
    """

    denominator: Denominator | None = None
    learned_decay: bool = False
    interpret: object = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def attend(q, k, v, S, z, log_decay, settings: Settings):
    """Causal attention over features.

    Args:
        q: [B, T, Hq, M] bfloat16, M as in `scan`; k: [B, T, H, M].
        v: [B, T, H, P] bfloat16, P 64 or 128.
        S: [B, H, M, P] float32 and z: [B, H, M] float32 (None without a denominator), the state.
        log_decay: [B, T, H] float32, at most 0 and at least -105; None for 0.
        settings: the static part.

    Returns:
        y [B, T, Hq, P] bfloat16, and S and z after the last token.

    The backward pass keeps the arguments and, with a denominator, y and the denominators.
    """
    return _attend(q, k, v, S, z, log_decay, settings)[0]


def _attend(q, k, v, S, z, log_decay, settings):
    """The results, and what the gradient needs of them."""
    G, P, denominator = q.shape[2] // k.shape[2], v.shape[-1], settings.denominator
    run = functools.partial(scan, log_decay=log_decay, interpret=settings.interpret)
    if denominator is None:
        out = run(q, k, v, _of_queries(S, G))
        return (out.y.astype(v.dtype), out.S[:, ::G], None), None
    if log_decay is None and feature_parts(q.shape[3]) == 1:
        out = run(q, k, v, _of_queries(S, G), _of_queries(z, G), denominator=denominator)
        return (out.y, out.S[:, ::G], out.z[:, ::G]), (out.y, out.d)
    S = pad_to(jnp.concatenate([S, z[..., None]], axis=3), 3, P + 64)
    out = run(q, k, _with_ones(v), _of_queries(S, G), row_sums=True)
    d = out.d + denominator.offset
    y = (out.y[..., :P] / _away_from_zero(d, denominator)).astype(v.dtype)
    S = out.S[:, ::G]
    return (y, S[..., :P], S[..., P]), (y, d)


def _with_ones(v):
    """Values [.., P] with a column of ones, and zeros up to the next multiple of 64."""
    P = v.shape[-1]
    return pad_to(jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1), 3, P + 64)


def _away_from_zero(d, denominator):
    return (d + jnp.where(d < 0, -denominator.epsilon, denominator.epsilon))[..., None]


def _attend_fwd(q, k, v, S, z, log_decay, settings):
    out, divided = _attend(q, k, v, S, z, log_decay, settings)
    return out, (q, k, v, S, z, log_decay, divided)


def _attend_bwd(settings, kept, cotangents):
    return _gradients(*kept, *cotangents, settings)


attend.defvjp(_attend_fwd, _attend_bwd)


def _gradients(q, k, v, S, z, log_decay, divided, dy, dS, dz, settings):
    """Gradients for the first six arguments of `attend`."""
    learned = settings.learned_decay
    run = functools.partial(scan, log_decay=log_decay, interpret=settings.interpret)
    G, P = q.shape[2] // k.shape[2], v.shape[-1]
    rows, columns, S_t, dS_t = dy, v, jnp.swapaxes(S, 2, 3), jnp.swapaxes(dS, 2, 3)
    if settings.denominator is not None:
        y, d = divided
        d = _away_from_zero(d, settings.denominator)
        dd = -jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), -1, keepdims=True) / d
        dy = (dy / d).astype(jnp.bfloat16)
        rows = pad_to(jnp.concatenate([dy, dd.astype(jnp.bfloat16)], axis=-1), 3, P + 64)
        columns = _with_ones(v)
        S_t = pad_to(jnp.concatenate([S_t, z[:, :, None]], axis=2), 2, P + 64)
        dS_t = pad_to(jnp.concatenate([dS_t, dz[:, :, None]], axis=2), 2, P + 64)
    dS_t = _of_first_queries(dS_t, G)
    options = {"strict": learned, "with_states": learned}
    forth = run(rows, columns, k, _of_queries(S_t, G), **options)
    back = run(columns, rows, q, dS_t, reverse=True, **options)
    dv = run(k, q, dy, _of_first_queries(dS, G), reverse=True).y
    dq, dk, dlog_decay = forth.y, back.y, None
    if log_decay is not None:
        dlog_decay = jnp.zeros_like(log_decay)
    if learned:
        dlog_decay = _decay_gradient(q, k, log_decay, forth, back, dS_t, G)
        itself = jnp.einsum("bthp,bthp->bth", rows, _of_queries(columns, G, 2), **IN_FLOAT32)
        dq = (dq + itself[..., None] * _of_queries(k, G, 2)).astype(q.dtype)
        dk = dk + itself[..., None] * q
    dS_t = _sum_queries(back.S, 1, G)
    dz = None if z is None else dS_t[:, :, P]
    dk, dv = (_sum_queries(x, 2, G).astype(jnp.bfloat16) for x in (dk, dv))
    return dq, dk, dv, jnp.swapaxes(dS_t[:, :, :P], 2, 3), dz, dlog_decay


def _decay_gradient(q, k, log_decay, forth, back, dS_t, G):
    """The gradient for log decays, from scans that leave out what a token sees of itself.

    What passes from before token u to u or later is what passes the end of a span of tokens that
    contains u, <dS, S> there, and what the tokens from u to there read, q . dq, less what they add
    for later ones, k . dk. Sums that end with the span, or where nothing passes, keep rounding
    errors from piling up.
    """
    B, T, Hq, _ = q.shape
    span = CHUNKS_PER_STATE * C
    spans = forth.states.shape[2]
    read = jnp.einsum("bthm,bthm->bth", q, forth.y, **IN_FLOAT32)
    added = jnp.einsum("bthm,bthm->bth", _of_queries(k, G, 2), back.y, **IN_FLOAT32)
    inside = _sum_queries(pad_to(read - added, 1, spans * span), 2, G)
    inside = inside.reshape(B, spans, span, Hq // G)
    adjoint = jnp.concatenate([back.states[:, :, 1:], dS_t[:, :, None]], axis=2)
    passed = jnp.einsum(
        "bhnpm,bhnpm->bnh", forth.states, adjoint, precision=jax.lax.Precision.HIGHEST
    )
    sums = jax.lax.cumsum(inside, axis=2, reverse=True) + _sum_queries(passed, 2, G)[:, :, None]
    cut = pad_to(log_decay, 1, spans * span).reshape(inside.shape) < LOG_OF_ALMOST_NOTHING
    place = jnp.where(cut, jnp.arange(span)[:, None], span)
    next_cut = jax.lax.cummin(place, axis=2, reverse=True)[:, :, 1:]
    next_cut = jnp.pad(next_cut, [(0, 0), (0, 0), (0, 1), (0, 0)], constant_values=span)
    beyond = jnp.take_along_axis(pad_to(sums, 2, span + 1), next_cut, axis=2)
    return jnp.where(cut, 0, sums - beyond).reshape(B, -1, Hq // G)[:, :T]


def _of_queries(x, G, axis=1):
    """What key heads have to query heads: [.., H, ...] to [.., H * G, ...]."""
    return x if G == 1 else jnp.repeat(x, G, axis=axis)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(9, 10))
def map_and_attend(q, k, v, Theta, b, S, z, log_decay, mask, form: Form, settings: Settings):
    """`attend` over the features that `Form`, Theta and b describe.

    Args:
        q: [B, T, Hq, D] bfloat16, D 64 or 128; k: [B, T, H, D].
        Theta: [2, H, p, D, M] float32 for queries and keys, b: [2, H, p, M] float32.
        v, S, z, log_decay, settings: as in `attend`.
        mask: [B, T] bool, false where the features of keys are zero, or None.

    The backward pass keeps what that of `attend` does, with q and k in place of their features,
    which are computed again.
    """
    return _map_and_attend(q, k, v, Theta, b, S, z, log_decay, mask, form, settings)[0]


def _map_and_attend(q, k, v, Theta, b, S, z, log_decay, mask, form, settings):
    (phi_q, phi_k), _ = map_sides(q, k, Theta, b, form, settings.interpret)
    return _attend(phi_q, _only(mask, phi_k), v, S, z, log_decay, settings)


def map_sides(q, k, Theta, b, form, interpret):
    Theta = Theta.astype(jnp.bfloat16)
    if q.shape == k.shape:
        return features((q, k), Theta, b, form, interpret)
    sides = ((q,), Theta[:1], b[:1]), ((k,), Theta[1:], b[1:])
    phi, inverses = zip(*(features(*side, form, interpret) for side in sides), strict=True)
    return (phi[0][0], phi[1][0]), (inverses[0][0], inverses[1][0])


def _only(mask, phi_k):
    return phi_k if mask is None else jnp.where(mask[:, :, None, None], phi_k, 0)


def _map_and_attend_fwd(q, k, v, Theta, b, S, z, log_decay, mask, form, settings):
    out, divided = _map_and_attend(q, k, v, Theta, b, S, z, log_decay, mask, form, settings)
    return out, (q, k, v, Theta, b, S, z, log_decay, mask, divided)


def _map_and_attend_bwd(form, settings, kept, cotangents):
    q, k, v, Theta, b, S, z, log_decay, mask, divided = kept
    (phi_q, phi_k), inverses = map_sides(q, k, Theta, b, form, settings.interpret)
    dphi_q, dphi_k, dv, dS, dz, dlog_decay = _gradients(
        phi_q, _only(mask, phi_k), v, S, z, log_decay, divided, *cotangents, settings
    )
    dphi = (dphi_q, _only(mask, dphi_k))
    Theta = Theta.astype(jnp.bfloat16)
    (dq, *of_q), (dk, *of_k) = (
        feature_gradients(x, inverse, Theta[i], b[i], dphi, form, settings.interpret)
        for i, (x, inverse, dphi) in enumerate(zip((q, k), inverses, dphi, strict=True))
    )
    dTheta, db = (jnp.stack(pair) for pair in zip(of_q, of_k, strict=True))
    return dq, dk, dv, dTheta, db, dS, dz, dlog_decay, None


map_and_attend.defvjp(_map_and_attend_fwd, _map_and_attend_bwd)
