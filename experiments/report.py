"""One table of finished runs beside published ones, as markdown, CSV and one HTML file with curves.

    python -m experiments.report --runs=runs --out=experiments/results/lra

Every folder below `--runs` with a `run.json` is a run. Runs that differ in the seed only are one
row: mean and standard deviation of their test accuracies, in percent. Unfinished runs are listed
apart; a damaged record is named in a warning and left out.
"""

import dataclasses
import pathlib
import statistics
import sys
from typing import Any

from experiments.common import flags
from experiments.common.flags import setting
from experiments.common.record import write_csv, write_text
from experiments.published import PUBLICATIONS, TASKS
from experiments.report_html import to_html
from experiments.report_runs import Group, Run, group_runs, read_runs

COLUMNS = (
    "task", "kernel", "options", "accuracy", "spread", "n", "at chance", "preset", "protocol",
    "source", "steps", "validation", "seconds", "tokens/s", "input wait", "host", "device", "jax",
    "commit",
)  # fmt: skip
NOTES = (
    "`accuracy` is on the test part, in percent: the mean over `n` seeds, with their standard "
    "deviation as `spread`. `at chance` counts the runs that are within 3 standard errors of "
    "always saying the most frequent label. `steps` are of self-pretraining + on labels.",
    "`tokens/s` counts real tokens, not padding. `input wait` is the share of training time in "
    "which the loop stood waiting for a batch, `host` an upper bound of the share in which the "
    "device may have had nothing to do.",
    "Rows with a `source` are as printed there. Sizes and steps differ: compare rows of one "
    "protocol.",
)

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Collect finished runs into one table beside published ones."""

    runs: str = setting("runs", "folder with the runs' folders")
    out: str = setting("experiments/results/runs", "files to write, without .md, .csv and .html")


def own_row(group: Group) -> Row:
    """The row of one group of runs."""
    run = group.runs[0]
    config = run.config
    accuracies = group.percents("metrics.test_accuracy")
    flagged = [run.metrics.get("at_chance") for run in group.runs]
    protocol = (
        f"self-pretraining, {config['objective']}" if config["pretrain_steps"] else "from scratch"
    )
    steps = [f"{config[name]:,}" for name in ("pretrain_steps", "steps") if config[name]]
    return {
        "task": config["task"],
        "kernel": config["kernel"],
        "options": config["kernel_options"],
        "preset": f"{config['preset']} {run.changes}".strip(),
        "protocol": f"{protocol}, {config['num_layers']} layers of width {config['width']}",
        "steps": " + ".join(steps),
        "accuracy": statistics.fmean(accuracies),
        "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "n": len(accuracies),
        "at chance": None if None in flagged else flagged.count(True),
        "validation": statistics.fmean(group.percents("metrics.validation_accuracy")),
        "seconds": group.mean("seconds"),
        "tokens/s": group.mean("metrics.timing.tokens_per_second"),
        "input wait": group.mean("metrics.timing.input_wait_fraction"),
        "host": group.mean("metrics.timing.host_fraction"),
        "device": group.values("device"),
        "jax": group.values("versions.jax"),
        "commit": group.values("git_commit"),
    }


def published_rows(task: str) -> list[Row]:
    """What is printed for a task."""
    return [
        {
            "task": task,
            "kernel": method,
            "protocol": publication.protocol,
            "steps": publication.steps,
            "accuracy": numbers[publication.tasks.index(task)],
            "source": publication.source,
        }
        for publication in PUBLICATIONS
        if task in publication.tasks
        for method, numbers in publication.rows.items()
    ]


def make_rows(groups: list[Group]) -> list[Row]:
    """All rows: by task, ours first, the best first, then the published ones as printed."""
    own = sorted(map(own_row, groups), key=lambda row: -row["accuracy"])
    tasks = sorted({row["task"] for row in own}, key=lambda task: (TASKS + (task,)).index(task))
    rows = []
    for task in tasks:
        rows += [row for row in own if row["task"] == task] + published_rows(task)
    return [{name: row.get(name) for name in COLUMNS} for row in rows]


def cell(name: str, value: Any) -> str:
    """The text of a value of a column."""
    if name in ("accuracy", "spread", "validation") and value is not None:
        return f"{value:.2f}"
    if name == "at chance" and value is not None:
        return f"{value} AT CHANCE" if value else "no"
    if name == "commit" and value:
        return ", ".join(commit[:7] for commit in value.split(", "))
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def reference_lines(runs: list[Run]) -> list[str]:
    """What trivial predictors reach, a line each."""
    return sorted(
        {
            f"{run.config['task']}, {name}: {accuracy:.1%}"
            for run in runs
            for name, accuracy in run.metrics.get("reference", {}).items()
        }
    )


def to_markdown(sections: dict[str, list[str]], table: list[list[str]]) -> str:
    """The table, the notes, and the other sections as lists."""
    escaped = [[text.replace("|", "\\|") for text in row] for row in table]
    lines = [f"| {' | '.join(row)} |" for row in escaped]
    lines.insert(1, "|" + "---|" * len(COLUMNS))
    lines += [line for note in NOTES for line in ("", note)]
    for title, items in sections.items():
        lines += ["", f"{title}:", "", *(f"* {item}" for item in items)]
    return "\n".join(lines) + "\n"


def write_report(runs: list[Run], unfinished: list[str], out: pathlib.Path) -> None:
    """Write `<out>.csv` (exact numbers), `<out>.md` and `<out>.html` (with curves)."""
    groups = group_runs(runs)
    rows = make_rows(groups)
    table = [list(COLUMNS), *([cell(name, row[name]) for name in COLUMNS] for row in rows)]
    sections = {
        "What trivial predictors reach on the same test rows": reference_lines(runs),
        "Unfinished runs, which are in no row": unfinished,
        "Commands": [f"`{run.record['command']}`" for group in groups for run in group.runs],
    }
    sections = {title: items for title, items in sections.items() if items}
    texts = {
        "md": to_markdown(sections, table),
        "html": to_html(table, NOTES, sections, groups),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(f"{out}.csv", COLUMNS, rows)
    for suffix, text in texts.items():
        write_text(f"{out}.{suffix}", text)


def main(argv: list[str]) -> None:
    """Run the command line; without a finished run it ends with exit code 2."""
    config = flags.parse(Config, argv)
    runs, unfinished = read_runs(pathlib.Path(config.runs))
    if not runs:
        found = "".join(f"\n  unfinished: {line}" for line in unfinished)
        print(
            f"error: no finished run below {config.runs}: finish one first{found}", file=sys.stderr
        )
        sys.exit(2)
    write_report(runs, unfinished, pathlib.Path(config.out))


if __name__ == "__main__":
    main(sys.argv)
