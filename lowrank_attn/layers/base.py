"""The contract of an attention method that is no feature map."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from lowrank_attn.layers.visibility import check_arrays

Params = Mapping[str, jax.Array]


class AttentionMethod(NamedTuple):
    """Attention between queries, keys and values of all heads, made of pure functions.

    Attributes:
        init: `init(key, D, H)` returns `(trainable, constant)`, as for a feature map.
        apply: `apply(params, q, k, v, *, causal, mask, segment_ids)` with q [B, T, Hq, D],
            k [B, S, H, D], v [B, S, H, P] returns [B, T, Hq, P] in the dtype of v; Hq is a multiple
            of H. `mask` [B, S] is true at keys that are real; `segment_ids` [B, T] keeps packed
            documents apart (S = T then). A query that sees no key gives 0. Called through
            `__call__`, which checks the arrays.
        no_causal: why the method has no causal form; None: it has one.
        no_segments: why it cannot keep packed documents apart; None: it can.
        cut: `cut(axis)` is the causal method inside `jax.shard_map` for a sequence that is cut over
            that mesh axis; None: it reads all tokens.
    """

    init: Callable[[jax.Array, int, int], tuple[Params, Params]]
    apply: Callable[..., jax.Array]
    no_causal: str | None = None
    no_segments: str | None = None
    cut: "Callable[[str], AttentionMethod] | None" = None

    def __call__(
        self,
        params: Params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Check the arguments and apply the method.

        Raises:
            ValueError: if arrays do not fit together, or `causal` has no form.
            NotImplementedError: for `segment_ids` where documents cannot be kept apart.
        """
        self.check_causal(causal)
        if segment_ids is not None and self.no_segments:
            raise NotImplementedError(
                f"segment_ids is given, but this kernel cannot keep packed documents apart: "
                f"{self.no_segments}. Put one document into each row."
            )
        check_arrays(q, k, v, causal, mask, segment_ids)
        return self.apply(params, q, k, v, causal=causal, mask=mask, segment_ids=segment_ids)

    def check_causal(self, causal: bool) -> None:
        """Refuse `causal=True` if the method has no causal form.

        Raises:
            ValueError: with the reason.
        """
        if causal and self.no_causal:
            raise ValueError(
                f"causal=True, but this kernel has no causal form: {self.no_causal}. Kernels with "
                "one: every feature map, softmax, sliding_window."
            )
