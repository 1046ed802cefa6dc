"""Curves of a run."""

import csv
import pathlib

METRICS = ("loss", "accuracy")


def plot_run(run_dir: str | pathlib.Path) -> pathlib.Path:
    """Draw loss and accuracy (where there is any) of every phase to `<run_dir>/curves.png`.

    Raises:
        ValueError: if the folder has no rows yet.
    """
    from matplotlib.figure import Figure

    run_dir = pathlib.Path(run_dir)
    curves = {
        (kind, path.stem.removesuffix(f"_{kind}")): rows
        for kind in ("train", "eval")
        for path in sorted(run_dir.glob(f"*_{kind}.csv"))
        if (rows := read_rows(path))
    }
    if not curves:
        raise ValueError(f"{run_dir} has no rows in *_train.csv or *_eval.csv to draw.")
    figure = Figure(figsize=(10, 4), layout="constrained")
    metrics = [name for name in METRICS if any(name in rows[0] for rows in curves.values())]
    for axis, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics):
        for (kind, phase), rows in curves.items():
            if metric in rows[0]:
                steps = [row["step"] for row in rows]
                style = {"train": "-", "eval": ".-"}[kind]
                axis.plot(steps, [row[metric] for row in rows], style, label=f"{phase} {kind}")
        axis.set(xlabel="step", ylabel=metric)
        if axis.lines:
            axis.legend()
    path = run_dir / "curves.png"
    figure.savefig(path, dpi=120)
    return path


def read_rows(path: pathlib.Path) -> list[dict[str, float]]:
    """The rows of a CSV file of numbers."""
    with open(path, newline="") as file:
        return [{name: float(text) for name, text in row.items()} for row in csv.DictReader(file)]
