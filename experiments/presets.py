"""Settings of published Long Range Arena set-ups, by preset and task. Flags override them.

Numbers that the publication gives are marked by its name; the others are ours.
"""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # Ours: enough to leave the majority class behind in a few minutes on a CPU with two cores.
    "quick": {
        "listops": {
            "num_layers": 1,
            "width": 64,
            "num_heads": 2,
            "mlp_width": 128,
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
    },
    # Skyformer (Chen et al. 2021), the set-up behind most tables of linear attention: its code's
    # sizes, batch, rate, one-cycle schedule with linear annealing, clipping by value.
    "skyformer": {
        "listops": {
            "num_layers": 2,
            "width": 64,
            "num_heads": 2,
            "mlp_width": 128,
            "head_width": 128,
            "positions": "learned",
            "pooling": "mean",
            "dropout": 0.1,
            "dtype": "bfloat16",
            "steps": 50_000,
            "batch_size": 32,
            "learning_rate": 1e-4,
            "warmup_steps": 1000,
            "schedule": "linear",
            "weight_decay": 0.01,
            "clip": "value",
            "clip_at": 1.0,
            "eval_every": 1000,
        },
    },
    # "Never Train from Scratch" (Amos et al. 2024), masked, the size of Long Range Arena: sizes,
    # mask ratio, rates and batch from its repository and table 4. It trains each phase for at most
    # 200 epochs or 24 hours; the numbers of steps are ours.
    "spt": {
        "listops": {
            "num_layers": 6,
            "width": 512,
            "num_heads": 8,
            "mlp_width": 2048,
            "head_width": None,
            "positions": "sinusoidal",
            "pooling": "mean",
            "dropout": 0.0,
            "dtype": "bfloat16",
            "objective": "masked",
            "mask_ratio": 0.1,
            "pretrain_steps": 30_000,
            "pretrain_learning_rate": 1e-3,
            "steps": 30_000,
            "batch_size": 32,
            "learning_rate": 1e-4,
            "warmup_steps": 2000,
            "schedule": "constant",
            "weight_decay": 0.0,
            "eval_every": 2000,
        },
    },
    # Long Range Arena (Tay et al. 2021): the appendix' sizes and the repository's optimiser, whose
    # factor 0.05 with warm-up and inverse square root peaks at 0.05 / sqrt(1000).
    "lra-paper": {
        "listops": {
            "num_layers": 6,
            "width": 512,
            "num_heads": 8,
            "mlp_width": 2048,
            "head_width": 2048,
            "positions": "sinusoidal",
            "pooling": "cls",
            "dropout": 0.1,
            "dtype": "bfloat16",
            "steps": 5000,
            "batch_size": 32,
            "learning_rate": 1.58e-3,
            "b2": 0.98,
            "warmup_steps": 1000,
            "schedule": "rsqrt",
            "weight_decay": 0.1,
            "clip": "none",
            "eval_every": 500,
        },
    },
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
