"""Programs in place of gcloud, xpk and SLURM's for tests, and the calls that are expected of them.

Each program records its arguments and then does what the test has written for it.
"""

import os
import pathlib
import subprocess

from toy_run import ROOT

SCRIPTS = ROOT / "tpu_scripts"
WHERE = ["--name=t", "--zone=z"]
AT = ["--zone=z", "--quiet"]
TPUS = ["gcloud", "compute", "tpus"]
STUB = r"""#!/usr/bin/env bash
printf '%s\x1f' "${0##*/}" "$@" >>"$CALLS"
printf '\x1e' >>"$CALLS"
if [[ -f $BEHAVIOUR/${0##*/} ]]; then source "$BEHAVIOUR/${0##*/}"; fi
"""


class Cluster:
    """The stubs, what they were called with, and the processes of a test."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.calls_file = folder / "calls"
        for name in ("gcloud", "xpk", "sbatch", "srun", "scancel", "scontrol"):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(STUB)
            path.chmod(0o755)
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TPU_")},
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "BEHAVIOUR": str(folder),
        }

    def behave(self, **programs):
        for name, text in programs.items():
            (self.folder / name).write_text(text)

    def start(self, script, *arguments, **environment):
        path = script if isinstance(script, pathlib.Path) else SCRIPTS / script
        return subprocess.Popen(
            [str(path), *map(str, arguments)], cwd=self.folder, text=True,
            env=self.environment | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, script, *arguments, code=0, **environment):
        """Runs a script; returns what it printed on stdout and stderr."""
        process = self.start(script, *arguments, **environment)
        out, error = process.communicate(timeout=30)
        assert process.returncode == code, error
        return out, error

    def calls(self):
        """The calls since the last time, each a list of words, the program first."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        self.calls_file.unlink(missing_ok=True)
        return [call.split("\x1f")[:-1] for call in text.split("\x1e")[:-1]]


def ssh(command, *flags):
    flags = [f"--command={command}", *flags, "--ssh-flag=-oServerAliveInterval=30"]
    return [*TPUS, "tpu-vm", "ssh", "t", "--worker=all", *flags, *AT]


def ssh_slices(command, *flags):
    words = ssh(command, *flags)
    return [*TPUS, "queued-resources", *words[4 : -len(AT)], "--node=all", *AT]


def scp(*words, worker="all"):
    return [*TPUS, "tpu-vm", "scp", *words, f"--worker={worker}", *AT]


VM = [*TPUS, "tpu-vm"]
QUEUED = [*TPUS, "queued-resources"]
V5E = ["--accelerator-type=v5litepod-8", "--version=v2-alpha-tpuv5-lite"]
V6E = ["--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e"]
LINE = "bash lowrank_attn/worker.sh"
