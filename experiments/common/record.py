"""The record of a finished run: what was run, on what, and what came out."""

import csv
import datetime
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

import lowrank_attn
from experiments.common import flags
from experiments.common.plot import read_rows

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file so that it is either absent, as it was, or complete."""
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON so that the file is either absent, as it was, or complete."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def write_csv(
    path: str | os.PathLike[str], columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Write a table as `write_text` does; what a row lacks stays empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def read_csv(path: str | os.PathLike[str], columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows that `write_csv` wrote, as texts; none if there is no file.

    Raises:
        ValueError: if the file has other columns.
    """
    if not pathlib.Path(path).exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != tuple(columns):
            raise ValueError(f"out: {path} is not a table of this experiment; name another file.")
        return list(reader)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The lines of a markdown table, without a line end after the last."""
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def code_version(*files: str | os.PathLike[str]) -> str:
    """12 hexadecimal digits that change with the library and with these files."""
    library = pathlib.Path(lowrank_attn.__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*library.rglob("*.py"), *map(pathlib.Path, files)]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


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
