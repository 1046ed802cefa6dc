"""Sequences whose length the number of shards does not divide."""

import jax
import jax.numpy as jnp


def pad_tokens(x, shards: int) -> tuple:
    """Repeat the last token until `shards` divides the number of tokens; call it before sharding.

    Repeated, not zeros: a repeated segment id begins no new document, so that a masked call returns
    the state after the last real token.

    Args:
        x: arrays [B, T, ...] in any tree, such as tokens, `segment_ids` and `positions`.
        shards: devices along the axis over which the sequence is to be cut.

    Returns:
        The tree with arrays [B, T', ...], and the mask [B, T'], true at tokens that were there.

    Raises:
        ValueError: if there are arrays with another B or T than the first one.
    """
    leaves = jax.tree.leaves(x)
    B, T = leaves[0].shape[:2]
    for leaf in leaves:
        if leaf.shape[:2] != (B, T):
            raise ValueError(f"x has an array of shape {leaf.shape}, expected [{B}, {T}, ...].")
    more = -T % shards

    def pad(x):
        return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2), mode="edge")

    return jax.tree.map(pad, x), jnp.broadcast_to(jnp.arange(T + more) < T, (B, T + more))
