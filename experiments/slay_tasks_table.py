"""The table and the plot of `experiments.slay_tasks`, beside the paper's numbers."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.common.record import markdown_table

# Accuracies as printed: softmax, spherical Yat, Performer, Linear, SLAY; None: it did not run.
PUBLISHED_KERNELS = ("softmax", "yat_spherical", "favor_relu", "elu", "slay")
PUBLISHED: dict[str, Sequence[float] | None] = {
    "copy": (1.0, 1.0, 1.0, 1.0, 1.0),
    "sort": (0.28, 0.24, 0.27, 0.26, 0.29),
    "reverse": (0.51, 0.33, 0.09, 0.05, 0.42),
    "retrieval": (1.0, 1.0, 1.0, 1.0, 1.0),
    "kv_recall": (0.02, 0.02, 0.02, 0.02, 0.02),
    "first_token": (1.0, 1.0, 1.0, 0.97, 1.0),
    "selective_copy": (0.88, 0.88, 0.88, 0.88, 0.88),
    "long_copy": (1.0, 1.0, 1.0, 1.0, 1.0),
    "distant_match": (1.0, 1.0, 1.0, 0.99, 1.0),
    "multihop": (0.04, 0.04, 0.03, 0.03, 0.04),
    "stack": (0.75, 0.75, 0.76, 0.75, 0.76),
    "induction": (0.02, 0.02, 0.02, 0.01, 0.03),
    "pattern": (0.91, 0.91, 0.91, 0.91, 0.91),
    "counting": (0.72, 0.78, 0.81, 0.83, 0.74),
    "parity": (0.49, 0.49, 0.49, 0.49, 0.49),
    "addition": (0.78, 0.68, 0.84, 0.91, 0.86),
    "modular": (0.15, 0.16, 0.15, 0.15, 0.20),
    "bigram": None,
    "majority": (0.78, 0.75, 0.82, 0.82, 0.84),
    "noisy_copy": (1.0, 1.0, 1.0, 1.0, 1.0),
    "compression": (0.59, 0.59, 0.59, 0.59, 0.59),
    "histogram": (0.87, 0.87, 0.87, 0.87, 0.87),
}
NEAR = 0.05  # a mean is called as published within so much


def published(task: str, kernel: str) -> float | None:
    """The printed accuracy, if there is one."""
    numbers = PUBLISHED[task]
    if numbers is None or kernel not in PUBLISHED_KERNELS:
        return None
    return numbers[PUBLISHED_KERNELS.index(kernel)]


def unique(rows: Iterable[Mapping[str, Any]], column: str) -> list[str]:
    """The values of a column, in order of appearance."""
    return list(dict.fromkeys(row[column] for row in rows))


def accuracies(rows: Iterable[Mapping[str, Any]], task: str, kernel: str) -> list[float]:
    """Of all seeds."""
    chosen = (row for row in rows if (row["task"], row["kernel"]) == (task, kernel))
    return [float(row["accuracy"]) for row in chosen]


def category_means(rows: Sequence[Mapping[str, Any]], column: str | None = None) -> dict:
    """(category, kernel) -> mean over tasks of the means over seeds.

    Args:
        rows: of the CSV file.
        column: of what; None: the paper's accuracies, for the tasks and kernels that it has.
    """
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        value = published(row["task"], row["kernel"]) if column is None else row[column]
        if value is not None:
            place = found.setdefault((row["category"], row["kernel"]), {})
            place.setdefault(row["task"], []).append(float(value))
    return {
        place: float(np.mean([np.mean(values) for values in tasks.values()]))
        for place, tasks in found.items()
    }


def comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """One paragraph on what comes out as printed and what does not."""
    near: list[str] = []
    far: list[str] = []
    for task in unique(rows, "task"):
        for kernel in unique(rows, "kernel"):
            printed, ours = published(task, kernel), accuracies(rows, task, kernel)
            if printed is None or not ours:
                continue
            mean = float(np.mean(ours))
            text = f"{task}, {kernel} {mean:.2f} ({printed:.2f})"
            (near if abs(mean - printed) <= NEAR else far).append(text)
    total = len(near) + len(far)
    return f"Within {NEAR} of the paper: {len(near)} of {total} means. Further away, ours " + (
        f"(printed): {'; '.join(far)}." if far else "(printed): none."
    )


def table(rows: Sequence[Mapping[str, Any]], variant: str, steps: int) -> str:
    """Means by category and by task, as markdown."""
    kernels = unique(rows, "kernel")
    sizes = {row["kernel"]: row["features"] for row in rows}
    header = [f"{kernel}, M = {sizes[kernel]}" if sizes[kernel] else kernel for kernel in kernels]
    compared = [row for row in rows if PUBLISHED[row["task"]] or variant == "repaired"]
    ours, printed = category_means(compared, "accuracy"), category_means(compared)
    beside = variant == "published"

    def cell(mean, spread, other):
        text = f"{mean:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")
        return text + (f" ({other:.2f})" if beside and other is not None else "")

    by_category = [
        [category]
        + [
            cell(ours[category, kernel], None, printed.get((category, kernel)))
            if (category, kernel) in ours
            else ""
            for kernel in kernels
        ]
        for category in unique(compared, "category")
    ]
    by_task = []
    for task in unique(rows, "task"):
        known = next(row for row in rows if row["task"] == task)
        line = [task, f"{float(known['majority']):.3f}", f"{float(known['ceiling']):.3f}"]
        for kernel in kernels:
            found = accuracies(rows, task, kernel)
            line.append(
                cell(np.mean(found), np.std(found), published(task, kernel)) if found else ""
            )
        by_task.append(line)
    what = {
        "published": "as the authors define them, in brackets the paper's accuracies",
        "repaired": "repaired (`experiments/synthetic/repaired.py` says how); not in the paper",
    }[variant]
    lines = [
        f"Accuracy after {steps} steps on 22 synthetic tasks, {what}.",
        "Means over seeds, by task ± their standard deviation. *majority*: always the most",
        "frequent target of a position; *ceiling*: the best that a causal model can expect. M:",
        "features of a head of 16; the state of a head has M (16 + 1) numbers. Published means",
        "leave out `bigram`, which did not run there.",
        "",
        *([comparison(rows), ""] if beside else []),
        markdown_table(["category", *header], by_category),
        "",
        markdown_table(["task", "majority", "ceiling", *header], by_task),
    ]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Bars of the means by category, with the majority baseline and the ceiling."""
    from matplotlib.figure import Figure

    kernels, categories = unique(rows, "kernel"), unique(rows, "category")
    means, place = category_means(rows, "accuracy"), np.arange(len(categories))
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axis = figure.subplots()
    for number, kernel in enumerate(kernels):
        heights = [means.get((category, kernel), np.nan) for category in categories]
        axis.bar(place + (number + 0.5) * 0.8 / len(kernels) - 0.4, heights, 0.8 / len(kernels),
                 label=kernel)  # fmt: skip
    for column, style in (("majority", "k:"), ("ceiling", "k-")):
        levels = category_means([row for row in rows if row["kernel"] == kernels[0]], column)
        for x, category in zip(place, categories):
            if (category, kernels[0]) in levels:
                label = column if x == 0 else None
                axis.plot([x - 0.45, x + 0.45], [levels[category, kernels[0]]] * 2, style,
                          label=label)  # fmt: skip
    axis.set(ylabel="accuracy", ylim=(0, 1.02))
    axis.set_xticks(place, categories)
    axis.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.18))
    figure.savefig(path, dpi=110)
