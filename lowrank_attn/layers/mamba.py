"""Mamba: a selective state space in the place of attention."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.causal_conv import causal_conv
from lowrank_attn.layers.recent import real_and_segment, remember
from lowrank_attn.layers.visibility import check_same_tokens, precision_for, segment_numbers

_CHUNK = 64  # states of so many tokens are in memory at once


def mamba(state_size: int = 16, conv_size: int = 4, dt_rank: int | None = None) -> AttentionMethod:
    """Selective scan over the channels of v, gated by q.

        u = silu(conv(v)),  [r | b_t | c_t] = u W_x,  dt = softplus(r W_dt + b_dt)
        h_t = exp(dt_t A) h_{t-1} + dt_t b_t u_t,  A = -exp(A_log)
        y = (c_t . h_t + D_skip u) silu(q)

    for every channel of all heads, h_t of size N; conv is depthwise over K tokens, the last one the
    token itself, and W_x reads the channels of all heads. So a layer whose `query`, `value` and
    `out` projections are the two halves of Mamba's input projection (z and x) and its output
    projection is Mamba's block; value_dim = qk_dim = 2 E / H is its usual expansion. `k` is not
    read: a layer's key projection has no influence, and rotary positions turn the gate.

    When not causal, the scan runs in both directions with the same parameters and the outputs are
    added, before the gate. Tokens that the mask hides leave the state alone, enter conv as zeros,
    and give 0. States are float32; the other products have float32 accumulators.

    Trained leaves, initialised as in the authors' code (I = H P channels):

    * `conv` [H, P, K] and `conv_bias` [H, P], uniform within K^(-1/2)
    * `x_proj` [H, P, dt_rank + 2 N], uniform within I^(-1/2)
    * `dt_proj` [H, dt_rank, P], uniform within dt_rank^(-1/2), and `dt_bias` [H, P], such that dt
      starts log-uniform in [0.001, 0.1]
    * `A_log` [H, P, N], log 1 to log N; `skip` [H, P], 1

    Args:
        state_size: N >= 1.
        conv_size: K >= 1.
        dt_rank: None takes I / 32, rounded up.

    Raises:
        ValueError: if a number is out of range, or, when called, for unequal T and S, grouped heads
            or P other than D.

    Source: Mamba (arXiv 2312.00752), algorithm 2; the second direction is added as in Vision Mamba
    (arXiv 2401.09417), which gives it parameters of its own.
    """
    for name, value in (("state_size", state_size), ("conv_size", conv_size)):
        if value < 1:
            raise ValueError(f"{name}={value}, expected at least 1.")
    if dt_rank is not None and dt_rank < 1:
        raise ValueError(f"dt_rank={dt_rank}, expected at least 1, or None.")
    N = state_size

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        R = -(-H * D // 32) if dt_rank is None else dt_rank
        keys = jax.random.split(key, 5)

        def uniform(key, shape, fan_in):
            return jax.random.uniform(key, shape, minval=-(fan_in**-0.5), maxval=fan_in**-0.5)

        low, high = math.log(1e-3), math.log(1e-1)
        dt = jnp.exp(jax.random.uniform(keys[4], (H, D), minval=low, maxval=high))
        return {
            "conv": uniform(keys[0], (H, D, conv_size), conv_size),
            "conv_bias": uniform(keys[1], (H, D), conv_size),
            "x_proj": uniform(keys[2], (H, D, R + 2 * N), H * D),
            "dt_proj": uniform(keys[3], (H, R, D), R),
            "dt_bias": dt + jnp.log(-jnp.expm1(-dt)),  # the inverse of softplus
            "A_log": jnp.broadcast_to(jnp.log(jnp.arange(1.0, N + 1)), (H, D, N)),
            "skip": jnp.ones((H, D)),
        }, {}

    def apply(
        params: Params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        check_same_tokens(q, k, "each token is read once")
        if v.shape != q.shape:
            raise ValueError(f"v has shape {v.shape}, expected {q.shape} as q, which gates it.")
        B = len(q)
        segment = None if segment_ids is None else segment_numbers(segment_ids)
        real, segment = real_and_segment(q, mask, segment)
        x, x_real = v, real
        if not causal:  # both directions at once, as one batch
            x, x_real, segment = (jnp.concatenate([x, jnp.flip(x, 1)]) for x in (v, real, segment))
        y, _ = _scan_tokens(params, x, x_real, segment, None)
        if not causal:
            y = y[:B] + jnp.flip(y[B:], 1)
        return _gated(y, q, real).astype(v.dtype)

    return AttentionMethod(init=init, apply=apply)


class MambaState(NamedTuple):
    """What the causal scan goes on from.

    Attributes:
        conv: [B, K - 1, H, P], the last inputs of the convolution.
        h: [B, H, P, N], float32.
    """

    conv: jax.Array
    h: jax.Array


def continue_mamba(
    params: Params,
    q: jax.Array,
    v: jax.Array,
    past: MambaState,
    real: jax.Array,
    segment: jax.Array,
) -> tuple[jax.Array, MambaState]:
    """Causal `mamba` that goes on from earlier tokens.

    Args:
        params: the leaves of `mamba`.
        q: [B, T, H, P], the gate, v: [B, T, H, P].
        past: the state of the tokens before, in the document of the first one.
        real: [B, T] bool, false at padding, which is at the ends of a row.
        segment: [B, T] int, documents counted from 0.

    Returns:
        [B, T, H, P] in the dtype of v, and the state after the last token.
    """
    y, past = _scan_tokens(params, v, real, segment, past)
    return _gated(y, q, real).astype(v.dtype), past


def _gated(y, q, real):
    return jnp.where(real[..., None, None], y * jax.nn.silu(q.astype(jnp.float32)), 0)


def _scan_tokens(params, v, real, segment, past):
    """One direction, before the gate: [B, T, H, P], float32, and the state (None without past)."""
    params = {name: leaf.astype(jnp.float32) for name, leaf in params.items()}
    H, R, P = params["dt_proj"].shape
    N = params["A_log"].shape[-1]
    precision = precision_for(v)

    x = jnp.where(real[..., None, None], v, 0)
    conv = causal_conv(x, params["conv"], segment, None if past is None else past.conv)
    u = jax.nn.silu(conv + params["conv_bias"])
    low = jnp.einsum("bthp,hpr->btr", u, params["x_proj"], precision=precision)
    r, b, c = jnp.split(low, (R, R + N), axis=-1)
    dt = jnp.einsum("btr,hrp->bthp", r, params["dt_proj"], precision=precision)
    dt = jnp.where(real[..., None, None], jax.nn.softplus(dt + params["dt_bias"]), 0)
    begins = jnp.pad(segment[:, 1:] != segment[:, :-1], ((0, 0), (1, 0)))
    h = jnp.zeros((len(v), H, P, N), jnp.float32) if past is None else past.h
    y, h = _selective_scan(u, dt, -jnp.exp(params["A_log"]), b, c, begins, h)
    if past is not None:
        past = MambaState(remember(past.conv, x.astype(past.conv.dtype), real, segment), h)
    return y + params["skip"] * u, past


def _selective_scan(u, dt, A, b, c, begins, h):
    """Outputs c_t . h_t [B, T, H, P] of the recurrence of `mamba` from h on, and the last h.

    A scan over chunks, recomputed for gradients, so that only the states between chunks are kept.
    Inside a chunk runs of tokens are joined with the runs before them, doubling their length.
    """
    B, T, H, P = u.shape
    C = min(_CHUNK, T)
    N = -(-T // C)

    def cut(x):  # [B, T, ...] -> [N, B, C, ...]
        x = jnp.pad(x, [(0, 0), (0, N * C - T)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, N, C, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def chunk(h, xs):
        u, dt, b, c, begins = xs
        decay = jnp.exp(dt[..., None] * A)  # [B, C, H, P, N]
        decay = jnp.where(begins[..., None, None, None], 0, decay)
        states = (dt * u)[..., None] * b[:, :, None, None]
        run = 1
        while run < C:  # decay and states are those of the last `run` tokens, or of all
            before = ((0, 0), (run, 0), (0, 0), (0, 0), (0, 0))
            states = states + decay * jnp.pad(states[:, :-run], before)
            decay = decay * jnp.pad(decay[:, :-run], before, constant_values=1)
            run *= 2
        states = states + decay * h[:, None]
        return states[:, -1], jnp.sum(states * c[:, :, None, None], axis=-1)

    h, y = jax.lax.scan(chunk, h, tuple(cut(x) for x in (u, dt, b, c, begins)))
    return jnp.moveaxis(y, 0, 1).reshape(B, N * C, H, P)[:, :T], h
