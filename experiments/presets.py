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
    # Ours: enough to leave the majority class behind in some minutes on a CPU with two cores.
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
    # mask ratio, rates, pooling and batch from its repository and table 4. It trains each phase for
    # at most 200 epochs or 24 hours; the numbers of steps are ours.
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


def _lra_pathfinder(
    sizes: Settings, learning_rate: float, batch_size: int, **others: Any
) -> Settings:
    """200 epochs of 160,000 pictures, the first of which warms up, as in the repository."""
    epoch = 160_000 // batch_size
    return {
        **sizes,
        "head_width": sizes["mlp_width"],
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
_LRA_PATHX: Settings = {"positions": "learned", "clip": "norm", "clip_at": 1.0}

_TASKS: Mapping[str, Mapping[str, Settings]] = {
    "quick": {
        "listops": {},
        "text": {"steps": 200},
        "image": {"learning_rate": 1e-3, "batch_size": 32},
        "pathfinder": {
            "task_options": "num_train=20000,num_validation=1000,num_test=2000",
            "learning_rate": 1e-3,
            "batch_size": 32,
        },
        "pathx": {
            "task_options": "num_train=2000,num_validation=200,num_test=500",
            "learning_rate": 1e-3,
            "batch_size": 4,
        },
    },
    "skyformer": {
        "listops": _skyformer(1e-4, 32, 1000),
        "text": _skyformer(1e-4, 32, 80),
        "image": _skyformer(1e-4, 256, 175),
        "pathfinder": _skyformer(2e-4, 128, 312),
        "pathx": _skyformer(2e-4, 32, 312),  # ours, as are all of this line: not in that study
    },
    "spt": {
        "listops": _spt(_sizes(6, 512, 8, 2048), 1e-4, 1e-3, 0.1),
        "text": _spt(_sizes(6, 512, 8, 2048), 1e-4, 5e-4, 0.15, head_width=512, weight_decay=0.1),
        "image": _spt(_sizes(3, 64, 4, 128), 1e-3, 1e-3, 0.5, head_width=64, pooling="max"),
        "pathfinder": _spt(_sizes(4, 128, 8, 128), 5e-4, 1e-3, 0.5),
        "pathx": _spt(_sizes(4, 128, 4, 128), 5e-4, 5e-4, 0.5, pooling="max"),
    },
    "lra-paper": {
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
        # Sizes and rate are Pathfinder's in the paper; all else is the repository's.
        "pathfinder": _lra_pathfinder(_sizes(4, 128, 8, 128), 1e-2, 512),
        "pathx": _lra_pathfinder(_sizes(4, 128, 8, 128), 1e-2, 64, **_LRA_PATHX),
    },
    "lra-repo": {
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
        "pathfinder": _lra_pathfinder(_sizes(4, 32, 4, 32), 1e-3, 512, qk_dim=4, dropout=0.2),
        "pathx": _lra_pathfinder(_sizes(1, 32, 2, 32), 1e-3, 64, qk_dim=8, **_LRA_PATHX),
    },
}

# What self-pretraining reads as numbers, in place of ids, and the loss on them.
_PIXELS = {"image": "l1", "pathfinder": "cross_entropy", "pathx": "cross_entropy"}

# The same, causal: rates on labels and of pretraining, and pooling.
_CAUSAL: Mapping[str, tuple[float, float, str]] = {
    "listops": (5e-4, 5e-4, "last"),
    "text": (1e-4, 1e-3, "mean"),
    "retrieval": (1e-3, 5e-3, "mean"),
    "image": (1e-3, 5e-3, "max"),
    "pathfinder": (1e-3, 1e-3, "mean"),
    "pathx": (5e-4, 1e-3, "max"),
}


def _masked(task: str) -> dict[str, Any]:
    settings = {**_COMMON["spt"], **_TASKS["spt"][task]}
    if task in _PIXELS:
        settings |= {"embed": "levels", "pretrain_loss": _PIXELS[task]}
    return settings


def _causal(task: str) -> dict[str, Any]:
    learning_rate, pretrain_learning_rate, pooling = _CAUSAL[task]
    return {
        **_masked(task),
        "causal": True,
        "objective": "next_token",
        "learning_rate": learning_rate,
        "pretrain_learning_rate": pretrain_learning_rate,
        "pooling": pooling,
    }


def _small(task: str) -> dict[str, Any]:
    """Ours: that protocol at Skyformer's sizes and batch, most likely that of LLoPS' table 2."""
    masked, skyformer = _masked(task), {**_COMMON["skyformer"], **_TASKS["skyformer"][task]}
    sizes = ("num_layers", "width", "num_heads", "mlp_width", "batch_size")
    head_width = masked["head_width"] and skyformer["width"]
    return {**masked, **{name: skyformer[name] for name in sizes}, "head_width": head_width}


PRESETS: Mapping[str, Mapping[str, Settings]] = {
    preset: {task: {**_COMMON[preset], **settings} for task, settings in tasks.items()}
    for preset, tasks in _TASKS.items()
} | {
    "spt": {task: _masked(task) for task in _TASKS["spt"]},
    "spt-causal": {task: _causal(task) for task in _TASKS["spt"]},
    "spt-small": {task: _small(task) for task in _TASKS["skyformer"]},
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
