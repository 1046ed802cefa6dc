"""Sliding-window attention over a sequence that is cut over devices."""

import jax

from lowrank_attn import layers
from lowrank_attn.layers import AttentionMethod
from lowrank_attn.layers.recent import real_and_segment
from lowrank_attn.layers.sliding_window import WindowState, continue_window
from lowrank_attn.layers.visibility import check_same_tokens, segment_numbers
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
    one_device = layers.ATTENTION["sliding_window"](window=window)

    def apply(
        params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        del params
        if not causal:
            raise ValueError(
                "causal=False with a window over devices, which brings only earlier tokens; set "
                "causal=True, or cut the batch instead of the sequence."
            )
        check_same_tokens(q, k, "a window lies around the query's own place")
        segment = None if segment_ids is None else segment_numbers(segment_ids)
        real, segment = real_and_segment(q, mask, segment)
        past = halo(WindowState(k, v, real), axis, window, segment_ids)
        y, _ = continue_window(q, k, v, past, real, segment)
        return y

    return one_device._replace(apply=apply)
