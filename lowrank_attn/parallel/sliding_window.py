"""Sliding-window attention over a sequence that is cut over devices."""

import jax
import jax.numpy as jnp

from lowrank_attn import layers
from lowrank_attn.layers import AttentionMethod
from lowrank_attn.parallel.halo import halo


def sliding_window(window: int = 128, *, axis: str = "context") -> AttentionMethod:
    """`layers.sliding_window` for causal calls inside `jax.shard_map`, as a kernel of any layer.

    Each device receives the `window` keys and values before its own tokens; see `halo`.

    Args:
        window: W >= 1; query t sees keys t - W to t.
        axis: the mesh axis over which the sequence is cut.

    Raises:
        ValueError: if the window is below 1, or, when called, for causal=False.
    """
    local = layers.ATTENTION["sliding_window"](window=window)

    def apply(params, q, k, v, *, causal, mask=None, segment_ids=None):
        if not causal:
            raise ValueError(
                "causal=False with a window over devices, which brings only earlier tokens; set "
                "causal=True, or cut the batch instead of the sequence."
            )
        B, T = q.shape[:2]
        mask = jnp.ones((B, T), bool) if mask is None else mask.astype(bool)
        segment_ids = jnp.zeros((B, T), jnp.int32) if segment_ids is None else segment_ids
        own = (k, v, mask, segment_ids)
        k, v, mask, segment_ids = jax.tree.map(
            lambda before, own: jnp.concatenate([before, own], axis=1),
            halo(own, axis, window),
            own,
        )
        q = jnp.pad(q, [(0, 0), (window, 0), (0, 0), (0, 0)])
        y = local(params, q, k, v, causal=True, mask=mask, segment_ids=segment_ids)
        return y[:, window:]

    return local._replace(apply=apply)
