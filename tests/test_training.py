"""The training loop on a toy of two phases: interrupted, damaged, continued.

The file is also the toy's program: `python tests/test_training.py --run_dir=...`.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.common import data, evaluate, flags, log, optimizer, plot, record, train
from experiments.common.checkpoint import CheckpointError, Checkpoints
from experiments.common.phase import NonFiniteError

ROOT = pathlib.Path(__file__).parents[1]
# What depends on the settings alone, and so must not change by an interruption.
CURVES = ("pretrain_train.csv", "pretrain_eval.csv", "finetune_train.csv", "finetune_eval.csv")


@dataclasses.dataclass(frozen=True)
class ToyConfig(train.LoopSettings):
    """A toy experiment."""

    pretrain_steps: int = flags.setting(24, "steps of the first phase")
    finetune_steps: int = flags.setting(40, "steps of the second phase")
    eval_every: int = flags.setting(8, "steps between evaluations")
    log_every: int = flags.setting(1, "steps between rows", changes_result=False)
    steps_per_dispatch: int = flags.setting(4, "steps per dispatch")
    learning_rate: float = flags.setting(1e-2, "peak learning rate")
    width: int = flags.setting(8, "size of the embedding", group="model")
    pool: str = flags.setting("mean", "pooling", group="model", choices=("mean", "max"))
    run_dir: str = flags.setting("", "folder of the run", changes_result=False)
    delay: float = flags.setting(0.0, "seconds per example", changes_result=False)


class ToySource:
    """Rows of 12 tokens below 10; the label is whether there are many large ones."""

    def __init__(self, size, seed, delay=0.0):
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, 10, (size, 12)).astype(np.uint8)
        self.labels = (self.tokens.mean(1) > 4.5).astype(np.int32)
        self.delay = delay

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        time.sleep(self.delay)
        return {"tokens": self.tokens[index], "label": self.labels[index]}


def features(params, tokens, key):
    x = params["embedding"][tokens.astype(jnp.int32)].mean(1)
    return x * jax.random.bernoulli(key, 0.9, x.shape)


def squared_errors(params, batch, key):
    target = batch["tokens"].astype(jnp.float32).mean(1) / 10
    return (features(params, batch["tokens"], key) @ params["out"][:, 0] - target) ** 2


def pretrain_loss(params, batch, key):
    return jnp.mean(squared_errors(params, batch, key)), {}


def pretrain_eval(params, batch, key):
    errors = batch["weight"] * squared_errors(params, batch, key)
    return {"loss": (jnp.sum(errors), jnp.sum(batch["weight"]))}


def finetune_loss(params, batch, key):
    logits = features(params, batch["tokens"], key) @ params["out"] + params["bias"]
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1).mean()
    return loss, {"accuracy": jnp.mean(logits.argmax(1) == batch["label"])}


def finetune_eval(params, batch, key):
    logits = params["embedding"][batch["tokens"].astype(jnp.int32)].mean(1) @ params["out"]
    right = (logits + params["bias"]).argmax(1) == batch["label"]
    return {"accuracy": (jnp.sum(batch["weight"] * right), jnp.sum(batch["weight"]))}


def toy_phases(config):
    def init(key, previous):
        first_key, out_key = jax.random.split(key)
        first = jax.random.normal(first_key, (10, config.width))
        return {
            "embedding": first if previous is None else previous["embedding"],
            "out": 0.1 * jax.random.normal(out_key, (config.width, 2)),
            "bias": jnp.zeros(2),
        }

    def phase(name, steps, loss_fn, eval_fn, metric, mode):
        rate = optimizer.learning_rate_schedule("cosine", config.learning_rate, 4, steps)
        return train.Phase(
            name=name,
            steps=steps,
            batch_size=6,
            source=ToySource(50, 0, config.delay),
            init=init,
            loss_fn=loss_fn,
            optimizer=optimizer.adamw(rate, weight_decay=0.1),
            eval_source=ToySource(20, 1, config.delay),
            eval_fn=eval_fn,
            best_metric=metric,
            best_mode=mode,
        )

    return [
        phase("pretrain", config.pretrain_steps, pretrain_loss, pretrain_eval, "loss", "min"),
        phase("finetune", config.finetune_steps, finetune_loss, finetune_eval, "accuracy", "max"),
    ]


def run_toy(config, run_dir, phases=None, vocabulary=("a", "b")):
    settings = flags.to_dict(config, changes_result=True)
    phases = toy_phases(config) if phases is None else phases
    return train.train(phases, config, run_dir, settings, list(vocabulary))


def main(argv):
    config = flags.parse(ToyConfig, argv)
    done = run_toy(config, config.run_dir)
    print(done.best_step, done.best, done.last)


# Interruptions, in processes of their own


def start_toy(run_dir, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-W", "error", __file__, f"--run_dir={run_dir}", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rows(process, path, rows):
    """Until a CSV file has so many rows."""
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") <= rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finished(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder and the printed result of a run that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return run_dir, finished(start_toy(run_dir))[0]


def assert_same_curves(run_dir, expected_dir):
    for name in CURVES:
        assert (run_dir / name).read_bytes() == (expected_dir / name).read_bytes(), name


@pytest.mark.slow
def test_killed_run_continues_to_the_same_curves(tmp_path, whole_run):
    slow = ("--delay=0.003", "--checkpoint_every=4")
    for name, rows in (("pretrain_train.csv", 14), ("finetune_train.csv", 22)):
        process = start_toy(tmp_path, *slow)
        wait_for_rows(process, tmp_path / name, rows)
        process.kill()
        process.communicate()
        with open(tmp_path / name, "a") as file:
            file.write("23,0.1")  # a row that was cut short
    out, err = finished(start_toy(tmp_path))
    assert "pretrain: already complete" in err and "finetune: continuing, step" in err
    assert out == whole_run[1]
    assert_same_curves(tmp_path, whole_run[0])


@pytest.mark.slow
def test_signals_save_and_exit_with_their_code(tmp_path, whole_run):
    # 20 examples of an evaluation last a second; its start is seen by the row of step 8
    process = start_toy(tmp_path, "--delay=0.05")
    wait_for_rows(process, tmp_path / "pretrain_train.csv", 8)
    process.terminate()
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert "stopped by SIGTERM in phase 'pretrain' after step 8 of 24. To continue: " in err
    assert f"--run_dir={tmp_path}" in err
    assert not (tmp_path / "pretrain_eval.csv").read_text()

    process = start_toy(tmp_path, "--delay=0.003")
    wait_for_rows(process, tmp_path / "finetune_train.csv", 10)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "pretrain: continuing, step 8 of 24" in err and "stopped by SIGINT" in err

    out, err = finished(start_toy(tmp_path))
    assert "finetune: continuing, step" in err
    assert out == whole_run[1]
    assert_same_curves(tmp_path, whole_run[0])


def test_signal_during_compilation_ends_the_process():
    program = """
import threading, time, signal
from experiments.common.stop import StopSignals
class Slow:
    def compile(self):
        threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGTERM)).start()
        time.sleep(60)
with StopSignals() as stop:
    stop.compile(Slow(), "before step 1")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 143
    assert "stopped by SIGTERM before step 1" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, 4])  # the batch of 6 is split over 3, repeated on 4
def test_several_devices(tmp_path, whole_run, devices):
    flag = f"--xla_force_host_platform_device_count={devices}"
    finished(start_toy(tmp_path, XLA_FLAGS=flag))
    for name in CURVES:
        found, expected = (plot.read_rows(folder / name) for folder in (tmp_path, whole_run[0]))
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-4)


# Resuming in this process


def test_complete_run_says_so_and_still_gives_its_result(tmp_path, capsys):
    config = ToyConfig(pretrain_steps=8, finetune_steps=16)
    first = run_toy(config, tmp_path)
    curves = {name: (tmp_path / name).read_bytes() for name in CURVES}
    capsys.readouterr()
    again = run_toy(config, tmp_path)
    err = capsys.readouterr().err
    assert "finetune: already complete, step 16 of 16" in err
    assert again._replace(params=None, seconds=0) == first._replace(params=None, seconds=0)
    assert again.seconds >= first.seconds - 0.5
    jax.tree.map(np.testing.assert_array_equal, again.params, first.params)
    assert curves == {name: (tmp_path / name).read_bytes() for name in CURVES}
    in_process = evaluate.evaluate(
        jax.jit(finetune_eval), first.params, ToySource(20, 1), 6, jax.random.key(0)
    )
    assert in_process == first.best


def test_steps_per_dispatch_do_not_change_the_result(tmp_path):
    runs = {}
    for k in (1, 4):
        config = ToyConfig(steps_per_dispatch=k)
        runs[k] = run_toy(config, tmp_path / str(k), toy_phases(config)[:1])
    # bitwise on CPU; other devices may fuse differently for another K
    jax.tree.map(np.testing.assert_array_equal, runs[1].params, runs[4].params)
    curve = "pretrain_train.csv"
    assert (tmp_path / "1" / curve).read_bytes() == (tmp_path / "4" / curve).read_bytes()


def counter(loss_fn=lambda params, batch, key: (params["w"], {}), inits=None):
    """A phase whose only parameter is minus the number of steps."""

    def init(key, previous):
        if inits is not None:
            inits.append(previous)
        return {"w": jnp.zeros(())}

    def eval_fn(params, batch, key):
        count = jnp.sum(batch["weight"])
        return {"distance": (count * jnp.abs(params["w"] + 16.0), count)}

    return train.Phase(
        name="one",
        steps=40,
        batch_size=2,
        source=ToySource(7, 0),
        init=init,
        loss_fn=loss_fn,
        optimizer=optax.sgd(1.0),
        eval_source=ToySource(5, 0),
        eval_fn=eval_fn,
        best_metric="distance",
        best_mode="min",
    )


def saved_steps(run_dir, phase):
    return {path.name for path in (run_dir / "checkpoints" / phase).iterdir()}


def test_best_parameters_reach_the_next_phase_and_the_caller(tmp_path):
    inits = []
    one = counter(inits=inits)
    done = run_toy(ToyConfig(), tmp_path, [one, dataclasses.replace(one, name="two")])
    assert [inits[0], float(inits[1]["w"])] == [None, -16.0]
    assert (float(done.params["w"]), done.best_step) == (-16.0, 16)
    assert (done.best, done.last) == ({"distance": 0.0}, {"distance": 24.0})
    assert saved_steps(tmp_path, "one") == {"16", "32", "40"}


# Failures


def pretrain_only(config, **changes):
    return [dataclasses.replace(toy_phases(config)[0], **changes)]


def test_loss_that_is_not_finite_stops_the_run(tmp_path):
    def loss_fn(params, batch, key):
        return jnp.where(params["w"] == -12.0, jnp.nan, params["w"]), {}

    message = "the loss of step 13 is nan. .* the last checkpoint is step 8"
    with pytest.raises(NonFiniteError, match=message):
        run_toy(ToyConfig(), tmp_path, [counter(loss_fn)])
    assert saved_steps(tmp_path, "one") == {"8"}


def test_state_that_is_not_finite_is_not_saved(tmp_path):
    sgd = optax.sgd(lambda step: jnp.where(step == 11, jnp.inf, 1.0))  # the update of step 12
    message = "moments after step 12 are not finite. .* the last checkpoint is step 8"
    with pytest.raises(NonFiniteError, match=message):
        phase = dataclasses.replace(counter(), optimizer=sgd)
        run_toy(ToyConfig(checkpoint_every=4), tmp_path, [phase])
    assert "12" not in saved_steps(tmp_path, "one")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """The settings and the folder of a run of one phase with checkpoints 8 and 16."""
    config = ToyConfig(pretrain_steps=16)
    run_dir = tmp_path_factory.mktemp("short")
    run_toy(config, run_dir, pretrain_only(config))
    return config, run_dir


@pytest.fixture
def damaged(short_run, tmp_path):
    """The settings and a copy of the folder, to be damaged."""
    shutil.copytree(short_run[1], tmp_path / "run")
    return short_run[0], tmp_path / "run"


def needed_files(folder):
    """The files of a checkpoint that hold something which is read."""
    return [
        *(folder / item / "metadata" for item in ("data", "meta")),
        folder / "state" / "manifest.ocdbt",
        *(folder / "state" / "d").iterdir(),
    ]


# TensorStore's threads still report the reads that Orbax gave up at the first one that failed.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["deleted", "truncated"])
def test_torn_checkpoint_is_named_and_left(short_run, tmp_path, how):
    config, whole = short_run
    for number, name in enumerate(needed_files(whole / "checkpoints" / "pretrain" / "16")):
        run_dir = tmp_path / str(number)
        shutil.copytree(whole, run_dir)
        path = run_dir / name.relative_to(whole)
        if how == "deleted":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size // 2)
        before = sorted(run_dir.rglob("*"))
        with pytest.raises(CheckpointError, match="pretrain/16 is damaged.* from step 8"):
            run_toy(config, run_dir, pretrain_only(config))
        time.sleep(0.1)
        assert sorted(run_dir.rglob("*")) == before
    # the way out that the message names
    shutil.rmtree(run_dir / "checkpoints" / "pretrain" / "16")
    run_toy(config, run_dir, pretrain_only(config))
    curve = "pretrain_train.csv"
    assert (run_dir / curve).read_bytes() == (whole / curve).read_bytes()


def test_unfinished_checkpoint_is_passed_over(damaged, capsys):
    config, run_dir = damaged
    folder = run_dir / "checkpoints" / "pretrain"
    (folder / "16").rename(folder / "16.orbax-checkpoint-tmp")
    run_toy(config, run_dir, pretrain_only(config))
    assert "pretrain: continuing, step 8 of 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": None}, "params/out is not part of this model"),
        ({"gain": jnp.ones(3)}, "params/gain is missing"),
        ({"bias": jnp.zeros(5)}, r"params/bias: expected float32\[5\], found float32\[2\]"),
    ],
)
def test_checkpoint_of_another_model_is_refused(damaged, change, message):
    config, run_dir = damaged
    phase = toy_phases(config)[0]

    def init(key, previous):
        changed = phase.init(key, previous) | change
        return {name: leaf for name, leaf in changed.items() if leaf is not None}

    with pytest.raises(CheckpointError, match=message):
        run_toy(config, run_dir, pretrain_only(config, init=init))


def test_run_folder_of_other_settings_is_refused(damaged):
    config, run_dir = damaged
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    other = dataclasses.replace(config, width=9, learning_rate=0.5, log_every=5)
    message = "learning_rate: 0.01 there, 0.5 now; width: 8 there, 9 now[)]"
    with pytest.raises(CheckpointError, match=message):
        run_toy(other, run_dir)
    with pytest.raises(CheckpointError, match=r"vocabulary: \['a', 'b'\] there, \['b', 'a'\] now"):
        run_toy(config, run_dir, vocabulary="ba")
    (run_dir / "run.json").rename(run_dir / "elsewhere.json")
    with pytest.raises(CheckpointError, match="checkpoints but no run.json"):
        run_toy(config, run_dir)
    (run_dir / "elsewhere.json").rename(run_dir / "run.json")
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_saved_arrays_are_those_of_the_moment_of_saving(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    x = jnp.ones((300, 300))
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"x": x}, {}, {}, best_step=1)
        x = double(x)
    checkpoints.wait()
    for step in (1, 3, 4):  # the best and the newest two
        restored = checkpoints.restore(step, {"x": x})["x"]
        np.testing.assert_array_equal(restored, np.full((300, 300), 2.0 ** (step - 1)))
    with pytest.raises(CheckpointError, match="2"):
        checkpoints.restore(2, {"x": x})
    checkpoints.close()


def test_arguments_that_cannot_work_are_named(tmp_path):
    config = ToyConfig(pretrain_steps=8)

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            run_toy(config, tmp_path, pretrain_only(config, **changes))

    refused("best_metric='f1' .* known: loss", best_metric="f1")
    refused("best_mode='most' is unknown; known: max, min", best_mode="most")
    refused("steps=0 of phase 'pretrain' must be at least 1", steps=0)
    refused("parameter w must be float32, got int32", init=lambda *_: {"w": jnp.zeros(3, int)})
    refused(
        r"each must be a scalar, got shape \(6,\)",
        loss_fn=lambda p, batch, key: (pretrain_loss(p, batch, key)[0], {"each": batch["label"]}),
    )
    with pytest.raises(ValueError, match="different names"):
        run_toy(config, tmp_path, 2 * pretrain_only(config))


# Data


class FastSource(ToySource):
    def take(self, indices):
        return {"tokens": self.tokens[indices], "label": self.labels[indices]}

    def __getitem__(self, index):
        raise AssertionError("take is the faster way")


def test_every_epoch_is_a_new_permutation_and_nothing_is_left_out():
    source = FastSource(10, 0)
    source.labels = np.arange(10)
    batches = data.train_iterator(source, 3, 2, seed=5)  # 5 dispatches are 3 epochs
    seen = [next(batches) for _ in range(5)]
    assert all(batch["label"].shape == (2, 3) for batch in seen)
    assert all(batch["tokens"].shape == (2, 3, 12) for batch in seen)
    epochs = np.concatenate([batch["label"].ravel() for batch in seen]).reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = data.train_iterator(source, 3, 2, seed=5)
    np.testing.assert_array_equal(next(again)["label"], seen[0]["label"])
    other = data.train_iterator(source, 3, 2, seed=6)
    assert not np.array_equal(next(other)["label"], seen[0]["label"])


def test_iterator_continues_from_its_state():
    source = FastSource(10, 0)
    batches = data.train_iterator(source, 3, 2, seed=5)
    for _ in range(4):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    rest = [next(batches) for _ in range(6)]
    fresh = data.train_iterator(source, 3, 2, seed=5)
    next(fresh)
    fresh.set_state(state)
    for batch in rest:
        jax.tree.map(np.testing.assert_array_equal, next(fresh), batch)


@pytest.mark.parametrize("batch_size", [1, 3, 10, 16])
@pytest.mark.parametrize("source_type", [ToySource, FastSource])
def test_evaluation_counts_every_example_once(batch_size, source_type):
    source = source_type(10, 0)
    batches = list(data.eval_batches(source, batch_size))
    assert {batch["tokens"].shape for batch in batches} == {(batch_size, 12)}

    def eval_fn(params, batch, key):
        total = jnp.sum(batch["weight"] * batch["tokens"].sum(1))
        return {"tokens": (total, jnp.sum(batch["weight"])), "rows": (batch["weight"].sum(), 1.0)}

    metrics = evaluate.evaluate(jax.jit(eval_fn), {}, source, batch_size, jax.random.key(0))
    assert metrics["tokens"] == pytest.approx(source.tokens.sum() / 10, rel=1e-6)
    assert metrics["rows"] * len(batches) == pytest.approx(10)


def test_metric_without_weight_is_refused():
    source = ToySource(4, 0)
    with pytest.raises(ValueError, match="'loss' a weight of 0 over all 4 examples"):
        evaluate.evaluate(lambda *_: {"loss": (0.0, 0.0)}, {}, source, 2, jax.random.key(0))


def test_empty_source_is_refused():
    with pytest.raises(ValueError, match="no examples"):
        data.train_iterator(ToySource(0, 0), 1, 1, 0)
    with pytest.raises(ValueError, match="no examples"):
        next(data.eval_batches(ToySource(0, 0), 4))


# Optimiser


@pytest.mark.parametrize("schedule", optimizer.SCHEDULES)
def test_schedules_have_their_closed_form(schedule):
    rate = optimizer.learning_rate_schedule(schedule, 0.3, 10, 50)
    steps = np.arange(61)
    part = np.clip((steps - 10) / 40, 0, 1)
    after = {"cosine": 0.5 * (1 + np.cos(np.pi * part)), "linear": 1 - part, "constant": 1}
    expected = 0.3 * np.where(steps < 10, steps / 10, after[schedule])
    np.testing.assert_allclose([rate(step) for step in steps], expected, atol=1e-7)
    assert optimizer.learning_rate_schedule(schedule, 0.3, 0, 50)(0) == pytest.approx(0.3)


def test_schedule_and_clipping_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="schedule='step' is unknown; known: cosine"):
        optimizer.learning_rate_schedule("step", 1.0, 0, 10)
    with pytest.raises(ValueError, match="warmup_steps=11 .* total_steps=10"):
        optimizer.learning_rate_schedule("linear", 1.0, 11, 10)
    with pytest.raises(ValueError, match="clip='l1' is unknown; known: norm, value, none"):
        optimizer.adamw(1.0, clip="l1")


def test_weight_decay_spares_vectors_and_named_parameters():
    params = {
        "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
        "norm": {"gain": jnp.ones(3)},
        "positions": jnp.ones((4, 3)),
        "anchors": jnp.ones((2, 2)),
    }
    decayed = optimizer.adamw(
        0.1,
        weight_decay=0.5,
        no_decay=lambda name: name == "positions",
        frozen=lambda name: name == "anchors",
    )
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = decayed.update(zeros, decayed.init(params), params)
    changed = {
        name: bool(jnp.any(leaf != 0))
        for name, leaf in zip(optimizer.leaf_names(updates), jax.tree.leaves(updates))
    }
    assert {name for name, is_changed in changed.items() if is_changed} == {"dense/kernel"}
    np.testing.assert_allclose(updates["dense"]["kernel"], -0.05, rtol=1e-6)


def test_clipping():
    params = {"a": jnp.zeros(2), "frozen": jnp.zeros(2)}
    grads = {"a": jnp.array([3.0, -4.0]), "frozen": jnp.array([1e6, 1e6])}
    for clip, expected in (("norm", [0.6, -0.8]), ("value", [1.0, -1.0]), ("none", [3.0, -4.0])):
        adam = optimizer.adamw(1.0, frozen=lambda name: name == "frozen", clip=clip)
        updates, state = adam.update(grads, adam.init(params), params)
        moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2,)]
        np.testing.assert_allclose(moments[0], 0.1 * np.array(expected), rtol=1e-6)
        assert len(moments) == 2 and not np.any(updates["frozen"])


# Flags


def exit_of(capsys, *arguments, preset=None):
    with pytest.raises(SystemExit) as exit_:
        flags.parse(ToyConfig, ["toy", *arguments], preset)
    return exit_.value.code, capsys.readouterr()


def test_flags_overrule_the_preset_and_the_preset_the_defaults():
    def preset(config):
        return {"width": 16, "learning_rate": 0.5, "seed": 1 if config.pool == "max" else 2}

    config = flags.parse(ToyConfig, ["toy", "--pool=max", "--learning-rate", "0.25"], preset)
    assert (config.width, config.learning_rate, config.seed) == (16, 0.25, 1)
    assert flags.parse(ToyConfig, ["toy"]) == ToyConfig()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widht=3"], "unknown flag --widht; did you mean --width? Known flags: seed, "),
        (["--pool=sum"], "mean|max"),
        (["--width=wide"], "width"),
        (["--eval_every=0"], "eval_every=0 must be at least 1"),
        (["listops"], "unexpected argument 'listops'"),
    ],
)
def test_wrong_flags_exit_with_2(capsys, arguments, message):
    code, printed = exit_of(capsys, *arguments)
    assert code == 2 and message in printed.err and not printed.out
    assert printed.err.startswith("error: ") and len(printed.err.strip().split("\n")) == 1


def test_settings_that_refuse_themselves_exit_with_2(capsys):
    def preset(config):
        raise ValueError("no preset for this")

    code, printed = exit_of(capsys, preset=preset)
    assert (code, printed.err) == (2, "error: no preset for this\n")


def test_print_config_and_help(capsys):
    code, printed = exit_of(capsys, "--print-config", "--width=3")
    lines = printed.out.strip().split("\n")
    assert code == 0 and "width = 3" in lines and "pool = mean" in lines
    assert lines == sorted(lines) and len(lines) == len(dataclasses.fields(ToyConfig))
    code, printed = exit_of(capsys, "--help")
    assert code == 0 and printed.out.startswith("A toy experiment.\n")
    assert "model:\n  --width=8" in printed.out and "pooling (mean | max)" in printed.out
    assert "logtostderr" not in printed.out


def test_hash_names_what_changes_the_result():
    config = ToyConfig()
    assert len(flags.config_hash(config)) == 12
    assert flags.config_hash(config) == flags.config_hash(dataclasses.replace(config, run_dir="x"))
    assert flags.config_hash(config) != flags.config_hash(dataclasses.replace(config, width=9))


# Logs and records


def test_csv_drops_what_comes_after_the_step(tmp_path):
    path = tmp_path / "x.csv"
    rows = log.CsvLog(path, 0)
    for step in (1, 2, 3):
        rows.append(step, {"loss": np.float32(0.1) * step})
    with pytest.raises(ValueError, match="the new row has"):
        rows.append(4, {"accuracy": 1.0})
    rows.close()
    path.write_text(path.read_text() + "4,0.")
    log.CsvLog(path, 2).close()
    assert path.read_text() == "step,loss\n1,0.100000001\n2,0.200000003\n"
    assert np.float32("0.200000003") == np.float32(0.1) * np.float32(2)
    log.CsvLog(path, 0).close()
    assert path.read_text() == ""


def test_clock_counts_idle_devices_and_waiting():
    clock = log.Clock()
    with clock.paused():
        time.sleep(0.05)
    with clock.waiting():
        time.sleep(0.1)
    clock.enqueued(was_idle=True)
    time.sleep(0.1)
    clock.seen_busy()
    clock.enqueued(was_idle=False)
    clock.computed(100)
    numbers = clock.read()
    assert numbers["seconds"] == pytest.approx(0.2, abs=0.08)
    assert numbers["input_wait_fraction"] == pytest.approx(0.5, abs=0.15)
    assert numbers["host_fraction"] == pytest.approx(0.5, abs=0.15)
    assert numbers["tokens_per_second"] == pytest.approx(100 / numbers["seconds"])
    assert clock.read()["tokens_per_second"] == 0


def test_record_and_plot(short_run, monkeypatch):
    config, run_dir = short_run
    path = run_dir / "result.json"
    written = record.write_result(path, config, {"accuracy": 0.5}, started=0.0, seconds=2.0)
    assert record.read_json(path) == written and not list(run_dir.glob("*.tmp"))
    assert written["config_hash"] == flags.config_hash(config)
    assert written["versions"]["jax"] == jax.__version__
    assert written["started"] == "1970-01-01T00:00:00+00:00"
    monkeypatch.setenv("GIT_DIR", str(run_dir / "nowhere"))
    assert record.git_state() == (None, None)
    assert plot.plot_run(run_dir).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no rows"):
        plot.plot_run(run_dir / "checkpoints")


if __name__ == "__main__":
    main(sys.argv)
