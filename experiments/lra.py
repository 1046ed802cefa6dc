"""Long Range Arena: trains an encoder with any kernel on one task and tests it.

    python -m experiments.lra --task=listops --kernel=llops

The last line on standard output is one JSON object. Started again, the same command continues where
it was stopped. Measured results: `experiments/results/`.
"""

import ast
import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
from flax import nnx

from experiments import objectives, presets
from experiments.common import flags, optimizer
from experiments.common.checkpoint import CheckpointError
from experiments.common.evaluate import evaluate
from experiments.common.flags import setting
from experiments.common.module import PureModule
from experiments.common.phase import LoopSettings, NonFiniteError, Phase
from experiments.common.plot import plot_run
from experiments.common.record import timing, write_result
from experiments.common.train import train
from experiments.tasks import TASKS
from experiments.tasks.base import DataError, Task
from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.layers import ATTENTION
from lowrank_attn.models.encoder import (
    POOLINGS,
    POSITIONS,
    Classifier,
    Encoder,
    TokenPredictor,
)
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
    cache_dir: str = setting("data", "folder for prepared data", changes_result=False)
    run_dir: str | None = setting(
        None, "folder of this run; default: under runs/, named by the settings",
        changes_result=False,
    )  # fmt: skip

    num_layers: int = setting(2, "blocks", group="model")
    width: int = setting(64, "size of the residual stream, E", group="model")
    num_heads: int = setting(2, "heads, H", group="model")
    qk_dim: int | None = setting(
        None, "head size of queries and keys, D; default: 16 for taylor, else E / H", group="model"
    )
    mlp_width: int = setting(128, "hidden size of the MLPs", group="model")
    head_width: int | None = setting(
        None, "hidden size of the classifier; default: linear", group="model"
    )
    kernel_options: str = setting(
        "", "of the kernel, such as num_factors=2,num_features=128", group="model"
    )
    normalize: str | None = setting(
        None, "normaliser; default: the safe one of the kernel", group="model", choices=NORMALIZERS
    )
    causal: bool = setting(False, "whether tokens see earlier ones only", group="model")
    positions: str = setting("learned", "kind of positions", group="model", choices=POSITIONS)
    pooling: str = setting("mean", "over tokens", group="model", choices=POOLINGS)
    dropout: float = setting(0.0, "rate", group="model")
    dtype: str = setting(
        "float32", "of the computation", group="model", choices=("float32", "bfloat16")
    )
    implementation: str | None = setting(
        None, "of attention; default: by platform", group="model", choices=tuple(IMPLEMENTATIONS)
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
    pretrain_learning_rate: float | None = setting(
        None, "highest; default: learning_rate", group="pretraining"
    )

    def __post_init__(self) -> None:
        """Check what can be checked without data.

        Raises:
            ValueError: naming the setting.
        """
        parse_options(self.kernel_options)
        for name in ("steps", "batch_size", "num_layers", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1.")
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


def parse_options(text: str) -> dict[str, Any]:
    """Turn `name=value,name=value` into keyword arguments; values are Python literals or words.

    Raises:
        ValueError: if a part has no `=`.
    """
    options = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"kernel_options={text!r}: {part!r} is not of the form name=value.")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def make_encoder(config: Config, task: Task, rngs: nnx.Rngs) -> Encoder:
    """The encoder that the settings describe."""
    qk_dim = config.qk_dim
    if qk_dim is None and config.kernel == "taylor":
        qk_dim = 16
    return Encoder(
        len(task.vocabulary),
        task.max_length,
        num_layers=config.num_layers,
        width=config.width,
        num_heads=config.num_heads,
        mlp_width=config.mlp_width,
        kernel=config.kernel,
        options=parse_options(config.kernel_options),
        qk_dim=qk_dim,
        normalize=config.normalize,
        causal=config.causal,
        positions=config.positions,
        use_cls=config.pooling == "cls",
        dropout=config.dropout,
        implementation=config.implementation,
        dtype=config.dtype,
        rngs=rngs,
    )


def make_optimizer(config: Config, peak: float, steps: int, model: PureModule):
    """AdamW for one phase; gains, positions and the kernel's constants are not decayed."""
    schedule = optimizer.learning_rate_schedule(
        config.schedule, peak, min(config.warmup_steps, steps // 10), steps
    )
    return optimizer.adamw(
        schedule,
        b2=config.b2,
        weight_decay=config.weight_decay,
        no_decay=lambda name: name.split("/")[-1] in ("b", "gain", "lambda", "position", "cls"),
        frozen=model.is_constant,
        clip=config.clip,
        clip_at=config.clip_at,
    )


def make_phases(config: Config, task: Task) -> tuple[list[Phase], objectives.Objective]:
    """The phases of the run, and the objective that the test uses."""
    classifier = PureModule(
        lambda rngs: Classifier(
            make_encoder(config, task, rngs),
            task.num_classes,
            pooling=config.pooling,
            head_width=config.head_width,
            two_towers=task.two_towers,
            rngs=rngs,
        )
    )

    def init_classifier(key, previous):
        params = classifier.init(key)
        return params if previous is None else params | {"encoder": previous["encoder"]}

    classification = objectives.classification(classifier.module)
    shared = {
        "batch_size": config.batch_size,
        "source": task.splits["train"],
        "eval_source": task.splits["validation"],
    }
    training = Phase(
        name="train",
        steps=config.steps,
        init=init_classifier,
        loss_fn=classification.loss,
        eval_fn=classification.evaluate,
        optimizer=make_optimizer(config, config.learning_rate, config.steps, classifier),
        **shared,
    )
    if not config.pretrain_steps:
        return [training], classification
    vocabulary = len(task.vocabulary)
    predictor = PureModule(
        lambda rngs: TokenPredictor(make_encoder(config, task, rngs), vocabulary, rngs=rngs)
    )
    prediction = objectives.token_prediction(
        predictor.module, config.objective, config.mask_ratio, task.vocabulary.index("<mask>")
    )
    peak = config.pretrain_learning_rate or config.learning_rate
    pretraining = Phase(
        name="pretrain",
        steps=config.pretrain_steps,
        init=lambda key, previous: predictor.init(key),
        loss_fn=prediction.loss,
        eval_fn=prediction.evaluate,
        optimizer=make_optimizer(config, peak, config.pretrain_steps, predictor),
        **shared,
    )
    return [pretraining, training], classification


def run(config: Config) -> dict[str, Any]:
    """Load the data, train, test, and leave everything in the run's folder.

    Returns:
        The summary that `main` prints.
    """
    task = TASKS[config.task](config.data_dir, config.cache_dir)
    name = f"{config.task}-{config.kernel}-{config.preset}-{flags.config_hash(config)}"
    run_dir = pathlib.Path(config.run_dir or pathlib.Path("runs") / name)
    phases, classification = make_phases(config, task)
    described = flags.to_dict(config, changes_result=True) | {"data": task.fingerprint}
    outcome = train(phases, config, run_dir, described, task.vocabulary)
    tested = evaluate(
        jax.jit(classification.evaluate),
        outcome.params,
        task.splits["test"],
        config.batch_size,
        jax.random.key(0),
    )
    assert tested is not None
    plot_run(run_dir)
    reference = task.reference_lines()
    metrics = {
        "test_accuracy": tested["accuracy"],
        "test_loss": tested["loss"],
        "validation_accuracy": outcome.best["accuracy"],
        "best_step": outcome.best_step,
        "reference": reference,
        "data": task.fingerprint,
        "timing": timing(run_dir, "train"),
    }
    write_result(
        run_dir / "result.json",
        config,
        metrics,
        started=outcome.started,
        seconds=outcome.seconds,
    )
    for label, accuracy in reference.items():
        print(f"reference, {label}: {accuracy:.1%}", file=sys.stderr)
    print(f"test accuracy: {tested['accuracy']:.1%}; curves: {run_dir}", file=sys.stderr)
    return {
        "task": config.task,
        "kernel": config.kernel,
        "preset": config.preset,
        "steps": config.steps,
        "seconds": round(outcome.seconds, 1),
        "test_accuracy": tested["accuracy"],
        "run_dir": str(run_dir),
    }


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings and data end with exit code 2 and one message."""

    def settings_of_preset(config):
        name, settings = presets.resolve(config.preset, config.task, jax.default_backend())
        if config.preset == "auto":
            print(
                f"preset: {name}, for this {jax.default_backend()}; another with --preset=NAME "
                f"({', '.join(presets.PRESETS)}), its settings with --print-config",
                file=sys.stderr,
            )
        return {**settings, "preset": name}

    config = flags.parse(Config, argv, settings_of_preset)
    try:
        summary = run(config)
    except (DataError, CheckpointError, NonFiniteError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, (DataError, ValueError)) else 1)
    print(json.dumps(summary))


if __name__ == "__main__":
    main(sys.argv)
