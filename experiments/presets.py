"""Settings of published Long Range Arena set-ups, by preset and task. Flags override them.

Numbers that the publication gives are marked by its name; the others are ours.
"""

from collections.abc import Mapping
from typing import Any

from experiments import presets_lra
from experiments.presets_lra import Settings, sizes

# What the tasks of a preset have in common.
_COMMON: Mapping[str, Settings] = {
    # Ours: enough to leave the majority class behind in some minutes on a CPU with two cores;
    # retrieval, whose examples are 8,000 bytes, is still near it after its steps.
    "quick": {
        **sizes(1, 64, 2, 128),
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
        **sizes(2, 64, 2, 128),
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
        # Ours: at these rates a kernel that can single out no token does not learn ListOps.
        "kernel_options": {"llops": "scale=2"},
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
    "lra-paper": presets_lra.COMMON,  # sizes of the paper's appendix
    "lra-repo": presets_lra.COMMON,  # sizes of the repository's configuration files, which differ
}


def _skyformer(learning_rate: float, batch_size: int, warmup_steps: int) -> Settings:
    return {
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "warmup_steps": warmup_steps,
    }


def _spt(
    size: Settings,
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
    return {**size, **rates, **others}


_TASKS: Mapping[str, Mapping[str, Settings]] = {
    "quick": {
        "listops": {},
        "text": {"steps": 200},
        "retrieval": {"pooling": "mean", "learning_rate": 1e-3, "steps": 200},
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
        "retrieval": _skyformer(2e-4, 16, 800),
        "image": _skyformer(1e-4, 256, 175),
        "pathfinder": _skyformer(2e-4, 128, 312),
        "pathx": _skyformer(2e-4, 32, 312),  # ours, as are all of this line: not in that study
    },
    "spt": {
        "listops": _spt(sizes(6, 512, 8, 2048), 1e-4, 1e-3, 0.1),
        "text": _spt(sizes(6, 512, 8, 2048), 1e-4, 5e-4, 0.15, head_width=512, weight_decay=0.1),
        "retrieval": _spt(
            sizes(4, 128, 4, 512), 5e-4, 5e-3, 0.15, head_width=128, pair_head="products_gelu"
        ),
        "image": _spt(sizes(3, 64, 4, 128), 1e-3, 1e-3, 0.5, head_width=64, pooling="max"),
        "pathfinder": _spt(sizes(4, 128, 8, 128), 5e-4, 1e-3, 0.5),
        "pathx": _spt(sizes(4, 128, 4, 128), 5e-4, 5e-4, 0.5, pooling="max"),
    },
    "lra-paper": presets_lra.PAPER,
    "lra-repo": presets_lra.REPO,
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
    sizes = ("num_layers", "width", "num_heads", "mlp_width", "batch_size", "kernel_options")
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
