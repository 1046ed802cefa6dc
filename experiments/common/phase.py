"""What a phase of training is: its examples, its objective, and the settings of the loop."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from experiments.common.data import Source
from experiments.common.evaluate import EvalFn
from experiments.common.flags import setting
from experiments.common.processes import ProcessSettings


@dataclasses.dataclass(frozen=True)
class LoopSettings(ProcessSettings):
    """Settings of the loop; an experiment's settings inherit from them."""

    seed: int = setting(0, "of parameters, order of examples and noise", group="loop")
    eval_every: int = setting(1000, "steps between evaluations", group="loop")
    steps_per_dispatch: int = setting(
        8,
        "at most so many steps per dispatch; a divisor of steps and eval_every is taken",
        group="loop",
    )
    mesh: str = setting(
        "", "devices that cut the batch (data), it and parameters (fsdp), heads (tensor) and "
        "sequences (context), such as data=2,fsdp=2; default: data over all",
        group="loop", changes_result=False,
    )  # fmt: skip
    log_every: int = setting(10, "steps between rows", group="loop", changes_result=False)
    checkpoint_every: int = setting(
        1000, "steps between checkpoints", group="loop", changes_result=False
    )
    checkpoint_seconds: float = setting(
        300.0, "seconds between checkpoints", group="loop", changes_result=False
    )
    checkpoint_dir: str | None = setting(
        None, "folder or bucket (gs://...) of the checkpoints of this run, which all processes "
        "share; default: in the folder of the run, which is then what they share",
        group="loop", changes_result=False,
    )  # fmt: skip
    aot: str | None = setting(
        None, "TPU slice such as v5e:4x4: compile a step for it, report on it, and end",
        group="loop", changes_result=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Refuse counts below 1; a subclass with checks of its own calls this too."""
        ProcessSettings.__post_init__(self)
        for name in ("eval_every", "steps_per_dispatch", "log_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run with its own objective.

    Attributes:
        name: part of the names of files.
        steps: number of optimiser steps.
        batch_size: B; cut over the devices where it divides evenly.
        source: the training examples.
        init: `init(key, previous)` gives the float32 parameters; `previous` are the best parameters
            of the phase before, None in the first.
        loss_fn: `loss_fn(params, batch, key)` gives the loss, a scalar, and a dict of more scalars
            to log (always the same names); `batch` holds arrays [B, ...].
        optimizer: see `experiments.common.optimizer`.
        eval_source: the examples of evaluations.
        eval_fn: see `experiments.common.evaluate.evaluate`; every evaluation uses the same keys.
        best_metric: the metric of `eval_fn` by which the best parameters are chosen.
        best_mode: `max` or `min`.
        after_eval: called with the parameters and the step after every evaluation, to show more of
            them; it must not change anything that the run depends on.
    """

    name: str
    steps: int
    batch_size: int
    source: Source
    init: Callable[[jax.Array, Any], Any]
    loss_fn: Callable[[Any, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, Mapping]]
    optimizer: optax.GradientTransformation
    eval_source: Source
    eval_fn: EvalFn
    best_metric: str = "accuracy"
    best_mode: str = "max"
    after_eval: Callable[[Any, int], None] = lambda params, step: None

    def __post_init__(self) -> None:
        """Refuse what would fail only after the first steps."""
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                where = f"{name}={getattr(self, name)} of phase {self.name!r}"
                raise ValueError(f"{where} must be at least 1.")
        if self.best_mode not in ("max", "min"):
            raise ValueError(f"best_mode={self.best_mode!r} is unknown; known: max, min.")


class TrainState(NamedTuple):
    """What a step changes: parameters, the optimiser's state, steps done (int32)."""

    params: Any
    opt_state: Any
    step: jax.Array


class NonFiniteError(RuntimeError):
    """A loss, a parameter or a metric became infinite or not a number."""
