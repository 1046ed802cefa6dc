"""The settings of `experiments.lra`."""

import dataclasses

from experiments import objectives, presets
from experiments.common import optimizer
from experiments.common.flags import parse_options, setting
from experiments.common.phase import LoopSettings
from experiments.common.processes import ProcessSettings
from experiments.tasks import TASKS
from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.layers import ATTENTION, GATINGS
from lowrank_attn.models.encoder import EMBEDDINGS, POOLINGS, POSITIONS
from lowrank_attn.models.heads import PAIR_HEADS
from lowrank_attn.ops import IMPLEMENTATIONS, NORMALIZERS


@dataclasses.dataclass(frozen=True)
class Config(LoopSettings):
    """Train and test an encoder on one task of Long Range Arena."""

    task: str = setting("listops", "what to learn", choices=tuple(TASKS))
    kernel: str = setting("llops", "what attends", choices=(*FEATURE_MAPS, *ATTENTION))
    preset: str = setting("auto", "settings to start from", choices=("auto", *presets.PRESETS))
    data_dir: str | None = setting(
        None, "folder of the published files; default: generated data", changes_result=False
    )
    task_options: str = setting(
        "", "of the task, such as validation=test for text, source=manpages for retrieval"
    )
    cache_dir: str = setting("data", "folder for prepared data", changes_result=False)
    run_dir: str | None = setting(
        None, "folder of this run; default: under runs/, named by the settings",
        changes_result=False,
    )  # fmt: skip

    num_layers: int = setting(2, "blocks", group="model")
    width: int = setting(64, "size of the residual stream, E", group="model")
    num_heads: int = setting(2, "heads, H", group="model")
    qk_dim: int | None = setting(
        None, "head size of queries and keys, D; default: 16 for taylor features, else E / H",
        group="model",
    )  # fmt: skip
    mlp_width: int = setting(128, "hidden size of the MLPs", group="model")
    head_width: int | None = setting(
        None, "hidden size of the classifier; default: linear", group="model"
    )
    pair_head: str = setting(
        "products", "of tasks with two documents", group="model", choices=tuple(PAIR_HEADS)
    )
    kernel_options: str = setting(
        "", "of the kernel, such as num_factors=2,num_features=128", group="model"
    )
    normalize: str | None = setting(
        None, "normaliser; default: the safe one of the kernel", group="model", choices=NORMALIZERS
    )
    causal: bool = setting(False, "whether tokens see earlier ones only", group="model")
    rule: str = setting(
        "additive", "of the state; others need --causal", group="model", choices=tuple(GATINGS)
    )
    embed: str = setting(
        "table", "of tokens; levels: grey levels as numbers", group="model", choices=EMBEDDINGS
    )
    positions: str = setting("learned", "kind of positions", group="model", choices=POSITIONS)
    pooling: str = setting("mean", "over tokens", group="model", choices=POOLINGS)
    dropout: float = setting(0.0, "rate", group="model")
    dtype: str = setting(
        "float32", "of the computation", group="model", choices=("float32", "bfloat16")
    )
    implementation: str | None = setting(
        None, "of attention; default: by platform", group="model", choices=tuple(IMPLEMENTATIONS)
    )
    log_features: bool = setting(
        False, "rank and active features of the keys at evaluations", group="loop"
    )

    steps: int = setting(5000, "of training on labels", group="optimizer")
    batch_size: int = setting(32, "examples", group="optimizer")
    learning_rate: float = setting(1e-3, "highest", group="optimizer")
    schedule: str = setting(
        "cosine", "of the rate after warm-up", group="optimizer", choices=optimizer.SCHEDULES
    )
    warmup_steps: int = setting(500, "at most a tenth of the steps is taken", group="optimizer")
    b2: float = setting(0.999, "decay of the second moment", group="optimizer")
    weight_decay: float = setting(0.01, "of matrices", group="optimizer")
    clip: str = setting("norm", "gradients by", group="optimizer", choices=optimizer.CLIPPINGS)
    clip_at: float = setting(1.0, "norm or value", group="optimizer")

    pretrain_steps: int = setting(0, "of training on inputs alone, first", group="pretraining")
    objective: str = setting(
        "masked", "what is predicted", group="pretraining", choices=objectives.OBJECTIVES
    )
    mask_ratio: float = setting(0.1, "share of tokens that are masked", group="pretraining")
    pretrain_loss: str = setting(
        "cross_entropy", "l1: of grey levels as numbers", group="pretraining",
        choices=tuple(objectives.LOSSES),
    )  # fmt: skip
    pretrain_learning_rate: float | None = setting(
        None, "highest; default: learning_rate", group="pretraining"
    )

    def __post_init__(self) -> None:
        """Check what can be checked without data.

        Raises:
            ValueError: naming the setting.
        """
        ProcessSettings.__post_init__(self)
        for name in ("task_options", "kernel_options"):
            parse_options(name, getattr(self, name))
        for name in ("steps", "batch_size", "num_layers", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1.")
        if self.log_features and self.kernel not in FEATURE_MAPS:
            raise ValueError(
                f"log_features=True with kernel={self.kernel!r}, which has no features; kernels "
                f"that have: {', '.join(FEATURE_MAPS)}."
            )
        if self.rule != "additive" and not self.causal:
            raise ValueError(
                f"rule={self.rule!r} with causal=False: what decays or is overwritten depends on "
                "the order of the tokens, so it needs --causal."
            )
        if self.pretrain_steps < 0:
            raise ValueError(f"pretrain_steps={self.pretrain_steps}, expected 0 or more.")
        if self.pretrain_steps and self.objective == "masked" and not 0 < self.mask_ratio < 1:
            raise ValueError(
                f"mask_ratio={self.mask_ratio} with objective='masked', expected a number between "
                "0 and 1: otherwise there is nothing to learn."
            )
        if self.pretrain_steps and (self.objective == "next_token") != self.causal:
            raise ValueError(
                f"objective={self.objective!r} with causal={self.causal}: next_token needs "
                "--causal, masked needs --nocausal."
            )
