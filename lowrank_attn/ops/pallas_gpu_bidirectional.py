"""Differentiable bidirectional attention from the Hopper kernels.

S = S_0 + sum_s phi(k_s) v_s^T,  y_t = phi(q_t)^T S
"""

import functools

import jax
import jax.numpy as jnp

from lowrank_attn.ops.pallas_gpu_attention import map_sides
from lowrank_attn.ops.pallas_gpu_feature_gradients import feature_gradients
from lowrank_attn.ops.pallas_gpu_features import Form
from lowrank_attn.ops.pallas_gpu_products import read, total


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def sum_and_read(q, k, v, S, interpret):
    """The sum over all keys, and what queries read from it, for ready features.

    Args:
        q: [B, T, Hq, M] bfloat16, k: [B, S, H, M], v: [B, S, H, P]; M and P are multiples of 64, M
            at most 512.
        S: [B, H, M, P] float32, the sum over earlier keys.
        interpret: see `pallas_gpu_base.launch`.

    Returns:
        y [B, T, Hq, P] bfloat16 and the new S.
    """
    S = S + total(k, v, interpret)
    return read(q, S, interpret), S


def _sum_and_read_fwd(q, k, v, S, interpret):
    y, S = sum_and_read(q, k, v, S, interpret)
    return (y, S), (q, k, v, S)


def _sum_and_read_bwd(interpret, kept, cotangents):
    return _gradients(*kept, *cotangents, interpret)


sum_and_read.defvjp(_sum_and_read_fwd, _sum_and_read_bwd)


def _gradients(q, k, v, S, dy, dS, interpret):
    """Gradients for the arguments of `sum_and_read`, given its S."""
    of_queries = total(q, dy, interpret)
    dS = dS + jnp.sum(of_queries.reshape(*S.shape[:2], -1, *S.shape[2:]), axis=2)
    S_t, dS_t = (jnp.swapaxes(x, 2, 3) for x in (S, dS))
    return read(dy, S_t, interpret), read(v, dS_t, interpret), read(k, dS, interpret), dS


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def map_sum_and_read(q, k, v, Theta, b, S, form: Form, interpret):
    """`sum_and_read` over the features that `Form`, Theta and b describe.

    Args:
        q: [B, T, Hq, D] bfloat16, D 64 or 128; k: [B, S, H, D].
        Theta: [2, H, p, D, M] float32 for queries and keys, b: [2, H, p, M] float32.
        v, S, interpret: as in `sum_and_read`.

    The backward pass keeps q and k in place of their features, which are computed again.
    """
    (phi_q, phi_k), _ = map_sides(q, k, Theta, b, form, interpret)
    return sum_and_read(phi_q, phi_k, v, S, interpret)


def _map_sum_and_read_fwd(q, k, v, Theta, b, S, form, interpret):
    y, S = map_sum_and_read(q, k, v, Theta, b, S, form, interpret)
    return (y, S), (q, k, v, Theta, b, S)


def _map_sum_and_read_bwd(form, interpret, kept, cotangents):
    q, k, v, Theta, b, S = kept
    (phi_q, phi_k), inverses = map_sides(q, k, Theta, b, form, interpret)
    dphi_q, dphi_k, dv, dS = _gradients(phi_q, phi_k, v, S, *cotangents, interpret)
    Theta = Theta.astype(jnp.bfloat16)
    (dq, *of_q), (dk, *of_k) = (
        feature_gradients(x, inverse, Theta[i], b[i], dphi, form, interpret)
        for i, (x, inverse, dphi) in enumerate(zip((q, k), inverses, (dphi_q, dphi_k), strict=True))
    )
    dTheta, db = (jnp.stack(pair) for pair in zip(of_q, of_k, strict=True))
    return dq, dk, dv, dTheta, db, dS


map_sum_and_read.defvjp(_map_sum_and_read_fwd, _map_sum_and_read_bwd)
