"""One phase of training in one process: dispatches, logs, evaluations and checkpoints."""

import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.common.checkpoint import Checkpoints, check_description
from experiments.common.data import batch_of_each_shape, train_iterator
from experiments.common.evaluate import evaluate
from experiments.common.log import Clock, NoLog, RunLog
from experiments.common.optimizer import leaf_names
from experiments.common.phase import LoopSettings, NonFiniteError, Phase, TrainState
from experiments.common.placement import (
    abstract,
    batch_shardings,
    jit_evaluation,
    own_rows,
    place,
)
from experiments.common.processes import is_first, largest, say
from experiments.common.stop import StopSignals
from experiments.common.train_step import jit_steps, new_state
from lowrank_attn.parallel.mesh import row_axes


class PhaseRun:
    """One phase in one process: its state, its files, and what it has done so far."""

    def __init__(
        self,
        phase: Phase,
        settings: LoopSettings,
        run_dir: pathlib.Path,
        description: Mapping[str, Any],
        key: jax.Array,
        previous: Any,
        mesh: Mesh,
    ):
        """Make the first state or restore the newest, and open the logs there."""
        self.phase, self.settings, self.description = phase, settings, description
        self.mesh = mesh
        if not row_axes(mesh, phase.batch_size):
            say(
                f"{phase.name}: batch_size={phase.batch_size} does not divide evenly over "
                f"{mesh.size} devices, so each of them computes all of it"
            )
        init_key, self.train_key, self.eval_key, order_key = jax.random.split(key, 4)
        params = phase.init(init_key, previous)
        _check_float32(params)
        self.state = new_state(phase, params, mesh)
        self.step, self.earlier_seconds = 0, 0.0
        self.evaluations: dict[int, dict[str, float]] = {}
        # compiled programs by the shape of tokens
        self.train_steps: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self.eval_steps: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self.eval_every = min(settings.eval_every, phase.steps)
        self.k = _common_divisor(settings.steps_per_dispatch, phase.steps, self.eval_every)
        self.batches = train_iterator(
            phase.source,
            phase.batch_size,
            self.k,
            int(jax.random.bits(order_key)),
            own_rows(phase.batch_size, mesh),
        )
        checkpoints = settings.checkpoint_dir or str(run_dir / "checkpoints")
        self.checkpoints = Checkpoints(f"{checkpoints}/{phase.name}")
        self.saved_step = self.checkpoints.latest_step()
        if self.saved_step is None:
            say(f"{phase.name}: no checkpoint yet, starting at step 0 of {phase.steps}")
        else:
            self._restore(self.saved_step)
        last_evaluated = max(self.evaluations, default=0)
        make_log = RunLog if is_first() else NoLog
        self.log = make_log(run_dir, phase.name, self.step, phase.steps, last_evaluated)
        self.clock = Clock()
        self.began = self.saved_at = time.monotonic()
        self.pending: tuple[int, int, dict[str, jax.Array]] | None = None

    def _restore(self, step: int) -> None:
        data, meta = self.checkpoints.read(step)
        check_description(meta, self.description, self.checkpoints.folder / str(step))
        self.state = self.checkpoints.restore(step, self.state)
        self.batches.set_state(data)
        self.evaluations = dict(meta["evaluations"])
        self.step, self.earlier_seconds = step, meta["seconds"]
        how = "already complete" if step == self.phase.steps else "continuing"
        say(f"{self.phase.name}: {how}, step {step} of {self.phase.steps}")

    def run(self, stop: StopSignals) -> None:
        """Do what is left of the steps and evaluations, saving on the way."""
        if self.phase.steps in self.evaluations:
            return
        with self.clock.paused():
            self._compile_eval(stop)
            if self.step < self.phase.steps:
                self._compile_train(stop)
        while True:
            evaluated = self._evaluation_is_due() and self._evaluate(stop)
            signum, due = largest(stop.signum, self._checkpoint_is_due())
            stop.adopt(signum)
            if evaluated or signum or due:
                with self.clock.paused():
                    self._save()
            if signum:
                self.checkpoints.wait()
                stop.exit(self._where())
            if self.step == self.phase.steps:
                return
            self._dispatch()

    def _compile_train(self, stop: StopSignals) -> None:
        """Compile K steps for every shape of batches, before any of them is needed."""
        phase = self.phase
        steps = jit_steps(phase, self.mesh, self.train_key, self.state)
        for batches in batch_of_each_shape(phase.source, (self.k, phase.batch_size)):
            placed = abstract(batches, batch_shardings(batches, self.mesh, axis=1))
            train = steps.lower(self.state, placed)
            for name, metric in train.out_info[1].items():
                if metric.shape != (self.k,):
                    raise ValueError(
                        f"loss_fn of phase {phase.name!r}: {name} must be a scalar, "
                        f"got shape {metric.shape[1:]}."
                    )
            compiled = stop.compile(train, self._where())
            self.train_steps[batches["tokens"].shape] = compiled

    def _compile_eval(self, stop: StopSignals) -> None:
        phase = self.phase
        for batch in batch_of_each_shape(phase.eval_source, (phase.batch_size,)):
            batch["weight"] = np.ones(phase.batch_size, np.float32)
            placed = abstract(batch, batch_shardings(batch, self.mesh))
            evaluation = jit_evaluation(phase.eval_fn, self.mesh).lower(
                self.state.params, placed, self.eval_key
            )
            if phase.best_metric not in evaluation.out_info:
                raise ValueError(
                    f"best_metric={phase.best_metric!r} of phase {phase.name!r} is not a metric of "
                    f"its eval_fn; known: {', '.join(evaluation.out_info)}."
                )
            self.eval_steps[batch["tokens"].shape] = stop.compile(evaluation, self._where())

    def _dispatch(self) -> None:
        """Hand K steps to the devices, then look at the results of the K steps before."""
        with self.clock.waiting():
            batches = next(self.batches)
        placed = place(batches, self.phase.batch_size, self.mesh, axis=1)
        was_idle = self.pending is None or self.pending[-1]["loss"].is_ready()  # type: ignore[attr-defined]
        self.state, metrics = self.train_steps[placed["tokens"].shape](self.state, placed)
        self.clock.enqueued(was_idle)
        self._fetch()
        if not metrics["loss"].is_ready():
            self.clock.seen_busy()
        share = batches["tokens"].shape[1] / self.phase.batch_size  # of this process
        self.pending = (self.step, round(_count_tokens(batches) / share), metrics)
        self.step += self.k

    def _fetch(self) -> None:
        """Log the metrics of the last dispatch; waits for it."""
        if self.pending is None:
            return
        before, tokens, metrics = self.pending
        self.pending = None
        metrics = jax.device_get(metrics)
        loss = metrics.pop("loss")
        self.clock.computed(tokens)
        logged = False
        for i in range(self.k):
            step = before + i + 1
            if not np.isfinite(loss[i]):
                self._diverged(f"the loss of step {step} is {loss[i]}")
            if step % self.settings.log_every == 0 or step == self.phase.steps:
                row = {"loss": loss[i]} | {name: metric[i] for name, metric in metrics.items()}
                self.log.write("train", step, row)
                logged = True
        if logged:
            self.log.write("timing", before + self.k, self.clock.read())
        self.log.progress(before + self.k)

    def _evaluation_is_due(self) -> bool:
        due = self.step % self.eval_every == 0 or self.step == self.phase.steps
        return due and self.step > 0 and self.step not in self.evaluations

    def _evaluate(self, stop: StopSignals) -> bool:
        """Whether the evaluation ran to its end."""
        self._fetch()
        with self.clock.paused():
            metrics = evaluate(
                lambda params, batch, key: self.eval_steps[batch["tokens"].shape](
                    params, batch, key
                ),
                self.state.params,
                self.phase.eval_source,
                self.phase.batch_size,
                self.eval_key,
                lambda: stop.requested and jax.process_count() == 1,
                self.mesh,
            )
        if metrics is None:
            return False
        if not np.isfinite(metrics[self.phase.best_metric]):
            self._diverged(f"the evaluation after step {self.step} gives {metrics}")
        self.log.write("eval", self.step, metrics)
        self.evaluations[self.step] = metrics
        with self.clock.paused():
            self.phase.after_eval(self.state.params, self.step)
        return True

    def _checkpoint_is_due(self) -> bool:
        steps = self.step - (self.saved_step or 0)
        seconds = time.monotonic() - self.saved_at
        return steps >= self.settings.checkpoint_every or (
            steps > 0 and seconds >= self.settings.checkpoint_seconds
        )

    def _save(self) -> None:
        if self.step == self.saved_step:
            return
        self._fetch()
        if not _all_finite(self.state):
            self._diverged(f"the parameters or moments after step {self.step} are not finite")
        self.log.sync()
        meta = {
            **self.description,
            "evaluations": list(self.evaluations.items()),
            "seconds": self.seconds(),
        }
        best = self.best_step() if self.evaluations else None
        self.checkpoints.save(self.step, self.state, self.batches.get_state(), meta, best)
        self.saved_step, self.saved_at = self.step, time.monotonic()

    def best_step(self) -> int:
        """The step of the best evaluation, the earliest of equals."""
        sign = {"max": 1, "min": -1}[self.phase.best_mode]
        scores = {
            step: sign * metrics[self.phase.best_metric]
            for step, metrics in self.evaluations.items()
        }
        return max(scores, key=lambda step: (scores[step], -step))

    def best_params(self) -> Any:
        """The parameters of the best evaluation."""
        if self.best_step() == self.step:
            return self.state.params
        return self.checkpoints.restore(self.best_step(), self.state).params

    def seconds(self) -> float:
        """Time spent in this phase, over all processes of the run."""
        return self.earlier_seconds + time.monotonic() - self.began

    def close(self) -> None:
        """Finish what is being written, and stop the threads."""
        self.batches.close()
        self.checkpoints.close()
        self.log.close()

    def _where(self) -> str:
        return f"in phase {self.phase.name!r} after step {self.step} of {self.phase.steps}"

    def _diverged(self, what: str) -> NoReturn:
        kept = self.saved_step
        last = "there is no checkpoint" if kept is None else f"the last checkpoint is step {kept}"
        raise NonFiniteError(
            f"phase {self.phase.name!r}: {what}. This state was not saved; {last}."
        )


@jax.jit
def _all_finite(state: TrainState) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in leaves]))


def _check_float32(params: Any) -> None:
    for name, leaf in zip(leaf_names(params), jax.tree.leaves(params)):
        if leaf.dtype != jnp.float32:
            raise ValueError(f"parameter {name} must be float32, got {leaf.dtype}.")


def _common_divisor(limit: int, *numbers: int) -> int:
    """The largest common divisor that does not exceed the limit."""
    common = math.gcd(*numbers)
    return max(k for k in range(1, min(limit, common) + 1) if common % k == 0)


def _count_tokens(batch: Mapping[str, np.ndarray]) -> int:
    """The tokens of a batch, without padding where the batch says how much there is."""
    return int(batch["length"].sum()) if "length" in batch else batch["tokens"].size
