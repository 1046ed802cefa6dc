"""A model with another kernel in its linear layers, whose features begin anew."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lowrank_attn.features import FeatureMap
from lowrank_attn.layers.attend import make_kernel, resolve_normalize
from lowrank_attn.models.decoder_configs import DecoderConfig
from lowrank_attn.models.folder import Arrays


def with_kernel(
    config: DecoderConfig,
    params: Arrays,
    kernel: str,
    options: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
) -> tuple[DecoderConfig, dict[str, Any]]:
    """The same model with the features of another kernel, as its map draws them.

    Projections, and everything outside the layers' `attend`, stay as they are.

    Args:
        config: a model with `linear` layers.
        params: its parameters by path.
        kernel: name in `FEATURE_MAPS`.
        options: keyword arguments of its constructor.
        seed: of the features.

    Raises:
        ValueError: if the model has no such layers, or the kernel is none or takes no such options.
    """
    if "linear" not in config.layers:
        raise ValueError(
            f"kernel={kernel!r} is for `linear` layers, and this model has only "
            f"{', '.join(sorted(set(config.layers)))}."
        )
    feature_map = make_kernel(kernel, dict(options or {}))
    if not isinstance(feature_map, FeatureMap):
        raise ValueError(f"kernel={kernel!r} has no features.")
    has_gain = resolve_normalize(feature_map, config.mixers["linear"].get("normalize")) == "rms"
    attends = [f"blocks/{i}/mixer/attend/" for i, m in enumerate(config.layers) if m == "linear"]
    changed = {name: array for name, array in params.items() if not name.startswith(tuple(attends))}
    for i, attend in enumerate(attends):
        mixer = attend.removesuffix("attend/")
        _, H, D = params[f"{mixer}key/kernel"].shape
        key = jax.random.fold_in(jax.random.key(seed), i)
        trainable, constant = feature_map.init(key, D, H)
        for leaf, array in (*trainable.items(), *constant.items()):
            changed[f"{attend}phi/{leaf}"] = np.asarray(array)
        if has_gain:
            changed[f"{attend}gain"] = np.ones(params[f"{mixer}out/kernel"].shape[:2], np.float32)
    return config.replace_mixer("linear", kernel=kernel, options=dict(options or {})), changed
