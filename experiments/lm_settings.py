"""The settings of `experiments.lm`, and recipes to start from."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from experiments.common import optimizer
from experiments.common.flags import parse_options, setting
from experiments.common.phase import LoopSettings
from experiments.common.placement import check_divides
from experiments.text_data.shards import TextSettings
from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.models.decoder import REMAT
from lowrank_attn.models.decoder_configs import CONFIGS, DecoderConfig

# `published` is what trained BASED's 360M and 1B models and their baselines for 10 billion tokens,
# from the experiment files of github.com/HazyResearch/based: 20,000 steps of 256 rows of 2,048
# GPT-2 tokens, AdamW (0.9, 0.95), decay 0.1 of all but biases and gains, rates from 8e-4 down to
# 8e-5 along a cosine after 200 steps of warm-up, gradients clipped to a norm of 1.
# BASED does not part the documents of a row, as is done here.
# `continued` is ours, the LLoPS paper gives none: it begins at the rate where training had ended.
# `quick` is a first run on a CPU.
RECIPES: dict[str, dict[str, Any]] = {
    "published": {
        "steps": 20_000,
        "batch_size": 256,
        "accumulate": 16,
        "length": 2048,
        "learning_rate": 8e-4,
        "last_rate": 0.1,
        "dtype": "bfloat16",
    },
    "continued": {
        "steps": 2000,
        "batch_size": 256,
        "accumulate": 16,
        "length": 2048,
        "learning_rate": 8e-5,
        "last_rate": 0.1,
        "warmup_steps": 20,
        "dtype": "bfloat16",
        "eval_every": 200,
    },
    "quick": {
        "steps": 300,
        "batch_size": 8,
        "length": 256,
        "learning_rate": 1e-3,
        "warmup_steps": 30,
        "eval_every": 100,
        "validation_rows": 64,
    },
}


@dataclasses.dataclass(frozen=True)
class Config(LoopSettings, TextSettings):
    """Train a language model on a folder of text, from scratch or from a checkpoint."""

    model: str = setting("based-tiny", "shape of a new model", choices=tuple(CONFIGS))
    checkpoint: str | None = setting(None, "folder of a model to go on from; --model is ignored")
    kernel: str | None = setting(
        None, "of linear layers; llops in a checkpoint begins as BASED's; default: the model's",
        choices=tuple(FEATURE_MAPS),
    )  # fmt: skip
    kernel_options: str = setting("", "of that kernel, such as num_factors=4,num_features=256")
    recipe: str = setting("auto", "settings to start from", choices=("auto", *RECIPES))
    run_dir: str | None = setting(
        None, "folder of this run; default: under runs/, named by the settings",
        changes_result=False,
    )  # fmt: skip

    length: int = setting(2048, "tokens of a row, T", group="data")
    validation_rows: int = setting(1000, "at most, for an evaluation", group="data")

    dtype: str = setting(
        "float32", "of the computation", group="model", choices=("float32", "bfloat16")
    )
    remat: str = setting(
        "none", "what of a block is computed again for its gradient", group="model",
        choices=tuple(REMAT),
    )  # fmt: skip

    steps: int = setting(20_000, "of training", group="optimizer")
    batch_size: int = setting(256, "rows", group="optimizer")
    accumulate: int = setting(1, "parts of a batch, one after another", group="optimizer")
    learning_rate: float = setting(8e-4, "highest", group="optimizer")
    last_rate: float = setting(0.1, "rate at the end, of the highest", group="optimizer")
    schedule: str = setting(
        "cosine", "of the rate after warm-up", group="optimizer", choices=optimizer.SCHEDULES
    )
    warmup_steps: int = setting(200, "at most a tenth of the steps is taken", group="optimizer")
    b2: float = setting(0.95, "decay of the second moment", group="optimizer")
    weight_decay: float = setting(0.1, "of matrices", group="optimizer")
    clip_at: float = setting(1.0, "norm of gradients", group="optimizer")

    def __post_init__(self) -> None:
        """Check what can be checked without data.

        Raises:
            ValueError: naming the setting.
        """
        LoopSettings.__post_init__(self)
        if self.aot is None:
            TextSettings.__post_init__(self)
        for name in ("length", "validation_rows", "steps", "batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1.")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate}, expected a divisor of batch_size={self.batch_size}."
            )
        if parse_options("kernel_options", self.kernel_options) and self.kernel is None:
            raise ValueError(f"kernel_options={self.kernel_options!r} without --kernel.")
        if self.checkpoint and self.kernel not in (None, "llops"):
            raise ValueError(
                f"kernel={self.kernel!r} with --checkpoint, expected llops, which begins as the "
                "same function; another kernel would need a model trained with it."
            )


def choose_recipe(config: Config, backend: str) -> tuple[str, dict[str, Any]]:
    """The name of a run's recipe and its settings."""
    name = config.recipe
    if name == "auto":
        on_device = "continued" if config.checkpoint else "published"
        name = "quick" if backend == "cpu" else on_device
    return name, RECIPES[name]


def check_mesh(config: Config, decoder: DecoderConfig, mesh: Mesh) -> None:
    """Refuse a mesh that does not divide what it cuts.

    Raises:
        ValueError: naming `--mesh` and what it does not divide, or layers that need whole
            sequences.
    """
    rows = ("data", "fsdp")
    heads = {
        f"num_heads of {name} layers": (decoder.mixers[name]["num_heads"], ("tensor",))
        for name in dict.fromkeys(decoder.layers)
        if "num_heads" in decoder.mixers.get(name, {})
    }
    check_divides(
        config.mesh,
        mesh,
        {
            "batch_size": (config.batch_size, rows),
            "batch_size / accumulate": (config.batch_size // config.accumulate, rows),
            "length": (config.length, ("context",)),
            "width": (decoder.width, ("fsdp",)),
            "mlp_width": (decoder.mlp_width, ("tensor",)),
            **heads,
        },
    )
    whole = {"softmax", "mamba"} & set(decoder.layers)
    if mesh.shape["context"] > 1 and whole:
        raise ValueError(
            f"mesh={config.mesh!r} cuts sequences, and {' and '.join(sorted(whole))} layers read "
            "them whole: set context=1 and cut the batch (data, fsdp) or the heads (tensor), or "
            "take a model of linear, sliding_window and short_conv layers, such as based-tiny."
        )
