"""Collects finished runs into one table, as markdown and CSV.

    python -m experiments.report --runs=runs --out=experiments/results/listops

Every folder below `--runs` with a `result.json` becomes a row.
"""

import csv
import dataclasses
import pathlib
import sys
from typing import Any

from experiments.common import flags
from experiments.common.flags import setting
from experiments.common.record import read_json

COLUMNS = {
    "task": "config.task",
    "kernel": "config.kernel",
    "options": "config.kernel_options",
    "preset": "config.preset",
    "steps": "config.steps",
    "seed": "config.seed",
    "test accuracy": "metrics.test_accuracy",
    "validation accuracy": "metrics.validation_accuracy",
    "seconds": "seconds",
    "tokens/s": "metrics.timing.tokens_per_second",
    "input wait": "metrics.timing.input_wait_fraction",
    "host": "metrics.timing.host_fraction",
    "device": "device",
    "jax": "versions.jax",
    "commit": "git_commit",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Collect finished runs into one table."""

    runs: str = setting("runs", "folder with the runs' folders")
    out: str = setting("experiments/results/runs", "files to write, without .md and .csv")


def lookup(record: Any, path: str) -> Any:
    """The value at a dotted path; None if it is not there."""
    for name in path.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    return record


def text(value: Any) -> str:
    """A cell of the table."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def write_report(records: list[dict[str, Any]], out: pathlib.Path) -> None:
    """Write `<out>.csv` (exact numbers) and `<out>.md` (the table, reference lines, commands)."""
    rows = [{name: lookup(r, path) for name, path in COLUMNS.items()} for r in records]
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS))
        writer.writeheader()
        writer.writerows(rows)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(map(text, row.values())) + " |" for row in rows]
    lines += [
        "",
        "`tokens/s` counts real tokens, not padding. `input wait` is the share of training time in "
        "which the loop stood waiting for a batch, `host` an upper bound of the share in which the "
        "device may have had nothing to do.",
        "",
        "What trivial predictors reach on the same test rows:",
        "",
    ]
    lines += sorted(
        {
            f"* {r['config']['task']}, {name}: {accuracy:.1%}"
            for r in records
            for name, accuracy in (lookup(r, "metrics.reference") or {}).items()
        }
    )
    lines += ["", "Commands:", ""]
    lines += [f"    {record['command']}" for record in records]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main(argv: list[str]) -> None:
    """Run the command line."""
    config = flags.parse(Config, argv)
    paths = sorted(pathlib.Path(config.runs).rglob("result.json"))
    if not paths:
        print(f"error: no result.json below {config.runs}: finish a run first", file=sys.stderr)
        sys.exit(2)
    write_report([read_json(path) for path in paths], pathlib.Path(config.out))


if __name__ == "__main__":
    main(sys.argv)
