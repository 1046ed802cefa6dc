"""The training loop: phases of steps, each resumable with exactly the batches it would have seen.

A run is a list of phases, such as `pretrain` and `finetune`. The same command started again in the
same folder continues after the last checkpoint, or says that the run is complete; see
`experiments.common.log` for the files that a run leaves.
"""

import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.common.checkpoint import (
    CheckpointError,
    Checkpoints,
    check_description,
    describe,
    open_run,
)
from experiments.common.data import Source, train_iterator
from experiments.common.evaluate import EvalFn, data_mesh, evaluate, place, replicated
from experiments.common.flags import setting
from experiments.common.log import Clock, RunLog
from experiments.common.optimizer import leaf_names
from experiments.common.stop import StopSignals


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """Settings of the loop; an experiment's settings inherit from them."""

    seed: int = setting(0, "of parameters, order of examples and noise", group="loop")
    eval_every: int = setting(1000, "steps between evaluations", group="loop")
    steps_per_dispatch: int = setting(8, "at most so many steps per call of a device", group="loop")
    log_every: int = setting(10, "steps between rows", group="loop", changes_result=False)
    checkpoint_every: int = setting(
        1000, "steps between checkpoints", group="loop", changes_result=False
    )
    checkpoint_seconds: float = setting(
        300.0, "seconds between checkpoints", group="loop", changes_result=False
    )


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run with its own objective.

    Attributes:
        name: part of the names of files.
        steps: number of optimiser steps.
        batch_size: B; split over the local devices where it divides evenly.
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


class TrainState(NamedTuple):
    """What a step changes: parameters, the optimiser's state, steps done (int32)."""

    params: Any
    opt_state: Any
    step: jax.Array


class Outcome(NamedTuple):
    """A finished phase.

    Attributes:
        params: the parameters of the best evaluation (the earliest of equals).
        best_step: its step.
        best: its metrics.
        last: the metrics after the last step.
        seconds: spent in the phases so far, over all processes of the run.
        started: when the run was first started, in seconds since the epoch.
    """

    params: Any
    best_step: int
    best: dict[str, float]
    last: dict[str, float]
    seconds: float
    started: float


class NonFiniteError(RuntimeError):
    """A loss, a parameter or a metric became infinite or not a number."""


def train(
    phases: Sequence[Phase],
    settings: LoopSettings,
    run_dir: str | pathlib.Path,
    config: Mapping[str, Any],
    vocabulary: Any = None,
) -> Outcome:
    """Run all phases, or what is left of them, and return the outcome of the last.

    Args:
        phases: the parts of the run, in order, with different names.
        settings: of the loop.
        run_dir: the folder that holds everything about this run.
        config: all settings that change the result, for JSON
            (`flags.to_dict(config, changes_result=True)`); the folder of a run with others is
            refused.
        vocabulary: whatever gives token numbers their meaning, for JSON; checked likewise.

    Raises:
        CheckpointError: if the folder or its newest checkpoint does not fit this run or is damaged.
        NonFiniteError: if training diverges; the last checkpoint before that is kept.
        SystemExit: with 143 after SIGTERM and 130 after SIGINT, when everything has been saved.
    """
    raise NotImplementedError
