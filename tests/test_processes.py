"""Several real processes on one machine: against one process, killed, stopped, and left alone."""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from test_training import CURVES, wait_for, wait_for_rows
from toy_run import ROOT, ToyConfig, ToySource

from experiments.common import plot
from experiments.common.data import eval_batches, train_iterator
from experiments.common.processes import START_AGAIN


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


STARTED = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A test that fails leaves no process behind."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


def start(run_dir, count, *arguments, only=None, apart=False):
    """So many processes of one toy run, in one folder or in folders of their own."""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [
                sys.executable, ROOT / "tests" / "toy_run.py",
                f"--run_dir={run_dir}{i if apart else ''}",
                f"--coordinator=localhost:{port}", f"--num_processes={count}", f"--process_id={i}",
                *arguments,
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (range(count) if only is None else [only])
    ]  # fmt: skip
    STARTED.extend(started)
    return started


def outputs(processes):
    """(exit code, standard output, standard error) of each."""
    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:  # a full pipe stops all
        written = list(pool.map(lambda process: process.communicate(timeout=600), processes))
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, written)]


def assert_close_curves(run_dir, expected_dir):
    """Sums over two processes are in another order than those over one."""
    for name in CURVES:
        found, expected = (plot.read_rows(folder / name) for folder in (run_dir, expected_dir))
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-4)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("one") / "run"
    ((code, out, err),) = outputs(start(run_dir, 1))
    assert code == 0, err
    return run_dir


@pytest.mark.slow
def test_two_processes_train_as_one(one_process, tmp_path):
    first, second = outputs(start(tmp_path, 2))
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert first[1].splitlines()[-1] == second[1].splitlines()[-1]  # the results
    assert "starting at step 0" in first[2] and "starting" not in second[2]
    assert_close_curves(tmp_path, one_process)


@pytest.mark.slow
def test_killed_process_then_the_same_command_then_one_process(one_process, tmp_path):
    """A process is killed in mid-run; the others end; all continue, at last as a single one."""
    slow = ("--delay=0.02", "--checkpoint_every=4")
    first, second = started = start(tmp_path, 2, *slow)
    wait_for_rows(first, tmp_path / "pretrain_train.csv", 10)
    second.kill()
    codes = [code for code, _, _ in outputs(started)]
    assert codes[0] not in (0, 1, 2) and codes[1] == -signal.SIGKILL
    first, second = started = start(tmp_path, 2, *slow)
    wait_for_rows(first, tmp_path / "finetune_train.csv", 10)
    first.kill()
    assert outputs(started)[1][0] not in (0, 1, 2)
    ((code, _, err),) = outputs(start(tmp_path, 1))
    assert code == 0 and "finetune: continuing, step" in err, err
    assert_close_curves(tmp_path, one_process)


@pytest.mark.slow
def test_four_processes_one_killed_while_all_save(tmp_path):
    """The checkpoint that was not complete counts for nothing; the one before it does."""
    rows = "--batch_size=8"
    alone, together = tmp_path / "one", tmp_path / "four"
    ((code, _, err),) = outputs(start(alone, 1, rows))
    assert code == 0, err
    folder = together / "checkpoints" / "pretrain"
    started = start(together, 4, rows, "--checkpoint_every=4", "--delay=0.02", "--save_delay=3")
    wait_for(started[0], lambda: list(folder.glob("12.*")))
    started[0].kill()  # the others would know of another one only after a while
    codes = [code for code, _, _ in outputs(started)]
    assert codes[0] == -signal.SIGKILL and not {*codes[1:]} & {0, 1, 2}
    assert (folder / "8").exists() and not (folder / "12").exists()
    found = outputs(start(together, 4, rows))
    assert [code for code, _, _ in found] == [0] * 4, found
    assert "pretrain: continuing, step 8" in found[0][2]
    assert_close_curves(together, alone)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_one_step(one_process, tmp_path):
    first, second = started = start(tmp_path, 2, "--delay=0.02")
    wait_for_rows(first, tmp_path / "pretrain_train.csv", 6)
    second.terminate()
    stopped = outputs(started)
    assert [code for code, _, _ in stopped] == [143, 143], stopped
    stops = [re.findall(r"stopped by SIGTERM in .* of 24\.", err) for _, _, err in stopped]
    assert len(stops[0]) == 1 and stops[0] == stops[1]
    found = outputs(start(tmp_path, 2))
    assert [code for code, _, _ in found] == [0, 0], found
    assert_close_curves(tmp_path, one_process)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process_id", "message"),
    [(0, r"process 1 of 2 did not come to"), (1, r"process 1 did not reach process 0 at")],
)
def test_others_that_do_not_come(tmp_path, process_id, message):
    (process,) = start(tmp_path, 2, "--start_timeout=4", only=process_id)
    begun = time.monotonic()
    code, _, err = outputs([process])[0]
    assert code == START_AGAIN and time.monotonic() - begun < 60
    assert re.search(rf"did not meet \(--start_timeout=4\): {message} localhost:", err)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coordinator": "host:1"}, "num_processes=None, process_id=None: expected all three"),
        ({"process_id": 1}, "coordinator=None with .*process_id=1: expected all three"),
        (
            {"coordinator": "host", "num_processes": 2, "process_id": 0},
            "expected host:port",
        ),
        (
            {"coordinator": "host:no", "num_processes": 2, "process_id": 0},
            "coordinator='host:no', expected host:port",
        ),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": 2}, "expected one of 0 to 1"),
        ({"start_timeout": 0}, "start_timeout=0, expected at least 1 second"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        ToyConfig(**settings)


def test_rows_of_a_process_are_those_of_the_batch():
    source, rows = ToySource(10, 0), np.array([1, 3])
    with_all, own = (train_iterator(source, 4, 2, 0, r) for r in (None, rows))
    for _ in range(4):
        whole, part = next(with_all), next(own)
        assert whole["tokens"].shape == (2, 4, 12)
        np.testing.assert_array_equal(whole["tokens"][:, rows], part["tokens"])
    for whole, part in zip(eval_batches(source, 4), eval_batches(source, 4, rows), strict=True):
        assert set(part) == {"tokens", "label", "weight"}
        for name in part:
            np.testing.assert_array_equal(whole[name][rows], part[name])
