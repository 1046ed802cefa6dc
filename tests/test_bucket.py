"""Checkpoints in a bucket: machines that share nothing else, and new ones in their places."""

import subprocess
import sys
import urllib.request

import pytest
from test_processes import free_port, nothing_is_left, outputs, start  # noqa: F401, a fixture
from test_training import wait_for, wait_for_rows
from toy_run import ROOT

from experiments.common import plot


@pytest.fixture(scope="module")
def bucket():
    """The URL of a bucket, which this process and those that it starts reach."""
    port = free_port()
    server = subprocess.Popen([sys.executable, ROOT / "tests" / "fake_bucket.py", str(port)])
    url = f"http://localhost:{port}"

    def answers():
        try:
            return urllib.request.urlopen(f"{url}/storage/v1/b/bucket").status == 200
        except OSError:
            return False

    wait_for(server, answers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
        yield "gs://bucket"
    server.kill()
    server.communicate()


@pytest.fixture(scope="module")
def on_a_disk(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("disk")
    ((code, _, err),) = outputs(start(run_dir, 1))
    assert code == 0, err
    return run_dir


@pytest.mark.slow
def test_two_machines_then_two_new_ones(bucket, on_a_disk, tmp_path):
    """Folders of runs that are not shared: all that is left after a preemption is the bucket."""

    def machines(name, *arguments):
        flags = (f"--checkpoint_dir={bucket}/run", *arguments)
        return start(tmp_path / name, 2, *flags, apart=True)

    first, second = started = machines("old", "--delay=0.02")
    wait_for_rows(first, tmp_path / "old0" / "pretrain_train.csv", 10)
    second.terminate()
    stopped = outputs(started)
    assert [code for code, _, _ in stopped] == [143, 143], stopped
    found = outputs(machines("new"))
    assert [code for code, _, _ in found] == [0, 0], found[0][2][-4000:]
    assert "pretrain: continuing, step" in found[0][2]
    assert not list(tmp_path.glob("*/checkpoints"))
    expected = plot.read_rows(on_a_disk / "finetune_eval.csv")
    for one, other in zip(
        plot.read_rows(tmp_path / "new0" / "finetune_eval.csv"), expected, strict=True
    ):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
def test_a_bucket_that_is_not_there(bucket, tmp_path):
    ((code, _, err),) = outputs(start(tmp_path, 1, "--checkpoint_dir=gs://another/run"))
    assert code == 1
    assert "checkpoint_dir: gs://another/run/pretrain cannot be opened; see that gcsfs" in err
