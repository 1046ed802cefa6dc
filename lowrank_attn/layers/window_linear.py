"""A hybrid in one layer: exact attention nearby, linear attention to everything."""

from typing import Any

import jax
import jax.numpy as jnp

from lowrank_attn import ops
from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.sliding_window import sliding_window


def window_linear(window: int = 128, features: str = "taylor", **options: Any) -> AttentionMethod:
    """Sliding-window softmax and linear attention side by side, mixed by a gate for each head.

        y = g y_window + (1 - g) y_linear,  g = sigmoid(gate)

    y_window is that of `sliding_window`, y_linear that of a feature map with its own normaliser;
    both see the same q, k and v. Nothing is subtracted: nearby tokens are in both.

    Args:
        window: W; see `sliding_window`.
        features: a name in `FEATURE_MAPS`. The `taylor` map is meant for D = 16.
        options: those of the feature map.

    Returns:
        A method with the parameters of the feature map and the trained `gate` [H], initialised 0.

    Raises:
        ValueError: if a name or number is unknown or out of range.

    Source: BASED (arXiv 2402.18668) puts window and Taylor attention into alternating layers; the
    gate within one layer is that of Infini-attention (arXiv 2404.07143), equation 10.
    """
    if features not in FEATURE_MAPS:
        raise ValueError(f"features={features!r} is unknown; known: {', '.join(FEATURE_MAPS)}.")
    near = sliding_window(window)
    feature_map = FEATURE_MAPS[features](**options)

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        trainable, constant = feature_map.init(key, D, H)
        return {**trainable, "gate": jnp.zeros((H,), jnp.float32)}, constant

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
        y_window = near.apply({}, q, k, v, causal=causal, mask=mask, segment_ids=segment_ids)
        y_linear, _ = (ops.causal if causal else ops.bidirectional)(
            q,
            k,
            v,
            features=feature_map,
            params={name: leaf for name, leaf in params.items() if name != "gate"},
            normalize=feature_map.normalize,
            mask=mask,
            segment_ids=segment_ids,
        )
        g = jax.nn.sigmoid(params["gate"].astype(jnp.float32))
        g = jnp.repeat(g, q.shape[2] // k.shape[2])[:, None]
        return (g * y_window + (1.0 - g) * y_linear).astype(v.dtype)

    return AttentionMethod(init=init, apply=apply)
