"""BASED's Taylor features as LLoPS features that can be trained."""

from typing import Any

import jax
import numpy as np

from lowrank_attn.features import llops
from lowrank_attn.models.decoder_configs import DecoderConfig
from lowrank_attn.models.folder import Arrays


def with_llops(
    config: DecoderConfig,
    params: Arrays,
    *,
    num_factors: int = 4,
    num_features: int = 256,
    seed: int = 0,
) -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    """The same model with `llops` in the place of `taylor`, at first the same function.

    Queries and keys get a map each. Of its M columns 153, for BASED's 16 dimensions, are BASED's;
    the others (all D^2 + D + 1 of BASED's if M allows) are random for keys and silent for queries,
    by one factor that training can raise. The normaliser stays the sum of scores.

    Args:
        config: a model with `linear` layers whose kernel is `taylor`.
        params: its parameters by path.
        num_factors: p, at least 2.
        num_features: M, at least (D + 1)(D + 2) / 2.
        seed: of the silent columns.

    Raises:
        ValueError: if the model has no such layers, or p or M is too small.
    """
    options = dict(config.mixers.get("linear", {}))
    if "linear" not in config.layers or options.get("kernel") != "taylor":
        raise ValueError(
            "kernel=llops begins as the taylor features of BASED, which this model has not; it has "
            f"the layers {', '.join(sorted(set(config.layers)))}."
        )
    kernel_options: dict[str, Any] = {
        "num_factors": num_factors,
        "num_features": num_features,
        "init": "based",
        "tied": False,
        "qk_norm": False,
    }
    feature_map = llops(**kernel_options)
    params = dict(params)
    for i, name in enumerate(config.layers):
        if name == "linear":
            mixer = f"blocks/{i}/mixer"
            _, H, D = params[f"{mixer}/key/kernel"].shape
            key = jax.random.fold_in(jax.random.key(seed), i)
            for leaf, array in feature_map.init(key, D, H)[0].items():
                params[f"{mixer}/attend/phi/{leaf}"] = np.asarray(array)
    return config.replace_mixer("linear", kernel="llops", options=kernel_options), params
