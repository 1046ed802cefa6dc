"""Reformer: softmax attention among tokens that hash alike."""

import jax
import jax.numpy as jnp

from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.visibility import (
    check_same_tokens,
    masked_softmax,
    precision_for,
    segment_numbers,
)

_SELF = -1e5  # the score of a token with itself: seen only where nothing else is


def reformer(num_hashes: int = 4, num_buckets: int = 32, chunk_size: int = 64) -> AttentionMethod:
    """LSH attention with shared queries and keys, in time T log T.

        y = sum_r softmax_r(lse_r) softmax(q . k / sqrt(D)) v,  k = q / sqrt(mean(q^2) + 1e-6)

    Each of R rounds hashes q into one of `num_buckets` by random rotations, argmax [q R | -q R],
    and sorts the tokens by bucket and place. Sorted tokens are cut into chunks of C; each chunk
    reads itself and the one before, and rounds are mixed by their log-sums of exponentials. The
    chunks of all rounds form one ring, so a round's first chunk reads the last one of another
    round. Keys of other buckets in the chunk are not hidden, a token sees itself only if nothing
    else, and buckets carry no gradient. Scores and softmax are float32.

    Only `q` and `v` are read: keys are the normalised queries, and a layer's key projection has no
    influence. In causal attention no value or key of a later token enters, but later tokens do
    decide where chunks end; neither that nor documents in one row can be undone by a mask.

    The constants are `rotations` [H, D, R, num_buckets / 2], Gaussian.

    Args:
        num_hashes: R >= 1; the paper uses up to 8.
        num_buckets: even, >= 2; about T / C is usual.
        chunk_size: C >= 1.

    Raises:
        ValueError: if a number is out of range, or, when called, for unequal T and S or grouped
            heads.

    Source: Reformer (arXiv 2001.04451), section 2, in the form of transformers' `LSHSelfAttention`.
    """
    for name, value in (("num_hashes", num_hashes), ("chunk_size", chunk_size)):
        if value < 1:
            raise ValueError(f"{name}={value}, expected at least 1.")
    if num_buckets < 2 or num_buckets % 2:
        raise ValueError(f"num_buckets={num_buckets}, expected an even number >= 2, such as 32.")
    R = num_hashes

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        return {}, {"rotations": jax.random.normal(key, (H, D, R, num_buckets // 2))}

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
        check_same_tokens(q, k, "queries are the keys")
        B, T, H, D = q.shape
        if k.shape[2] != H:
            raise ValueError(
                f"q has {H} heads and k has {k.shape[2]}, expected as many: queries are the keys."
            )
        C = min(chunk_size, T)
        padded = -(-T // C) * C
        precision = precision_for(q, v)
        segment = jnp.zeros((B, T), int) if segment_ids is None else segment_numbers(segment_ids)
        real = segment if mask is None else jnp.where(mask.astype(bool), segment, -1)
        segment, real = (
            jnp.pad(x, ((0, 0), (0, padded - T)), constant_values=-1) for x in (segment, real)
        )
        x, values = (
            jnp.pad(jnp.moveaxis(x, 1, 2), ((0, 0), (0, 0), (0, padded - T), (0, 0)))
            for x in (q, v)
        )

        rotated = jnp.einsum(
            "bhtd,hdrn->bhrtn",
            x.astype(jnp.float32),
            params["rotations"],
            precision=jax.lax.Precision.HIGHEST,
        )
        bucket = jnp.argmax(jnp.concatenate([rotated, -rotated], axis=-1), axis=-1)
        bucket = jnp.where(real[:, None, None] < 0, num_buckets, bucket)  # padding comes last
        bucket = bucket + (num_buckets + 1) * jnp.arange(R)[:, None]
        order = jnp.argsort(bucket.reshape(B, H, R * padded), axis=-1, stable=True)
        token = order % padded

        def chunks(x):  # [B, H, padded, ...] -> [B, H, R padded / C, C, ...], sorted
            x = jax.vmap(jax.vmap(lambda x, token: x[token]))(x, token)
            return x.reshape(B, H, -1, C, *x.shape[3:])

        def with_previous(x):
            return jnp.concatenate([jnp.roll(x, 1, axis=2), x], axis=3)

        place = token.reshape(B, H, -1, C)
        segment, real = (
            chunks(jnp.broadcast_to(x[:, None], (B, H, padded))) for x in (segment, real)
        )
        distance = place[..., None] - with_previous(place)[..., None, :]
        visible = segment[..., None] == with_previous(real)[..., None, :]
        if causal:
            visible = visible & (distance >= 0)

        @jax.checkpoint
        def attention(x, values):
            query = chunks(x)
            keys = query.astype(jnp.float32)
            square = jnp.mean(jnp.square(keys), axis=-1, keepdims=True)
            keys = keys * (jax.lax.rsqrt(square + 1e-6) * D**-0.5)
            keys = with_previous(keys.astype(x.dtype))
            scores = jnp.einsum(
                "bhncd,bhnkd->bhnck",
                query,
                keys,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            scores = jnp.where(distance == 0, _SELF, scores)
            y = jnp.einsum(
                "bhnck,bhnkp->bhncp",
                masked_softmax(scores, visible).astype(values.dtype),
                with_previous(chunks(values)),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            found = jnp.any(visible, axis=-1, keepdims=True)
            scores = jnp.where(found, jnp.where(visible, scores, -jnp.inf), 0.0)
            log_sum = jax.nn.logsumexp(scores, axis=-1)
            return y, jnp.where(found[..., 0], log_sum, -jnp.inf)

        y, log_sum = attention(x, values)
        back = jnp.argsort(order, axis=-1)
        y = jnp.take_along_axis(y.reshape(B, H, R * padded, -1), back[..., None], axis=2)
        log_sum = jnp.take_along_axis(log_sum.reshape(B, H, R * padded), back, axis=2)
        y = y.reshape(B, H, R, padded, -1)
        log_sum = jnp.moveaxis(log_sum.reshape(B, H, R, padded), 2, 3)
        weights = masked_softmax(log_sum, log_sum > -jnp.inf)
        y = jnp.einsum("bhtr,bhrtp->bthp", weights, y, precision=jax.lax.Precision.HIGHEST)
        return y[:, :T].astype(v.dtype)

    return AttentionMethod(init=init, apply=apply)
