"""The training loop: interrupted, continued, and what it hands over."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from toy_run import (
    CURVES,
    ROOT,
    ToyConfig,
    ToySource,
    counter,
    finetune_eval,
    run_toy,
    saved_steps,
    toy_phases,
)

from experiments.common import evaluate, plot


def start_toy(run_dir, *arguments, **environment):
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "error",
            ROOT / "tests" / "toy_run.py",
            f"--run_dir={run_dir}",
            *arguments,
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rows(process, path, rows):
    """Until a CSV file has so many rows."""
    wait_for(process, lambda: path.exists() and path.read_text().count("\n") > rows)


def wait_for(process, happened):
    """Until something has happened while the process runs."""
    deadline = time.monotonic() + 120
    while not happened():
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


def test_complete_run_says_so_and_still_gives_its_result(tmp_path, capsys):
    config = ToyConfig(pretrain_steps=8, finetune_steps=16)
    first = run_toy(config, tmp_path)
    curves = {name: (tmp_path / name).read_bytes() for name in CURVES}
    capsys.readouterr()
    again = run_toy(config, tmp_path)
    err = capsys.readouterr().err
    assert "finetune: already complete, step 16 of 16" in err
    assert again._replace(params=None, seconds=0) == first._replace(params=None, seconds=0)
    saved = tmp_path.glob("checkpoints/*/*/meta/metadata")
    seconds = {path.parts[-4]: json.loads(path.read_text())["seconds"] for path in sorted(saved)}
    assert set(seconds) == {"pretrain", "finetune"} and again.seconds >= sum(seconds.values()) > 0
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


def test_best_parameters_reach_the_next_phase_and_the_caller(tmp_path):
    inits = []
    one = counter(inits=inits)
    done = run_toy(ToyConfig(), tmp_path, [one, dataclasses.replace(one, name="two")])
    assert [inits[0], float(inits[1]["w"])] == [None, -16.0]
    assert (float(done.params["w"]), done.best_step) == (-16.0, 16)
    assert (done.best, done.last) == ({"distance": 0.0}, {"distance": 24.0})
    assert saved_steps(tmp_path, "one") == {"16", "32", "40"}
