"""The contract of an attention method that is no feature map."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

Params = Mapping[str, jax.Array]


class AttentionMethod(NamedTuple):
    """Attention between queries, keys and values of all heads, made of pure functions.

    Attributes:
        init: `init(key, D, H)` returns `(trainable, constant)`, as for a feature map.
        apply: `apply(params, q, k, v, *, causal, mask, segment_ids)` with q [B, T, Hq, D],
            k [B, S, H, D], v [B, S, H, P] returns [B, T, Hq, P] in the dtype of v; Hq is a multiple
            of H. `mask` [B, S] is true at keys that are real; `segment_ids` [B, T] keeps packed
            documents apart (S = T then). A query that sees no key gives 0.
    """

    init: Callable[[jax.Array, int, int], tuple[Params, Params]]
    apply: Callable[..., jax.Array]
