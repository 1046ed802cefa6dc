"""Settings of published Long Range Arena set-ups, by preset and task. Flags override them.

Numbers that the publication gives are marked by its name; the others are ours.
"""

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]


def _sizes(num_layers: int, width: int, num_heads: int, mlp_width: int) -> dict[str, int]:
    return {
        "num_layers": num_layers,
        "width": width,
        "num_heads": num_heads,
        "mlp_width": mlp_width,
    }


# Long Range Arena's optimiser (Tay et al. 2021), whose factor with warm-up and inverse square root
# peaks at factor / sqrt(warm-up steps).
_LRA: Settings = {
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

# What the tasks of a preset have in common.
_COMMON: Mapping[str, Settings] = {
    # Ours: enough to leave the majority class behind in some minutes on a CPU with two cores;
    # retrieval, whose examples are 8,000 bytes, is still near it after its steps.
    "quick": {
        **_sizes(1, 64, 2, 128),
        "head_width": 64,
        "positions": "learned",
        "pooling": "max",
        "dropout": 0.0,
        "dtype": "float32",
        "kernel_options": {"llops": "num_features=64", "llops_paper": "num_features=64"},
        "steps": 400,
        "batch_size": 16,
        "learning_rate": 3e-3,
        "warmup_steps": 40,
        "schedule": "cosine",
        "eval_every": 200,
    },
    # Skyformer (Chen et al. 2021), the set-up behind most tables of linear attention: its code's
    # sizes, batch, rate, one-cycle schedule with linear annealing, clipping by value.
    "skyformer": {
        **_sizes(2, 64, 2, 128),
        "head_width": 128,
        "positions": "learned",
        "pooling": "mean",
        "dropout": 0.1,
        "dtype": "bfloat16",
        "steps": 50_000,
        "schedule": "linear",
        "weight_decay": 0.01,
        "clip": "value",
        "clip_at": 1.0,
        "eval_every": 1000,
    },
    # "Never Train from Scratch" (Amos et al. 2024), masked, the size of Long Range Arena: sizes,
    # mask ratio, rates and batch from its repository and table 4. It trains each phase for at most
    # 200 epochs or 24 hours; the numbers of steps are ours.
    "spt": {
        "head_width": None,
        "positions": "sinusoidal",
        "pooling": "mean",
        "dropout": 0.0,
        "dtype": "bfloat16",
        "objective": "masked",
        "pretrain_steps": 30_000,
        "steps": 30_000,
        "batch_size": 32,
        "warmup_steps": 2000,
        "schedule": "constant",
        "weight_decay": 0.0,
        "eval_every": 2000,
    },
    "lra-paper": _LRA,  # sizes of the paper's appendix
    "lra-repo": _LRA,  # sizes of the repository's configuration files, which differ
}


def _skyformer(learning_rate: float, batch_size: int, warmup_steps: int) -> Settings:
    return {
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "warmup_steps": warmup_steps,
    }


def _spt(
    sizes: Settings,
    learning_rate: float,
    pretrain_learning_rate: float,
    mask_ratio: float,
    **others: Any,
) -> Settings:
    rates = {
        "learning_rate": learning_rate,
        "pretrain_learning_rate": pretrain_learning_rate,
        "mask_ratio": mask_ratio,
    }
    return {**sizes, **rates, **others}


# The warm-up is longer than training: of its factor, 0.05 in the repository and 0.5 in the paper,
# the rate reaches factor * 5000 / 8000^1.5. Ours: it does so after a tenth of the steps.
_LRA_RETRIEVAL: Settings = {
    **_sizes(4, 128, 4, 512),
    "head_width": 512,
    "pair_head": "concatenation",
    "steps": 5000,
    "warmup_steps": 8000,
}

_TASKS: Mapping[str, Mapping[str, Settings]] = {
    "quick": {
        "listops": {},
        "text": {"steps": 200},
        "retrieval": {"pooling": "mean", "learning_rate": 1e-3, "steps": 200},
        "image": {"learning_rate": 1e-3, "batch_size": 32},
    },
    "skyformer": {
        "listops": _skyformer(1e-4, 32, 1000),
        "text": _skyformer(1e-4, 32, 80),
        "retrieval": _skyformer(2e-4, 16, 800),
        "image": _skyformer(1e-4, 256, 175),
    },
    "spt": {
        "listops": _spt(_sizes(6, 512, 8, 2048), 1e-4, 1e-3, 0.1),
        "text": _spt(_sizes(6, 512, 8, 2048), 1e-4, 5e-4, 0.15, head_width=512, weight_decay=0.1),
        "retrieval": _spt(
            _sizes(4, 128, 4, 512), 5e-4, 5e-3, 0.15, head_width=128, pair_head="products_gelu"
        ),
        "image": _spt(_sizes(3, 64, 4, 128), 1e-3, 1e-3, 0.5, head_width=64, pooling="max"),
    },
    "lra-paper": {
        "retrieval": {**_LRA_RETRIEVAL, "learning_rate": 3.5e-3},
        "listops": {
            **_sizes(6, 512, 8, 2048),
            "head_width": 2048,
            "steps": 5000,
            "learning_rate": 1.58e-3,
            "warmup_steps": 1000,
        },
        "text": {
            **_sizes(6, 512, 8, 2048),
            "head_width": 2048,
            "steps": 20_000,
            "learning_rate": 5.6e-4,
            "warmup_steps": 8000,
        },
        "image": {
            **_sizes(3, 64, 4, 128),
            "head_width": 128,
            "steps": 35_200,
            "batch_size": 256,
            "learning_rate": 1e-2,
            "warmup_steps": 175,
            "schedule": "cosine",
            "weight_decay": 0.0,
        },
    },
    "lra-repo": {
        "retrieval": {**_LRA_RETRIEVAL, "learning_rate": 3.5e-4},
        "listops": {
            **_sizes(4, 512, 8, 1024),
            "head_width": 1024,
            "steps": 5000,
            "learning_rate": 1.58e-3,
            "warmup_steps": 1000,
        },
        "text": {
            **_sizes(4, 256, 4, 1024),
            "head_width": 1024,
            "steps": 20_000,
            "learning_rate": 5.6e-4,
            "warmup_steps": 8000,
        },
        "image": {
            **_sizes(1, 128, 8, 128),
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
    },
}

PRESETS: Mapping[str, Mapping[str, Settings]] = {
    preset: {task: {**_COMMON[preset], **settings} for task, settings in tasks.items()}
    for preset, tasks in _TASKS.items()
}


def resolve(preset: str, task: str, kernel: str, platform: str) -> tuple[str, dict[str, Any]]:
    """The name behind `auto` and the settings of a preset.

    Args:
        preset: `auto` or a name in `PRESETS`; `auto` is `quick` on a CPU, else `skyformer`.
        task: the task.
        kernel: chooses among a preset's `kernel_options`.
        platform: of the default device, such as `cpu`.

    Raises:
        ValueError: if the preset has no settings for the task.
    """
    if preset == "auto":
        preset = "quick" if platform == "cpu" else "skyformer"
    if task not in PRESETS[preset]:
        known = ", ".join(PRESETS[preset])
        raise ValueError(f"preset={preset!r} has no settings for task={task!r}; known: {known}.")
    settings = dict(PRESETS[preset][task])
    settings["kernel_options"] = settings.get("kernel_options", {}).get(kernel, "")
    return preset, settings
