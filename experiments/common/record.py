"""The record of a finished run: what was run, on what, and what came out."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax

from experiments.common import flags
from experiments.common.plot import read_rows

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON so that the file is either absent, as it was, or complete."""
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: str | os.PathLike[str]) -> Any:
    """What `write_json` wrote."""
    return json.loads(pathlib.Path(path).read_text())


def write_result(
    path: str | os.PathLike[str],
    config: Any,
    metrics: Mapping[str, Any],
    *,
    started: float,
    seconds: float,
) -> dict[str, Any]:
    """Write the record of a run as JSON, in one piece, and return it.

    Args:
        path: the file, such as `<run>/result.json`.
        config: the dataclass of settings.
        metrics: the final numbers by name.
        started: when the first process of the run started, seconds since the epoch.
        seconds: time spent in training, over all the processes of the run.
    """
    device = jax.local_devices()[0]
    commit, dirty = git_state()
    record = {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "config": flags.to_dict(config),
        "config_hash": flags.config_hash(config),
        "git_commit": commit,
        "git_dirty": dirty,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "device": device.device_kind,
        "platform": device.platform,
        "device_count": jax.device_count(),
        "started": _utc(started),
        "ended": _utc(datetime.datetime.now().timestamp()),
        "seconds": seconds,
        "metrics": dict(metrics),
    }
    write_json(path, record)
    return record


def timing(run_dir: pathlib.Path, phase: str) -> dict[str, float]:
    """Means over a phase of what `log.Clock` measured, weighted by time.

    The first row, which holds the first dispatches, is left out if there are others.
    """
    rows = read_rows(run_dir / f"{phase}_timing.csv")
    rows = rows[1:] or rows
    seconds = sum(row["seconds"] for row in rows)
    names = ("tokens_per_second", "input_wait_fraction", "host_fraction")
    return {name: sum(row[name] * row["seconds"] for row in rows) / seconds for name in names}


def git_state() -> tuple[str | None, bool | None]:
    """The commit of this code, and whether tracked files differ; (None, None) outside git."""
    commit = _git("rev-parse", "HEAD") if _git("ls-files", "--error-unmatch", __file__) else None
    status = _git("status", "--porcelain", "--untracked-files=no")
    return (None, None) if commit is None or status is None else (commit, status != "")


def _git(*arguments: str) -> str | None:
    folder = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
