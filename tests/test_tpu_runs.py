"""Runs on TPUs and clusters: preemption, snapshots in a bucket, requeued jobs."""

import os
import shlex
import shutil
import signal
import subprocess
import time

import pytest
from stub_programs import AT, LINE, QUEUED, SCRIPTS, V6E, VM, WHERE, Cluster, scp, ssh
from toy_run import ROOT


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


# The next line of `states` answers describe, that of `workers` the question about the command.
SCRIPTED = """
case "$*" in
  *describe*) answers=states ;;
  *status*) answers=workers ;;
  *) exit 0 ;;
esac
answer=$(head -n 1 "$BEHAVIOUR/$answers")
sed -i 1d "$BEHAVIOUR/$answers"
case $answer in
  absent) echo "ERROR: NOT_FOUND: Resource 'x' was not found" >&2; exit 1 ;;
  unreachable) echo "ERROR: ssh failed" >&2; exit 255 ;;
  *) printf '%b\\n' "$answer" ;;
esac
"""
WATCHED = [*WHERE, "--type=v6e-8", "--capacity=spot", "--queued", "--bucket=gs://b", "--poll=0",
           "--repository=https://host/r", "--env=A=b c", "--extra=--labels=x=y"]  # fmt: skip


def watch(cluster, states, workers, *flags, code=0):
    cluster.behave(
        gcloud=SCRIPTED, states="\n".join(states) + "\n", workers="\n".join(workers) + "\n"
    )
    _, error = cluster.run("watch.sh", *WATCHED, *flags, "--", "python", "it's", code=code)
    assert (cluster.folder / "states").read_text().strip() == ""
    return cluster.calls(), error


def test_watch_recreates_after_a_preemption(cluster):
    calls, error = watch(
        cluster,
        ["absent", "PROVISIONING", "ACTIVE", "ACTIVE", "SUSPENDING", "SUSPENDED", "absent",
         "WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE"],
        ["state=none", "state=running", "state=none", "unreachable", "state=143", "state=0"],
        "--delete",
    )  # fmt: skip
    revision = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], stdout=-1, check=True)
    look = [*QUEUED, "describe", "t", "--format=value(state.state)", *AT]
    ask = ssh(f"{LINE} status 2>/dev/null || echo state=none")
    create = [*QUEUED, "create", "t", *V6E, "--node-id=t", "--spot", "--labels=x=y", *AT]
    delete = [*QUEUED, "delete", "t", "--force", *AT]
    setup = [
        ssh("mkdir -p lowrank_attn"),
        scp(str(SCRIPTS / "worker.sh"), "t:lowrank_attn/"),
        ssh(f"{LINE} setup git+https://host/r@{revision.stdout.decode().strip()}"),
    ]
    start = ssh(f"""{LINE} start gs://b/t.tar env 'A=b c' python 'it'\\''s'""")
    assert calls == [
        look, create, look, look, ask, *setup, start, look, ask,
        look, look, delete, look, create, look, look, ask, *setup, start, look, ask,
        look, ask, start, look, ask, delete,
    ]  # fmt: skip
    assert "ssh failed" in error and "NOT_FOUND" not in error
    assert "ended with exit code 0" in error


def test_watch_of_a_vm_that_is_preempted(cluster):
    cluster.behave(gcloud=SCRIPTED, states="PREEMPTED\nREADY\n", workers="state=2\n")
    arguments = [*WHERE, "--type=v6e-8", "--poll=0", "--wheel=l.whl", "--", "python"]
    cluster.run("watch.sh", *arguments, code=2)
    calls = cluster.calls()
    assert [*VM, "delete", "t", *AT] in calls and len(calls) == 4
    assert calls[0] == [*VM, "describe", "t", "--format=value(state)", *AT]


@pytest.mark.parametrize(
    ("states", "workers", "code"),
    [
        (["ACTIVE"], ["state=0\\nstate=2\\nstate=running"], 2),
        (["ACTIVE", "ACTIVE"], ["state=running\\nstate=0", "state=0\\nstate=0"], 0),
        (["FAILED"], [], 2),
    ],
)
def test_watch_ends_with_the_code_of_the_command(cluster, states, workers, code):
    calls, _ = watch(cluster, states, workers, "--delete", code=code)
    assert ([*QUEUED, "delete", "t", "--force", *AT] in calls) == (code == 0)


def test_watch_prints_what_a_new_tpu_needs(cluster):
    printed, _ = cluster.run(
        "watch.sh", *WATCHED, "--revision=v1", "--delete", "--dry-run", "--", "python"
    )
    calls = [shlex.split(line) for line in printed.splitlines()]
    assert [call[4] for call in calls] == [
        "describe", "create", "ssh", "scp", "ssh", "ssh", "ssh", "delete",
    ]  # fmt: skip
    assert cluster.calls() == []


# A bucket: gs://b/x is the file bucket/x.
BUCKET = """
bucket=$BEHAVIOUR/bucket
mkdir -p "$bucket"
from=${@: -2:1} to=${@: -1}
from=${from/gs:\\/\\/b/$bucket}
case $2 in
  ls)
    [[ -f $BEHAVIOUR/offline ]] && { echo "ERROR: no network" >&2; exit 1; }
    [[ -f ${to/gs:\\/\\/b/$bucket} ]] && exit
    echo "ERROR: (gcloud.storage.ls) One or more URLs matched no objects." >&2
    exit 1
    ;;
  cp) cp "$from" "$bucket/part" && mv "$bucket/part" "${to/gs:\\/\\/b/$bucket}" ;;
esac
"""
# Counts to a number, 20 a second, in a file that stands for the checkpoint; saves on SIGTERM,
# which takes a while.
COUNT = """
mkdir -p runs/r/checkpoints/3.orbax-checkpoint-tmp
n=$(cat runs/r/n 2>/dev/null || echo 0)
echo "from $n $(cat runs/r/checkpoints/c 2>/dev/null)"
trap 'sleep 0.3; echo $n >runs/r/n; exit 143' TERM
touch runs/r/counting
while ((n < $1)); do n=$((n + 1)); sleep 0.05; done
echo $n >runs/r/n
echo kept >runs/r/checkpoints/c
exit "${2:-0}"
"""


def wait_for(path):
    for _ in range(1000):
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} does not appear")


class Worker:
    """A worker's home with worker.sh in it."""

    def __init__(self, cluster, name):
        self.cluster = cluster
        self.folder = cluster.folder / name / "lowrank_attn"
        self.folder.mkdir(parents=True)
        shutil.copy(SCRIPTS / "worker.sh", self.folder)
        (cluster.folder / "count.sh").write_text(COUNT)

    def __call__(self, *words, code=0, host="t-w-0", every="100"):
        path = self.folder / "worker.sh"
        return self.cluster.run(path, *words, code=code, HOSTNAME=host, SNAPSHOT_SECONDS=every)

    def start(self, *words, **settings):
        return self("start", "gs://b/t.tar", "bash", "../../count.sh", *words, **settings)

    def wait(self, state):
        for _ in range(500):
            if self("status")[0] == f"state={state}\n":
                return
            time.sleep(0.02)
        raise AssertionError(f"{self('status')}, {(self.folder / 'log').read_text()}")

    def lines(self):
        lines = (self.folder / "log").read_text().splitlines()
        return [line for line in lines if line.startswith("from")]


def test_a_new_worker_continues_from_the_snapshot(cluster):
    cluster.behave(gcloud=BUCKET)
    first = Worker(cluster, "first")
    assert first("status")[0] == "state=none\n"
    first.start("1000")
    first.wait("running")
    assert "still runs here" in first.start("1000", code=1)[1]
    wait_for(first.folder / "runs/r/counting")
    time.sleep(0.3)
    first("stop")
    first.wait("143")
    reached = int((first.folder / "runs/r/n").read_text())
    assert reached >= 1
    shutil.rmtree(first.folder)

    second = Worker(cluster, "second")
    second.start(str(reached + 3))
    second.wait("0")
    assert second.lines() == ["from 0 ", f"from {reached} "]
    (second.folder / "pid").write_text("999999999")
    (second.folder / "exit_code").unlink()
    assert second("status")[0] == "state=lost\n"
    second.start("0", "2")
    second.wait("2")
    assert second.lines()[-1] == f"from {reached + 3} kept"

    third = Worker(cluster, "third")
    third.start("0")
    third.wait("0")
    assert third.lines()[-1] == f"from {reached + 3} kept"
    assert not (third.folder / "snapshot").exists()


def test_snapshots_are_taken_on_the_way(cluster):
    cluster.behave(gcloud=BUCKET)
    worker = Worker(cluster, "one")
    worker.start("1000", every="0.05")
    wait_for(cluster.folder / "bucket/t.tar")
    os.killpg(int((worker.folder / "pid").read_text()), signal.SIGKILL)
    listed = subprocess.run(["tar", "-tf", cluster.folder / "bucket/t.tar"], stdout=-1, check=True)
    names = listed.stdout.decode().split()
    assert "runs/r/checkpoints/" in names and "log" in names and "tmp" not in "".join(names)
    worker.wait("lost")


def test_an_unreadable_bucket_is_no_empty_bucket(cluster):
    cluster.behave(gcloud=BUCKET, offline="")
    worker = Worker(cluster, "one")
    error = worker.start("1", code=1)[1]
    assert "gs://b/t.tar cannot be read" in error and "no network" in error
    assert worker("status")[0] == "state=none\n" and not (cluster.folder / "bucket/t.tar").exists()


def test_other_workers_leave_the_bucket_alone(cluster):
    worker = Worker(cluster, "one")
    worker.start("1000", host="t1v-n-1234-w-12")
    wait_for(worker.folder / "runs/r/counting")
    worker("stop")
    worker.wait("143")  # not before the command has saved
    assert (worker.folder / "runs/r/n").exists()
    assert cluster.calls() == []


def slurm_job(cluster, *command):
    return cluster.start("slurm_job.sh", *command, SLURM_JOB_ID="5")


def test_slurm_job_is_requeued_when_its_time_ends(cluster):
    cluster.behave(
        srun='echo $$ >"$BEHAVIOUR/step"; exec "$@"',
        scancel='kill -TERM "$(<"$BEHAVIOUR/step")"',
    )
    (cluster.folder / "count.sh").write_text(COUNT)
    process = slurm_job(cluster, "bash", "count.sh", "1000")
    wait_for(cluster.folder / "runs/r/counting")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert cluster.calls() == [
        ["srun", "bash", "count.sh", "1000"],
        ["scancel", "--signal=TERM", "5.0"],
        ["scontrol", "requeue", "5"],
    ]
    reached = int((cluster.folder / "runs/r/n").read_text())
    for code in (0, 2, 143):  # continues; an end, an error and scancel are no reason to requeue
        process = slurm_job(cluster, "bash", "count.sh", str(reached), str(code))
        out, _ = process.communicate(timeout=20)
        assert process.returncode == code and out.startswith(f"from {reached}")
        assert [call[0] for call in cluster.calls()] == ["srun"]
