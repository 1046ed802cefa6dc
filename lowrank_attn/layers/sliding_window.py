"""Softmax attention to the neighbours of each token, in time and memory linear in T."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.recent import real_and_segment, remember
from lowrank_attn.layers.visibility import (
    check_same_tokens,
    masked_softmax,
    precision_for,
    segment_numbers,
)
from lowrank_attn.parallel.halo import halo

_SMALLEST_BLOCK = 64  # smaller windows share blocks, whose matrix products would be too small


def sliding_window(window: int = 128, axis: str | None = None) -> AttentionMethod:
    """Exact softmax attention to the tokens at most W away: softmax(q . k / sqrt(D)) v.

    Query t sees keys t - W to t when causal, that is W + 1 of them, else t - W to t + W. Queries
    are cut into blocks of C = max(W, 64); each block reads its own keys and W more on either side
    that is visible, so there are T (C + W) or T (C + 2 W) scores, which are recomputed for
    gradients. Scores and the softmax are float32; probabilities have the dtype of v.

    Args:
        window: W >= 1.
        axis: the mesh axis over which the sequence is cut, for causal calls inside `jax.shard_map`:
            each device receives the W keys and values before its own tokens; see `parallel.halo`.

    Raises:
        ValueError: if the window is below 1, or, when called, for unequal T and S, or causal=False
            with an axis.

    Source: Longformer (arXiv 2004.05150), section 3.1; BASED (arXiv 2402.18668) uses W = 64 and
    128, counted as here.
    """
    if window < 1:
        raise ValueError(f"window={window}, expected at least 1, such as 128.")

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        del key, D, H
        return {}, {}

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
        del params
        check_same_tokens(q, k, "a window lies around the query's own place")
        segment = None if segment_ids is None else segment_numbers(segment_ids)
        real, segment = real_and_segment(q, mask, segment)
        if axis is None:
            return _attend(q, k, v, min(window, q.shape[1] - 1), causal, real, segment, None)
        if not causal:
            raise ValueError(
                "causal=False with a window over devices, which brings only earlier tokens; set "
                "causal=True, or cut the batch instead of the sequence."
            )
        past = halo(WindowState(k, v, real), axis, window, segment_ids)
        return _attend(q, k, v, window, True, real, segment, past)

    return AttentionMethod(init=init, apply=apply, cut=functools.partial(sliding_window, window))


class WindowState(NamedTuple):
    """The last W tokens: what causal windows of W + 1 tokens keep.

    Attributes:
        k: [B, W, H, D], v: [B, W, H, P].
        real: [B, W] bool, false where there was no token, or one of another document.
    """

    k: jax.Array
    v: jax.Array
    real: jax.Array


def continue_window(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    past: WindowState,
    real: jax.Array,
    segment: jax.Array,
) -> tuple[jax.Array, WindowState]:
    """Causal `sliding_window` that goes on from earlier tokens.

    Args:
        q: [B, T, Hq, D], k: [B, T, H, D], v: [B, T, H, P] of the new tokens.
        past: the W tokens before them, in the document of the first one.
        real: [B, T] bool, false at padding, which is at the ends of a row.
        segment: [B, T] int, documents counted from 0.

    Returns:
        [B, T, Hq, P] in the dtype of v, and the state after the last token.
    """
    y = _attend(q, k, v, past.k.shape[1], True, real, segment, past)
    new = WindowState(k.astype(past.k.dtype), v.astype(past.v.dtype), real)
    return y, remember(past, new, real, segment)


def _attend(q, k, v, W, causal, real, segment, past):
    """Attention to the tokens at most W away; `past`: before the first token, if causal."""
    B, T, Hq, D = q.shape
    H, P = v.shape[2:]
    C = min(max(W, _SMALLEST_BLOCK), T)
    N = -(-T // C)

    def blocks(x, fill=0):  # [B, T, ...] -> [B, N, C, ...]
        pad = [(0, 0), (0, N * C - T)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, pad, constant_values=fill).reshape(B, N, C, *x.shape[2:])

    def with_halo(x, past, fill=0):  # [B, N, C, ...] -> [B, N, W + C (+ W), ...]
        none = jnp.full((B, 1, W, *x.shape[3:]), fill, x.dtype)
        first = none if past is None else past[:, None].astype(x.dtype)
        parts = [jnp.concatenate([first, x[:, :-1, C - W :]], axis=1) if N > 1 else first, x]
        if not causal:
            parts.append(jnp.concatenate([x[:, 1:, :W], none], axis=1))
        return jnp.concatenate(parts, axis=2)

    past_k, past_v, past_segment = None, None, None
    if past is not None:
        past_k, past_v, past_segment = past.k, past.v, jnp.where(past.real, 0, -1)
    real_segment = blocks(jnp.where(real, segment, -1), -1)
    real_segment = with_halo(real_segment, past_segment, -1)[:, :, None]
    precision = precision_for(q, k, v)

    @jax.checkpoint
    def attention(q, k, v):
        q = blocks(q.reshape(B, T, H, Hq // H, D))
        k, v = with_halo(blocks(k), past_k), with_halo(blocks(v), past_v)
        scores = jnp.einsum(
            "bnchgd,bnkhd->bnhgck",
            q,
            k,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        back = jnp.arange(C)[:, None] - (jnp.arange(k.shape[2]) - W)  # how far, [C, K]
        visible = (jnp.abs(back) <= W) & ((back >= 0) | (not causal))
        visible = (visible & (blocks(segment)[..., None] == real_segment))[:, :, None, None]
        weights = masked_softmax(scores * D**-0.5, visible).astype(v.dtype)
        return jnp.einsum(
            "bnhgck,bnkhp->bnchgp",
            weights,
            v,
            precision=precision,
            preferred_element_type=jnp.float32,
        ).astype(v.dtype)

    return attention(q, k, v).reshape(B, N * C, Hq, P)[:, :T]
