"""Who sees whom: the checks and masks that attention methods share.

Query t sees key s if s <= t when `causal`, if `mask[b, s]` is true, and if no segment begins after
one of them and up to the other: a segment begins wherever `segment_ids` changes along the row, so
an id that comes back later is another segment.
"""

import jax
import jax.numpy as jnp


def check_arrays(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    causal: bool,
    mask: jax.Array | None,
    segment_ids: jax.Array | None,
) -> None:
    """Check that the arrays of an attention method fit together.

    Raises:
        ValueError: naming the array that does not.
    """
    B, T, Hq, D = q.shape
    S, H = k.shape[1:3]
    if k.shape != (B, S, H, D):
        raise ValueError(
            f"k has shape {k.shape}, expected [B, S, H, D] = [{B}, S, H, {D}] as in q."
        )
    if v.shape[:3] != (B, S, H):
        raise ValueError(f"v has shape {v.shape}, expected [{B}, {S}, {H}, P] as in k.")
    if Hq % H:
        raise ValueError(f"q has {Hq} heads, expected a multiple of the {H} heads of k and v.")
    if causal and T != S:
        raise ValueError(f"causal=True with {T} queries and {S} keys, expected as many of each.")
    if mask is not None and mask.shape != (B, S):
        raise ValueError(f"mask has shape {mask.shape}, expected [B, S] = {(B, S)}.")
    if segment_ids is not None and (segment_ids.shape != (B, T) or T != S):
        raise ValueError(
            f"segment_ids has shape {segment_ids.shape} with {T} queries and {S} keys, expected "
            f"[B, T] = {(B, T)} and as many keys as queries."
        )


def check_same_tokens(q: jax.Array, k: jax.Array, why: str) -> None:
    """Check that there are as many queries as keys.

    Raises:
        ValueError: if not; `why` says what needs it.
    """
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} tokens and k has {k.shape[1]}, expected the same tokens: {why}."
        )


def segment_numbers(segment_ids: jax.Array) -> jax.Array:
    """Number the segments of each row: [B, T] ids -> [B, T] 0, 1, ... in their order."""
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(jnp.cumsum(begins, axis=1), ((0, 0), (1, 0)))


def visible_keys(
    T: int, causal: bool, mask: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array:
    """Which key each query sees; a boolean array that broadcasts to [B, T, S]."""
    visible = jnp.ones((1, 1, 1), bool)
    if causal:
        visible = visible & jnp.tri(T, dtype=bool)
    if mask is not None:
        visible = visible & mask.astype(bool)[:, None, :]
    if segment_ids is not None:
        segment = segment_numbers(segment_ids)
        visible = visible & (segment[:, :, None] == segment[:, None, :])
    return visible


def masked_softmax(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax over the last axis of float32 scores, over the visible entries; none: all 0."""
    scores = jnp.where(visible, scores, -jnp.inf)
    highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)


def precision_for(*arrays: jax.Array) -> jax.lax.Precision:
    """The precision of matrix products: the highest if all arrays are float32."""
    is_float32 = jnp.result_type(*arrays) == jnp.float32
    return jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT


def grouped_scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """Products of q [B, T, H, G, D] and k [B, S, H, D]: [B, H, G, T, S], float32."""
    return jnp.einsum(
        "bthgd,bshd->bhgts",
        q,
        k,
        precision=precision_for(q, k),
        preferred_element_type=jnp.float32,
    )
