"""Settings of Long Range Arena (Tay et al. 2021), those of its paper and those of its repository.

Numbers that differ from both are marked as ours.
"""

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]


def sizes(num_layers: int, width: int, num_heads: int, mlp_width: int) -> dict[str, int]:
    """The sizes of an encoder."""
    return {
        "num_layers": num_layers,
        "width": width,
        "num_heads": num_heads,
        "mlp_width": mlp_width,
    }


# The optimiser, whose factor with warm-up and inverse square root peaks at factor / sqrt(warm-up
# steps).
COMMON: Settings = {
    "positions": "sinusoidal",
    "pooling": "cls",
    "dropout": 0.1,
    "dtype": "bfloat16",
    "batch_size": 32,
    "b2": 0.98,
    "schedule": "rsqrt",
    "weight_decay": 0.1,
    "clip": "none",
    "eval_every": 500,
}


def _pathfinder(size: Settings, learning_rate: float, batch_size: int, **others: Any) -> Settings:
    """200 epochs of 160,000 pictures, the first of which warms up, as in the repository."""
    epoch = 160_000 // batch_size
    return {
        **size,
        "head_width": size["mlp_width"],
        "pooling": "mean",
        "steps": 200 * epoch,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "warmup_steps": epoch,
        "schedule": "cosine",
        "weight_decay": 0.0,
        "eval_every": epoch,
        **others,
    }


# What the repository has for Path-X beyond that.
_PATHX: Settings = {"positions": "learned", "clip": "norm", "clip_at": 1.0}

# The warm-up is longer than training: of its factor, 0.05 in the repository and 0.5 in the paper,
# the rate reaches factor * 5000 / 8000^1.5. Ours: it does so after a tenth of the steps.
_RETRIEVAL: Settings = {
    **sizes(4, 128, 4, 512),
    "head_width": 512,
    "pair_head": "concatenation",
    "steps": 5000,
    "warmup_steps": 8000,
}

# The sizes of the paper's appendix.
PAPER: Mapping[str, Settings] = {
    "retrieval": {**_RETRIEVAL, "learning_rate": 3.5e-3},
    "listops": {
        **sizes(6, 512, 8, 2048),
        "head_width": 2048,
        "steps": 5000,
        "learning_rate": 1.58e-3,
        "warmup_steps": 1000,
    },
    "text": {
        **sizes(6, 512, 8, 2048),
        "head_width": 2048,
        "steps": 20_000,
        "learning_rate": 5.6e-4,
        "warmup_steps": 8000,
    },
    "image": {
        **sizes(3, 64, 4, 128),
        "head_width": 128,
        "steps": 35_200,
        "batch_size": 256,
        "learning_rate": 1e-2,
        "warmup_steps": 175,
        "schedule": "cosine",
        "weight_decay": 0.0,
    },
    # Sizes and rate are Pathfinder's in the paper; all else is the repository's.
    "pathfinder": _pathfinder(sizes(4, 128, 8, 128), 1e-2, 512),
    "pathx": _pathfinder(sizes(4, 128, 8, 128), 1e-2, 64, **_PATHX),
}

# The sizes of the repository's configuration files, which differ.
REPO: Mapping[str, Settings] = {
    "retrieval": {**_RETRIEVAL, "learning_rate": 3.5e-4},
    "listops": {
        **sizes(4, 512, 8, 1024),
        "head_width": 1024,
        "steps": 5000,
        "learning_rate": 1.58e-3,
        "warmup_steps": 1000,
    },
    "text": {
        **sizes(4, 256, 4, 1024),
        "head_width": 1024,
        "steps": 20_000,
        "learning_rate": 5.6e-4,
        "warmup_steps": 8000,
    },
    "image": {
        **sizes(1, 128, 8, 128),
        "qk_dim": 8,
        "head_width": 128,
        "positions": "learned",
        "dropout": 0.3,
        "steps": 35_200,
        "batch_size": 256,
        "learning_rate": 5e-4,
        "warmup_steps": 175,
        "schedule": "cosine",
        "weight_decay": 0.0,
    },
    "pathfinder": _pathfinder(sizes(4, 32, 4, 32), 1e-3, 512, qk_dim=4, dropout=0.2),
    "pathx": _pathfinder(sizes(1, 32, 2, 32), 1e-3, 64, qk_dim=8, **_PATHX),
}
