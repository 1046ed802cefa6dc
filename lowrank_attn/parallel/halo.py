"""The tokens before a shard of a sequence."""

import jax
import jax.numpy as jnp


def halo(x, axis: str, size: int, segment_ids: jax.Array | None = None):
    """The `size` tokens before each shard's own, from the shards before it.

    Shards may be shorter than `size`: each step brings the tokens of one shard further back, so
    each device receives at most `size` tokens, however many it has. It is the `past` of
    `layers.causal_conv`, and of windows. Call it inside `jax.shard_map`.

    Args:
        x: arrays [B, T, ...] in any tree, the shard's tokens; all of the same T.
        axis: the mesh axis over which the sequence is cut.
        size: at least 0.
        segment_ids: [B, T] int, packed documents; a new one begins wherever the id changes.

    Returns:
        The tree with arrays [B, size, ...], zeros (false) before the start of the sequence and at
        tokens of another document than the shard's first one.

    Raises:
        ValueError: for a negative size.
    """
    if size < 0:
        raise ValueError(f"size={size}, expected a number of tokens, at least 0.")
    before = jax.tree.map(lambda x: _before(x, axis, size), x)
    if segment_ids is None:
        return before
    ids = jnp.concatenate([_before(segment_ids, axis, size), segment_ids[:, :1]], axis=1)
    changes = jnp.flip(ids[:, 1:] != ids[:, :-1], axis=1)
    same = jnp.flip(jnp.cumsum(changes, axis=1), axis=1) == 0
    return jax.tree.map(
        lambda x: jnp.where(same.reshape(*same.shape, *[1] * (x.ndim - 2)), x, jnp.zeros_like(x)),
        before,
    )


def _before(x, axis, size):
    T, n = x.shape[1], jax.lax.axis_size(axis)
    parts = []  # from the nearest shard back
    for distance in range(1, n):
        wanted = min(T, size - (distance - 1) * T)
        if wanted <= 0:
            break
        steps = [(i, i + distance) for i in range(n - distance)]
        parts.append(jax.lax.ppermute(x[:, T - wanted :], axis, steps))
    missing = size - sum(part.shape[1] for part in parts)
    nothing = jnp.zeros_like(x, shape=(x.shape[0], missing, *x.shape[2:]))
    return jnp.concatenate([nothing, *reversed(parts)], axis=1)
