"""Failures of a run: diverged, damaged, foreign. Nothing written before is lost."""

import dataclasses
import os
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy_run import (
    ToyConfig,
    counter,
    pretrain_loss,
    pretrain_only,
    run_toy,
    saved_steps,
    toy_phases,
)

from experiments.common.checkpoint import CheckpointError, Checkpoints
from experiments.common.phase import NonFiniteError


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
