"""The scripts for TPUs and clusters: the exact commands that they run, and what they refuse."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest
from stub_programs import (
    AT,
    LINE,
    QUEUED,
    SCRIPTS,
    V5E,
    V6E,
    VM,
    WHERE,
    Cluster,
    scp,
    ssh,
    ssh_slices,
)

NAMES = sorted(path.name for path in SCRIPTS.glob("*.sh") if path.name != "common.sh")
USER_SCRIPTS = [name for name in NAMES if name not in ("worker.sh", "slurm_job.sh")]
ODD = [
    "python",
    "-m",
    "a b",
    "it's",
    '"x"',
    "$HOME",
    "back\\slash",
    "new\nline",
    "*",
    "",
    "--a=b c",
]
# script and flags -> the calls, exactly
COMMANDS = {
    "create.sh --name=t --zone=z --type=v5litepod-8": [[*VM, "create", "t", *V5E, *AT]],
    "create.sh --name=t --zone=z --project=p --type=v5litepod-8 --capacity=spot": [
        [*VM, "create", "t", *V5E, "--spot", "--zone=z", "--project=p", "--quiet"]
    ],
    "create.sh --name=t --zone=z --type=v2-8 --version=w --capacity=reserved '--extra=--a=b c'": [
        [*VM, "create", "t", "--accelerator-type=v2-8", "--version=w", "--reserved",
         "--a=b c", *AT]
    ],
    "create.sh --name=t --zone=z --type=v6e-8 --capacity=spot --queued": [
        [*QUEUED, "create", "t", *V6E, "--node-id=t", "--spot", *AT]
    ],
    "create.sh --name=t --zone=z --type=v6e-8 --slices=4 --capacity=reserved": [
        [*QUEUED, "create", "t", *V6E, "--node-count=4", "--node-prefix=t", "--reserved", *AT]
    ],
    "setup.sh --name=t --zone=z --repository=https://host/r --revision=v1": [
        ssh("mkdir -p lowrank_attn"),
        scp(str(SCRIPTS / "worker.sh"), "t:lowrank_attn/"),
        ssh(f"{LINE} setup git+https://host/r@v1"),
    ],
    "setup.sh --name=t --zone=z '--wheel=my dist/l-1.whl' --slices=2": [
        ssh_slices("mkdir -p lowrank_attn"),
        [*QUEUED, "scp", str(SCRIPTS / "worker.sh"), "my dist/l-1.whl", "t:lowrank_attn/",
         "--node=all", "--worker=all", *AT],
        ssh_slices(f"{LINE} setup l-1.whl"),
    ],
    "run.sh --name=t --zone=z -- python -m x '--o=a b'": [
        ssh(f"{LINE} start '' python -m x '--o=a b'")
    ],
    "run.sh --name=t --zone=z --bucket=gs://b/ --env=A=1 '--env=B=c d' -- python": [
        ssh(f"{LINE} start gs://b/t.tar env A=1 'B=c d' python")
    ],
    "run.sh --name=t --zone=z --slices=2 -- python": [ssh_slices(f"{LINE} start '' python")],
    "run.sh --name=t --zone=z --stop": [ssh(f"{LINE} stop")],
    "collect.sh --name=t --zone=z '--to=my results'": [
        ssh("cat lowrank_attn/log", "--output-directory=my results"),
        scp("--recurse", "t:lowrank_attn/runs", "my results", worker=0),
    ],
    "collect.sh --name=t --zone=z --slices=2": [
        [*QUEUED, "ssh", "t", "--node=0", "--worker=all", "--command=cat lowrank_attn/log",
         "--output-directory=collected/t/slice-0", *AT],
        [*QUEUED, "ssh", "t", "--node=1", "--worker=all", "--command=cat lowrank_attn/log",
         "--output-directory=collected/t/slice-1", *AT],
        [*QUEUED, "scp", "--recurse", "t:lowrank_attn/runs", "collected/t", "--node=0",
         "--worker=0", *AT],
    ],
    "delete.sh --name=t --zone=z": [[*VM, "delete", "t", *AT]],
    "delete.sh --name=t --zone=z --queued": [[*QUEUED, "delete", "t", "--force", *AT]],
    "delete.sh --name=t --zone=z --slices=2": [[*QUEUED, "delete", "t", "--force", *AT]],
    "xpk.sh --cluster=c --name=t --zone=z --project=p --type=v6e-8 --slices=2 --image=i --env=A=1 "
    "--extra=--storage=s -- python -m x '--o=it is'": [
        ["xpk", "workload", "create", "--cluster=c", "--workload=t", "--zone=z", "--project=p",
         "--tpu-type=v6e-8", "--num-slices=2", "--docker-image=i", "--max-restarts=50",
         "--storage=s", "--command=exec env A=1 python -m x '--o=it is'"]
    ],
    "slurm.sh --name=t --gpus=8 --time=1:00 --env=A=1 --extra=--partition=p -- python '--o=a b'": [
        ["sbatch", "--job-name=t", "--nodes=1", "--ntasks=1", "--gpus-per-node=8", "--time=1:00",
         "--signal=B:USR1@300", "--requeue", "--open-mode=append", "--output=t-%j.log",
         "--partition=p", str(SCRIPTS / "slurm_job.sh"), "env", "A=1", "python", "--o=a b"]
    ],
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


@pytest.mark.parametrize("line", COMMANDS)
def test_exact_commands(cluster, line):
    (cluster.folder / "my dist").mkdir()
    (cluster.folder / "my dist/l-1.whl").touch()
    script, *arguments = shlex.split(line)
    cluster.run(script, *arguments)
    assert cluster.calls() == COMMANDS[line]
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    printed, _ = cluster.run(script, *flags, "--dry-run", *arguments[len(flags) :])
    assert cluster.calls() == []
    lines = [shlex.split(text) for text in printed.splitlines()]
    assert [words for words in lines if words[0] != "mkdir"] == COMMANDS[line]


def test_environment_sets_flags(cluster):
    settings = {"NAME": "t", "ZONE": "z", "TYPE": "v6e-8", "CAPACITY": "spot", "QUEUED": "1"}
    cluster.run("create.sh", **{f"TPU_{key}": value for key, value in settings.items()})
    cluster.run("create.sh", "--name=u", **{f"TPU_{key}": value for key, value in settings.items()})
    calls = cluster.calls()
    assert (
        calls[0] == COMMANDS["create.sh --name=t --zone=z --type=v6e-8 --capacity=spot --queued"][0]
    )
    assert calls[1][4:6] == ["create", "u"] and "--node-id=u" in calls[1]


def test_every_word_of_a_command_arrives(cluster):
    """Through the shell of a worker, the container's shell of xpk, and SLURM."""
    folder = cluster.folder / "lowrank_attn"
    folder.mkdir()
    (folder / "worker.sh").write_text("printf '%s\\0' \"$@\"")
    cluster.behave(python="")
    (cluster.folder / "bin/python").write_text("#!/bin/sh\nprintf '%s\\0' python \"$@\"")
    (cluster.folder / "bin/python").chmod(0o755)
    cluster.run("run.sh", *WHERE, "--", *ODD)
    cluster.run("xpk.sh", *WHERE, "--cluster=c", "--type=v6e-8", "--image=i", "--", *ODD)
    cluster.run("slurm.sh", "--name=t", "--", *ODD)
    over_ssh, over_xpk, over_slurm = cluster.calls()
    for call, first in ((over_ssh, ["start", ""]), (over_xpk, [])):
        line = next(word for word in call if word.startswith("--command=")).partition("=")[2]
        done = subprocess.run(
            ["bash", "-c", line], cwd=cluster.folder, env=cluster.environment, stdout=-1
        )
        assert done.stdout.decode().split("\0")[:-1] == [*first, *ODD]
    assert over_slurm[-len(ODD) :] == ODD


def test_collect_unpacks_the_snapshot(cluster):
    (cluster.folder / "runs/a").mkdir(parents=True)
    (cluster.folder / "runs/a/result.json").write_text("{}")
    (cluster.folder / "log").write_text("output\n")
    subprocess.run(["tar", "-cf", "object", "runs", "log"], cwd=cluster.folder, check=True)
    cluster.behave(gcloud='cp object "${@: -1}"')
    cluster.run("collect.sh", "--name=t", "--bucket=gs://b", "--to=to here")
    source = ["gcloud", "storage", "cp", "--quiet", "gs://b/t.tar", "to here/snapshot.tar"]
    assert cluster.calls() == [source]
    found = cluster.folder / "to here"
    assert sorted(path.name for path in found.iterdir()) == ["log", "runs"]
    assert (found / "runs/a/result.json").read_text() == "{}"
    printed, _ = cluster.run("collect.sh", "--name=t", "--bucket=gs://b", "--dry-run")
    assert cluster.calls() == [] and "gcloud storage cp --quiet gs://b/t.tar" in printed


@pytest.mark.parametrize("name", USER_SCRIPTS)
def test_help(cluster, name):
    printed, _ = cluster.run(name, "--help")
    assert f"tpu_scripts/{name} --" in printed and "--dry-run" in printed
    assert "set -e" not in printed
    assert "=... is needed; see --help" in cluster.run(name, code=2)[1]
    assert cluster.calls() == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("create.sh --typo=v5p-8", "unknown flag"),
        ("create.sh --env=A=1", "unknown flag --env"),
        ("run.sh --env=A", "unknown flag '--env=A'"),
        ("create.sh --type", "--type needs a value"),
        ("create.sh --delete", "unknown flag --delete"),
        ("create.sh v5p-8", "unexpected argument 'v5p-8'"),
        ("create.sh --type=v5p-8 --capacity=cheap", "--capacity=cheap: expected on-demand, spot"),
        ("create.sh --type=tpu7x-8", "GKE, see xpk.sh"),
        ("create.sh --type=v9-8", "--version="),
        ("create.sh --type=v6e-8 --slices=0", "--slices=0"),
        ("setup.sh --wheel=no.whl", "--wheel=no.whl is no file"),
        ("setup.sh --wheel=no.whl --revision=x", "choose one"),
        ("run.sh", "after --"),
        ("run.sh --bucket=b -- python", "expected gs://"),
        ("run.sh --bucket=gs://b --slices=2 -- python", "--bucket with --slices=2"),
        ("watch.sh --type=v6e-8 --delete -- python", "would delete the results"),
        ("xpk.sh --cluster=c --type=v6e-8 --image=i", "after --"),
    ],
)
def test_what_does_not_fit_is_refused(cluster, line, message):
    script, *arguments = shlex.split(line)
    assert message in cluster.run(script, *WHERE, *arguments, code=2)[1]
    assert cluster.calls() == []


@pytest.mark.parametrize("name", USER_SCRIPTS)
def test_a_failing_program_ends_the_script_with_its_code(cluster, name):
    fail = "echo 'ERROR: no quota' >&2; exit 7"
    cluster.behave(gcloud=fail, xpk=fail, sbatch=fail)
    arguments = {
        "create.sh": [*WHERE, "--type=v6e-8"],
        "watch.sh": [*WHERE, "--type=v6e-8", "--poll=0", "--tries=2", "--", "python"],
        "setup.sh": [*WHERE, "--repository=r"],
        "run.sh": [*WHERE, "--", "python"],
        "xpk.sh": [*WHERE, "--type=v6e-8", "--cluster=c", "--image=i", "--", "python"],
        "slurm.sh": ["--name=t", "--", "python"],
    }
    _, error = cluster.run(name, *arguments.get(name, WHERE), code=7)
    assert "ERROR: no quota" in error
    assert len(cluster.calls()) == (2 if name == "watch.sh" else 1)


def test_shellcheck():
    found = shutil.which(
        "shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if not found:
        pytest.skip("shellcheck is not installed")
    paths = sorted(SCRIPTS.glob("*.sh"))
    done = subprocess.run(
        [found, "--external-sources", f"--source-path={SCRIPTS}", *paths], stdout=-1, text=True
    )
    assert done.returncode == 0, done.stdout
