"""Reading the folders of runs for `experiments.report`: finished, unfinished and damaged ones."""

import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from absl import logging

from experiments import presets
from experiments.common.plot import read_rows
from experiments.common.record import read_json
from experiments.lra_settings import Config

_RESULT_SETTINGS = [
    field.name for field in dataclasses.fields(Config) if not field.metadata["changes_result"]
]
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config)}
# Settings with a column of their own.
_COLUMNS = ("task", "kernel", "kernel_options", "preset", "steps", "pretrain_steps", "seed")


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: its folder, its record, and the rows of `<phase>_eval.csv` by phase."""

    folder: pathlib.Path
    record: Mapping[str, Any]
    curves: Mapping[str, list[dict[str, float]]]

    @property
    def config(self) -> Mapping[str, Any]:
        """All settings."""
        return self.record["config"]

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The final numbers."""
        return self.record["metrics"]

    @functools.cached_property
    def changes(self) -> str:
        """The settings without a column that differ from the preset's, as name=value."""
        expected = dict(_DEFAULTS)
        try:
            expected |= presets.resolve(
                self.config["preset"], self.config["task"], self.config["kernel"], "gpu"
            )[1]
        except (KeyError, ValueError) as error:  # a preset of another version
            logging.warning("%s: no preset to compare settings with (%s)", self.folder, error)
        left_out = {*_RESULT_SETTINGS, *_COLUMNS}
        return " ".join(
            f"{name}={value}"
            for name, value in sorted(self.config.items())
            if name not in left_out and (name not in expected or value != expected[name])
        )


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs with the same settings and data, one for each seed."""

    runs: list[Run]

    def mean(self, path: str) -> float | None:
        """The mean of a number of the record, named by its dotted path; None if a run lacks it."""
        numbers = [lookup(run.record, path) for run in self.runs]
        return statistics.fmean(numbers) if None not in numbers else None

    def percents(self, path: str) -> list[float]:
        """An accuracy of every run, in percent."""
        return [100 * lookup(run.record, path) for run in self.runs]

    def values(self, path: str) -> str:
        """The different values, sorted."""
        return ", ".join(sorted({str(lookup(run.record, path)) for run in self.runs}))


def lookup(record: Any, path: str) -> Any:
    """The value at a dotted path; None if it is not there."""
    for name in path.split("."):
        record = record.get(name) if isinstance(record, Mapping) else None
    return record


def read_runs(folder: pathlib.Path) -> tuple[list[Run], list[str]]:
    """The finished runs below a folder, and a line for each that is not finished.

    A record that is damaged, or of another experiment, is named in a warning and left out.
    """
    runs, unfinished = [], []
    for run_dir in sorted({p.parent for n in ("run", "result") for p in folder.rglob(f"{n}.json")}):
        path = run_dir / "result.json"
        if not path.exists():
            unfinished.append(_progress(run_dir))
            continue
        try:
            record = read_json(path)
            _check(record)
        except (ValueError, TypeError, KeyError, OSError) as error:
            logging.warning(
                "left out: %s is damaged or no result of experiments.lra (%s: %s)",
                path, type(error).__name__, error,
            )  # fmt: skip
            continue
        runs.append(Run(run_dir, record, _curves(run_dir)))
    return runs, unfinished


def group_runs(runs: list[Run]) -> list[Group]:
    """Runs that differ in the seed only, together; of one seed's runs the last to end."""
    groups: dict[str, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: str(run.record.get("ended"))):
        settings = {
            name: value
            for name, value in sorted(run.config.items())
            if name != "seed" and name not in _RESULT_SETTINGS
        }
        seeds = groups.setdefault(f"{settings} {run.metrics.get('data')}", {})
        earlier = seeds.get(run.config["seed"])
        if earlier is not None:
            logging.warning(
                "the same settings and seed twice: using %s, not %s", run.folder, earlier.folder
            )
        seeds[run.config["seed"]] = run
    return [Group([seeds[seed] for seed in sorted(seeds)]) for seeds in groups.values()]


def _check(record: Any) -> None:
    """Raise a ValueError, TypeError or KeyError unless this is a record of `experiments.lra`."""
    config = record["config"]
    for name in (*_COLUMNS, "objective", "num_layers", "width"):
        kind = type(_DEFAULTS[name])
        if not isinstance(config[name], kind):
            raise TypeError(f"config.{name}={config[name]!r}, expected {kind.__name__}")
    for path in ("metrics.test_accuracy", "metrics.validation_accuracy"):
        if not 0 <= lookup(record, path) <= 1:
            raise ValueError(f"{path}={lookup(record, path)!r}, expected 0 to 1")
    if not isinstance(record["command"], str):
        raise TypeError(f"command={record['command']!r}")


def _curves(run_dir: pathlib.Path) -> dict[str, list[dict[str, float]]]:
    curves = {}
    for path in sorted(run_dir.glob("*_eval.csv")):
        try:
            curves[path.stem.removesuffix("_eval")] = read_rows(path)
        except (ValueError, TypeError, OSError) as error:
            logging.warning("no curve of %s, which is damaged: %s", path, error)
    return curves


def _progress(run_dir: pathlib.Path) -> str:
    """How far an unfinished run is, from the last whole line of its newest log."""
    logs = [run_dir / f"{phase}_train.csv" for phase in ("train", "pretrain")]
    for path in logs:
        text = path.read_text(errors="replace") if path.exists() else ""
        lines = text.splitlines(keepends=True)[1:]
        steps = [line.split(",")[0] for line in lines if line.endswith("\n")]
        if steps:
            return f"{run_dir}: in phase {path.stem.removesuffix('_train')}, step {steps[-1]}"
    return f"{run_dir}: no step yet"
