"""Scores as a table beside published ones."""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from experiments.common.record import markdown_table
from experiments.published_zero_shot import ROWS, SOURCE, TASKS

# What the columns are; where a publication does not say, what fits the height of its numbers.
METRICS = {
    "hellaswag": "acc_norm",
    "arc_challenge": "acc_norm",
    "fda": "contains",
    "swde": "contains",
    "squad_completion": "contains",
}


@dataclasses.dataclass(frozen=True)
class Score:
    """The result of a task.

    Attributes:
        metric: lm_eval's name: acc, acc_norm (by bytes of the choices), or contains.
        percent: its mean over the items.
        error: its standard error, in percent; None for a single item.
        items: how many.
        version: of the task.
    """

    metric: str
    percent: float
    error: float | None
    items: int
    version: str

    @classmethod
    def read(cls, task: str, found: Mapping[str, Any]) -> "Score":
        """From what lm_eval returns."""
        metric = METRICS.get(task, "acc")
        mean = float(found["results"][task][f"{metric},none"])
        items = int(found["n-samples"][task]["effective"])
        error = 100 * math.sqrt(mean * (1 - mean) / (items - 1)) if items > 1 else None
        return cls(metric, 100 * mean, error, items, str(found["versions"][task]))


def to_markdown(model: str, scores: Mapping[str, Score], limit: int | None) -> str:
    """A table with a row for the model, its standard errors, and every published row."""
    head = ["size", "model", *TASKS.values(), "mean"]
    own = [f"{scores[name].percent:.2f}" if name in scores else "" for name in TASKS]
    complete = len(scores) == len(TASKS)
    mean = f"{statistics.mean(s.percent for s in scores.values()):.2f}" if complete else ""
    errors = [
        f"± {scores[name].error:.2f}" if name in scores and scores[name].error is not None else ""
        for name in TASKS
    ]
    rows = [["", model, *own, mean], ["", "", *errors, ""]]
    rows += [[size, name, *map("{:.2f}".format, row)] for (size, name), row in ROWS.items()]
    used = [
        f"{TASKS[name]}: {name} version {s.version}, {s.metric}, {s.items} items"
        for name, s in scores.items()
    ]
    notes = [
        "Percent; ± is the standard error.",
        f"{'; '.join(used)}.",
        f"Rows with a size: {SOURCE}; its metrics and task versions are not stated.",
    ]
    if limit is not None:
        notes.insert(0, f"Only the first {limit} items of each task: no result.")
    return "\n".join([markdown_table(head, rows), "", *notes]) + "\n"
