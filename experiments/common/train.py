"""The training loop: phases of steps, each resumable with exactly the batches it would have seen.

Several processes run it together; see `experiments.common.processes`. Process 0 writes all files
but checkpoints, which they write together, and a signal to one of them stops all at the same step.

A run is a list of phases, such as `pretrain` and `finetune`. The same command started again in the
same folder continues after the last checkpoint, or says that the run is complete; see
`experiments.common.log` for the files that a run leaves.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from experiments.common.checkpoint import CheckpointError, describe, open_run
from experiments.common.phase import LoopSettings, Phase
from experiments.common.phase_run import PhaseRun
from experiments.common.placement import make_mesh
from experiments.common.processes import first_alone, is_first, largest
from experiments.common.stop import StopSignals


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
    names = [phase.name for phase in phases]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"phases need different names, at least one; got {names}.")
    mesh = make_mesh(settings.mesh)
    run_dir = pathlib.Path(run_dir).absolute()
    description = describe(config, vocabulary)
    with first_alone("open_run"):
        shared = is_first() or settings.checkpoint_dir or (run_dir / "run.json").exists()
        if not shared:
            raise CheckpointError(
                f"run_dir={run_dir} of process {jax.process_index()} is not that of process 0: all "
                "processes need one folder, on storage that they share, or --checkpoint_dir there."
            )
        started = open_run(run_dir, description)
    params, seconds = None, 0.0
    with StopSignals() as stop:
        for number, phase in enumerate(phases):
            key = jax.random.fold_in(jax.random.key(settings.seed), number)
            run = PhaseRun(phase, settings, run_dir, description, key, params, mesh)
            try:
                run.run(stop)
                params = run.best_params()
            finally:
                run.close()
            seconds += run.seconds()
        stop.adopt(*largest(stop.signum))
        if stop.requested:
            stop.exit("after the last step")
    best, last = run.evaluations[run.best_step()], run.evaluations[phase.steps]
    return Outcome(params, run.best_step(), best, last, seconds, started)
