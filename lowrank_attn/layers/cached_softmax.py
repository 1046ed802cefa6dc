"""Softmax attention that goes on from the keys and values of earlier tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_attn.layers.visibility import grouped_scores, masked_softmax, precision_for


class KeyValueCache(NamedTuple):
    """Keys and values of the document so far; its memory is that of the longest one.

    Attributes:
        k: [B, L, H, D], v: [B, L, H, P].
        length: [B] int32, how many of the L places are taken.
    """

    k: jax.Array
    v: jax.Array
    length: jax.Array


def empty_cache(
    batch: int, max_length: int, key: tuple[int, ...], value: tuple[int, ...], dtype
) -> KeyValueCache:
    """A cache with room for max_length tokens, keys [H, D] and values [H, P] each.

    Raises:
        ValueError: if that is no room.
    """
    if max_length < 1:
        raise ValueError(
            f"max_length={max_length}, expected the length of the longest text: the cache of "
            "softmax layers is made for it."
        )
    k, v = (jnp.zeros((batch, max_length, *sizes), dtype) for sizes in (key, value))
    return KeyValueCache(k, v, jnp.zeros((batch,), jnp.int32))


def cached_softmax(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KeyValueCache,
    real: jax.Array,
    segment: jax.Array,
) -> tuple[jax.Array, KeyValueCache]:
    """Causal softmax attention to the cache and to the new tokens, which are put into the cache.

    Tokens beyond its L places are lost; callers count them.

    Args:
        q: [B, T, Hq, D], k: [B, T, H, D], v: [B, T, H, P] of the new tokens.
        cache: what is before them, in the document of the first one.
        real: [B, T] bool, false at padding.
        segment: [B, T] int, documents counted from 0.

    Returns:
        [B, T, Hq, P] in the dtype of v, 0 for queries without a visible key, and the cache after
        the last token, of its document.
    """
    B, T, Hq, D = q.shape
    L, H = cache.k.shape[1:3]
    first = (segment == 0)[:, :, None]
    seen = jnp.broadcast_to(first & (jnp.arange(L) < cache.length[:, None])[:, None], (B, T, L))
    same = (segment[:, :, None] == segment[:, None, :]) & real[:, None, :]
    visible = jnp.concatenate([seen, jnp.tri(T, dtype=bool) & same], axis=-1)
    precision = precision_for(q, k, v)

    def sums(weights, v):
        return jnp.einsum(
            "bhgts,bshp->bthgp",
            weights.astype(v.dtype),
            v,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    grouped = q.reshape(B, T, H, Hq // H, D)
    both = jnp.concatenate([grouped_scores(grouped, x) for x in (cache.k, k)], axis=-1)
    weights = masked_softmax(both * D**-0.5, visible[:, None, None])
    y = sums(weights[..., :L], cache.v) + sums(weights[..., L:], v)

    last = jnp.max(jnp.where(real, segment, 0), axis=1, keepdims=True)
    kept = real & (segment == last)
    start = jnp.where(last[:, 0] == 0, cache.length, 0)
    place = start[:, None] + jnp.cumsum(kept, axis=1) - 1
    at = (jnp.arange(B)[:, None], jnp.where(kept, place, L))
    cache = KeyValueCache(
        cache.k.at[at].set(k.astype(cache.k.dtype), mode="drop"),
        cache.v.at[at].set(v.astype(cache.v.dtype), mode="drop"),
        (start + jnp.sum(kept, axis=1)).astype(jnp.int32),
    )
    return y.reshape(B, T, Hq, -1).astype(v.dtype), cache
