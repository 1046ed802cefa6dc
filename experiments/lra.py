"""Long Range Arena: trains an encoder with any kernel on one task and tests it.

    python -m experiments.lra --task=listops --kernel=llops

The last line on standard output is one JSON object. Started again, the same command continues where
it was stopped. Measured results: `experiments/results/`.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from experiments import objectives, presets, tasks
from experiments.aot import report_step, topology_mesh
from experiments.common import flags, optimizer
from experiments.common.checkpoint import CheckpointError
from experiments.common.evaluate import at_chance, evaluate
from experiments.common.module import PureModule
from experiments.common.phase import NonFiniteError, Phase
from experiments.common.placement import check_divides, jit_evaluation, make_mesh
from experiments.common.plot import plot_run
from experiments.common.processes import ProcessesError, first_alone, is_first
from experiments.common.processes import start as start_processes
from experiments.common.record import timing, write_result
from experiments.common.train import train
from experiments.lra_settings import Config
from experiments.tasks.base import DataError, Task
from lowrank_attn.models.encoder import Classifier, Encoder, TokenPredictor


def make_encoder(config: Config, task: Task, rngs: nnx.Rngs) -> Encoder:
    """The encoder that the settings describe."""
    qk_dim = config.qk_dim
    if qk_dim is None and config.kernel in ("taylor", "window_linear"):
        qk_dim = 16
    return Encoder(
        len(task.vocabulary),
        task.max_length,
        num_layers=config.num_layers,
        width=config.width,
        num_heads=config.num_heads,
        mlp_width=config.mlp_width,
        kernel=config.kernel,
        options=flags.parse_options("kernel_options", config.kernel_options),
        qk_dim=qk_dim,
        normalize=config.normalize,
        causal=config.causal,
        rule=config.rule,
        embed=config.embed,
        positions=config.positions,
        use_cls=config.pooling == "cls",
        dropout=config.dropout,
        implementation=config.implementation,
        dtype=config.dtype,
        rngs=rngs,
    )


def make_optimizer(config: Config, peak: float, steps: int, model: PureModule):
    """AdamW for one phase; not decayed: gains, positions, gates' biases, the kernel's constants."""
    schedule = optimizer.learning_rate_schedule(
        config.schedule, peak, min(config.warmup_steps, steps // 10), steps
    )
    return optimizer.adamw(
        schedule,
        b2=config.b2,
        weight_decay=config.weight_decay,
        no_decay=lambda name: name.split("/")[-1].rstrip("0123456789") in optimizer.NOT_DECAYED,
        frozen=model.is_constant,
        clip=config.clip,
        clip_at=config.clip_at,
    )


def make_phases(config: Config, task: Task) -> tuple[list[Phase], objectives.Objective]:
    """The phases of the run, and the objective that the test uses.

    Raises:
        ValueError: if settings for grey levels meet a task whose tokens are none.
    """
    levels = config.embed == "levels" or (config.pretrain_steps and config.pretrain_loss == "l1")
    if levels and task.vocabulary != (*map(str, range(len(task.vocabulary) - 1)), "<mask>"):
        raise ValueError(
            f"embed={config.embed!r}, pretrain_loss={config.pretrain_loss!r} with "
            f"task={config.task!r}, whose tokens are no levels: expected 'table', 'cross_entropy'."
        )
    classifier = PureModule(
        lambda rngs: Classifier(
            make_encoder(config, task, rngs),
            task.num_classes,
            pooling=config.pooling,
            head_width=config.head_width,
            two_towers=task.two_towers,
            pair_head=config.pair_head,
            rngs=rngs,
        )
    )

    def init_classifier(key, previous):
        params = classifier.init(key)
        return params if previous is None else params | {"encoder": previous["encoder"]}

    classification = objectives.classification(classifier.module, config.log_features)
    shared: dict[str, Any] = {
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
    outputs = 1 if config.pretrain_loss == "l1" else len(task.vocabulary)
    predictor = PureModule(
        lambda rngs: TokenPredictor(make_encoder(config, task, rngs), outputs, rngs=rngs)
    )
    prediction = objectives.token_prediction(
        predictor.module,
        config.objective,
        config.mask_ratio,
        task.vocabulary.index("<mask>"),
        config.pretrain_loss,
    )
    peak = config.pretrain_learning_rate or config.learning_rate
    pretraining = Phase(
        name="pretrain",
        steps=config.pretrain_steps,
        init=lambda key, previous: predictor.init(key),
        loss_fn=prediction.loss,
        eval_fn=prediction.evaluate,
        optimizer=make_optimizer(config, peak, config.pretrain_steps, predictor),
        best_metric=objectives.LOSSES[config.pretrain_loss][0],
        best_mode="min" if config.pretrain_loss == "l1" else "max",
        **shared,
    )
    return [pretraining, training], classification


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Refuse a mesh that does not divide what it cuts.

    Raises:
        ValueError: naming the flag, if it does not divide what it cuts, or cuts sequences.
    """
    sizes = {
        "batch_size": (config.batch_size, ("data", "fsdp")),
        "width": (config.width, ("fsdp",)),
        "num_heads": (config.num_heads, ("tensor",)),
        "mlp_width": (config.mlp_width, ("tensor",)),
    }
    check_divides(config.mesh, mesh, sizes)
    if mesh.shape["context"] > 1:
        raise ValueError(
            f"mesh={config.mesh!r} cuts sequences, which encoders read whole: set context=1."
        )


def compile_ahead(config: Config) -> dict[str, Any]:
    """What a step of training on labels needs on the TPUs of `--aot`."""
    mesh = topology_mesh(config.aot or "", config.mesh)
    check_mesh(config, mesh)
    options = flags.parse_options("task_options", config.task_options)
    task = tasks.load(config.task, config.data_dir, config.cache_dir, options)
    phases, _ = make_phases(dataclasses.replace(config, pretrain_steps=0), task)
    return report_step(phases[-1], mesh, config.aot or "")


def run(config: Config) -> dict[str, Any] | None:
    """Load the data, train, test, and leave everything in the run's folder.

    Returns:
        The summary that `main` prints, in process 0.
    """
    mesh = make_mesh(config.mesh)
    check_mesh(config, mesh)
    options = flags.parse_options("task_options", config.task_options)
    with first_alone("load"):
        task = tasks.load(config.task, config.data_dir, config.cache_dir, options)
    name = f"{config.task}-{config.kernel}-{config.preset}-{flags.config_hash(config)}"
    run_dir = pathlib.Path(config.run_dir or pathlib.Path("runs") / name)
    phases, classification = make_phases(config, task)
    described = flags.to_dict(config, changes_result=True) | {"data": task.fingerprint}
    outcome = train(phases, config, run_dir, described, task.vocabulary)
    tested = evaluate(
        jit_evaluation(classification.evaluate, mesh),
        outcome.params,
        task.splits["test"],
        config.batch_size,
        jax.random.key(0),
        mesh=mesh,
    )
    assert tested is not None
    if not is_first():
        return None
    plot_run(run_dir)
    reference = task.reference_lines()
    chance = reference["majority class"]
    no_better = at_chance(tested["accuracy"], chance, len(task.splits["test"]))
    metrics: dict[str, Any] = {
        "test_accuracy": tested["accuracy"],
        "test_loss": tested["loss"],
        "validation_accuracy": outcome.best["accuracy"],
        "at_chance": no_better,
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
    flag = f" AT CHANCE: no better than the majority class, {chance:.1%}" if no_better else ""
    print(f"test accuracy: {tested['accuracy']:.1%}{flag}; curves: {run_dir}", file=sys.stderr)
    return {
        "task": config.task,
        "kernel": config.kernel,
        "preset": config.preset,
        "steps": config.steps,
        "seconds": round(outcome.seconds, 1),
        "test_accuracy": tested["accuracy"],
        "at_chance": no_better,
        "run_dir": str(run_dir),
    }


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings and data end with exit code 2 and one message."""

    def settings_of_preset(config):
        if config.aot is None:
            start_processes(config)
        backend = "tpu" if config.aot else jax.default_backend()
        name, settings = presets.resolve(config.preset, config.task, config.kernel, backend)
        if config.preset == "auto":
            print(
                f"preset: {name}, for this {backend}; another with --preset=NAME "
                f"({', '.join(presets.PRESETS)}), its settings with --print-config",
                file=sys.stderr,
            )
        return {**settings, "preset": name}

    try:
        config = flags.parse(Config, argv, settings_of_preset)
        summary = compile_ahead(config) if config.aot else run(config)
    except (DataError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (CheckpointError, NonFiniteError, ProcessesError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    if summary is not None:
        print(json.dumps(summary))


if __name__ == "__main__":
    main(sys.argv)
