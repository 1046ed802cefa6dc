"""Building the data of tasks ahead of time: what is printed, interrupted runs, missing files."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from test_text_and_image import write_cifar, write_reviews
from toy_run import ROOT

from experiments import prepare, tasks

LISTOPS = "--task_options=num_train=300,num_validation=20,num_test=20"


@pytest.fixture(autouse=True)
def same_handler_afterwards():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def run(tmp_path, *arguments):
    prepare.main(["prepare", f"--cache_dir={tmp_path / 'cache'}", *arguments])


def exit_code(tmp_path, *arguments):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, *arguments)
    return stop.value.code


def test_it_says_what_is_in_the_data(tmp_path, capsys):
    write_reviews(tmp_path / "data", 20)
    run(tmp_path, "--task=text", f"--data_dir={tmp_path / 'data'}", "--task_options=seed=3")
    printed = capsys.readouterr()
    task = tasks.load("text", tmp_path / "data", tmp_path / "cache", {"seed": 3})
    assert printed.out.splitlines()[0] == "text: 2 classes, 258 token ids"
    assert re.search(
        r"test: +40 examples of 18 to 380 tokens \(mean 197\); labels 0 50.0%, 1 50.0%", printed.out
    )
    assert "train:      36 examples" in printed.out and "validation: 4 examples" in printed.out
    assert "majority class 50.0%" in printed.out and task.fingerprint in printed.out
    assert "reviews/s" in printed.err  # progress
    run(tmp_path, "--task=text", f"--data_dir={tmp_path / 'data'}", "--task_options=seed=3")
    again = capsys.readouterr()
    assert again.out == printed.out and "reviews/s" not in again.err


def test_all_builds_what_can_be_built_and_names_the_rest(tmp_path, capsys):
    write_cifar(tmp_path / "data" / "cifar-10-batches-bin", 4)
    write_reviews(tmp_path / "data" / "aclImdb", 10)
    (tmp_path / "data/aclImdb/test/pos/1_1.txt").write_bytes(b"")
    run(tmp_path, f"--data_dir={tmp_path / 'data'}")
    printed = capsys.readouterr()
    assert re.findall(r"^(\w+):", printed.out, re.M) == ["image"]
    missing = printed.err.splitlines()[-1]
    assert missing.startswith("not built: ") and "listops" in missing and "text" in missing
    assert "error: listops: data_dir=" in printed.err and "1_1.txt is empty" in printed.err
    assert [path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()] == ["image"]


def test_nothing_built_exits_with_2(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    assert exit_code(tmp_path, f"--data_dir={tmp_path / 'data'}") == 2
    assert exit_code(tmp_path, "--task=image") == 2
    message = capsys.readouterr().err
    assert "cifar-10-binary" in message and "Traceback" not in message
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=texts"], "texts"),
        (["--task_options=seed=1"], "task_options='seed=1' with task='all'"),
        (["--task=listops", "--task_options=size=3"], "do not fit task='listops'"),
        (["--task=listops", "--task_options=num_test=0"], "num_test=0"),
    ],
)
def test_wrong_settings_are_named(tmp_path, capsys, arguments, message):
    assert exit_code(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_while_writing_it_leaves_no_cache_and_starts_again(tmp_path, capsys, signum):
    """The first array of the cache takes a minute to write."""
    slow = (
        "import numpy, time, sys\n"
        "numpy.save = lambda *_: time.sleep(60)\n"
        "from experiments import prepare\n"
        "prepare.main(sys.argv)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "--task=listops", LISTOPS,
         f"--cache_dir={tmp_path / 'cache'}"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob(".listops-*/complete")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signum)
    process.communicate()
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[signum]
    assert not list((tmp_path / "cache").glob("listops-*"))
    if signum == signal.SIGTERM:
        assert not list((tmp_path / "cache").iterdir())
    run(tmp_path, "--task=listops", LISTOPS)
    assert "train:      300 examples" in capsys.readouterr().out
    assert len(list((tmp_path / "cache").glob("listops-*"))) == 1


def test_help_shows_the_tree_of_published_files(tmp_path, capsys):
    assert exit_code(tmp_path, "--help") == 0
    shown = capsys.readouterr().out
    for part in ("listops-1000/basic_", "new_aan_pairs", "contour_length_14", "train,test}/{pos"):
        assert part in shown
