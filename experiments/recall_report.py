"""The rows of `experiments.recall` as a table beside the published numbers, and a plot."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.common.record import markdown_table
from experiments.recall_cells import PUBLISHED, Cell
from experiments.recall_data import MIXES

SLICES = tuple(dict.fromkeys(segment[:2] for mix in MIXES.values() for segment in mix.test))
COLUMNS = (
    *Cell._fields, "protocol", "learning_rate", "seed", "epoch", "step", "loss", "accuracy", "rank",
    *(f"accuracy_{length}_{pairs}" for length, pairs in SLICES), "forward_ms", "seconds", "runs",
    "device",
)  # fmt: skip
HEADER = (
    "kernel", "p", "m", "width", "data", "accuracy", "of 256,64", "of 1024,256", "published",
    "rate", "epochs", "effective rank", "forward ms", "seconds", "protocol",
)  # fmt: skip
NOTES = """\
Two layers (gated convolution, one head of attention) on multi-query associative recall, with the
published data, batches of 256 in their order, AdamW with weight decay 0.1, cosine per epoch, no
warm-up and no clipping. `accuracy`: percent, the mean over the test's (length, pairs), at the best
rate, then the standard deviation over seeds if there are several; two of the mix are given apart
(1024,256 is four times longer than what is trained on). `published` does not say which of them it
is. `effective rank`: of the keys' features before and after training, of the training data's
longest sequences. `forward ms`: the attention layer alone, for one batch of
the longest training sequences. `seconds`: training and tests of all rates and seeds of the row at
once. `llops_paper`: the plain product of projections with parameters for queries and keys, after an
RMS norm of both, whose output is RMS-normalised; the paper does not say how it normalises.
Differences from the published protocol, where there are any, are in the last column, which begins
with epochs (32 are published) and the share of the data.
"""


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The cell of a row of the CSV file."""
    return Cell(row["kernel"], int(row["p"]), int(row["m"]), int(row["width"]), row["data"])


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The cells of the table for one cell and protocol, from all of its rows."""
    last: dict[tuple[float, int], Mapping[str, Any]] = {}
    for row in rows:
        last[float(row["learning_rate"]), int(row["seed"])] = row
    by_rate: dict[float, list[Mapping[str, Any]]] = {}
    for (rate, _), row in last.items():
        by_rate.setdefault(rate, []).append(row)
    accuracy = {rate: [float(row["accuracy"]) for row in found] for rate, found in by_rate.items()}
    rate = max(accuracy, key=lambda rate: np.mean(accuracy[rate]))
    best, cell = by_rate[rate], cell_of(rows[0])

    def mean(name, found=best):
        numbers = [float(row[name]) for row in found if row[name] != ""]
        return float(np.mean(numbers)) if numbers else float("nan")

    def percent(name):
        return "" if np.isnan(mean(name)) else f"{100 * mean(name):.1f}"

    first = [row for row in rows if int(row["epoch"]) == 0 and float(row["learning_rate"]) == rate]
    spread = f" ± {100 * np.std(accuracy[rate]):.1f}" if len(best) > 1 else ""
    ranks = [mean("rank", first), mean("rank")]
    seconds = {(row["epoch"], row["runs"]): float(row["seconds"]) for row in rows}
    return {
        "kernel": cell.kernel,
        "p": str(cell.p or ""),
        "m": str(cell.m or ""),
        "width": str(cell.width),
        "data": cell.data,
        "accuracy": percent("accuracy") + spread,
        "of 256,64": percent("accuracy_256_64"),
        "of 1024,256": percent("accuracy_1024_256"),
        "published": str(PUBLISHED.get(cell[:4], "")) if cell.data == "mix" else "",
        "rate": f"{rate:.3g}",
        "epochs": f"{mean('epoch'):.3g}",
        "effective rank": "" if np.isnan(ranks[1]) else f"{ranks[0]:.1f} → {ranks[1]:.1f}",
        "forward ms": f"{mean('forward_ms'):.3f}",
        "seconds": f"{sum(seconds.values()):.1f} for {len(last)} runs",
        "protocol": rows[0]["protocol"],
    }


def markdown(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[Cell]]) -> str:
    """Notes, and a table for each group of cells that has rows."""
    by_cell: dict[tuple[Cell, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault((cell_of(row), row["protocol"]), []).append(row)
    text = NOTES
    for name, cells in groups.items():
        lines = [
            summary(found)
            for cell in cells
            for (known, _), found in by_cell.items()
            if known == cell
        ]
        if lines:
            table = markdown_table(HEADER, ([x[column] for column in HEADER] for x in lines))
            text += f"\n## {name}\n\n{table}\n"
    return text


def plot(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Accuracy of every finished run against the effective rank of its features, and by epoch."""
    from matplotlib.figure import Figure

    runs: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (cell_of(row), row["protocol"], row["learning_rate"], row["seed"])
        runs.setdefault(key, []).append(row)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    ranks, curves = figure.subplots(1, 2, sharey=True)
    for kernel in dict.fromkeys(key[0].kernel for key in runs):
        own = [found[-1] for key, found in runs.items() if key[0].kernel == kernel]
        points = [(float(row["rank"]), float(row["accuracy"])) for row in own]
        ranks.scatter(*zip(*points), label=kernel, s=12)
    best: dict[Cell, list[Mapping[str, Any]]] = {}
    for (cell, *_), found in runs.items():
        if cell.p and cell.width == 128 and cell.m == 256:
            so_far = best.get(cell)
            if so_far is None or float(found[-1]["accuracy"]) > float(so_far[-1]["accuracy"]):
                best[cell] = found
    for cell, found in best.items():
        steps, accuracies = zip(*((int(row["step"]), float(row["accuracy"])) for row in found))
        label = f"{cell.kernel} p={cell.p} {cell.data}"
        curves.plot(steps, accuracies, ".-", label=label)
    ranks.set(xscale="log", xlabel="effective rank of the keys' features", ylabel="accuracy")
    curves.set(xlabel="step, best rate")
    for axis in (ranks, curves):
        if axis.has_data():
            axis.legend(fontsize=7)
    figure.savefig(pathlib.Path(path), dpi=110)
