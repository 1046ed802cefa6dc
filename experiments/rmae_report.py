"""The rows of `experiments.rmae` as a table beside the published numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.common.record import markdown_table

# Table 3, for layers 0, 8, 15 and their mean as printed.
PUBLISHED = {
    (2, "psf"): (0.186, 0.247, 0.445, 0.293), (3, "psf"): (0.740, 0.738, 0.745, 0.741),
    (2, "mlp"): (0.035, 0.070, 0.058, 0.054), (3, "mlp"): (0.059, 0.114, 0.143, 0.105),
    (2, "llops"): (0.008, 0.032, 0.025, 0.022), (3, "llops"): (0.018, 0.040, 0.058, 0.038),
}  # fmt: skip
COLUMNS = (
    "settings", "degree", "layer", "method", "features", "rmae", "held_out", "frobenius",
    "held_out_frobenius", "parameters", "rate", "recall", "published",
)  # fmt: skip
NOTES = """\
`rmae`: mean |A_hat - A| / mean |A| over all pairs of the sampled queries and keys, which the
sketches were fitted to; `held out`: on as many others. `frobenius`: |A_hat - A|_F / |A|_F of the
sample, which fits minimise and of which `optimal` (the truncated singular value decomposition,
whose linear maps act on tensor powers) is the least of all sketches with so many features. `psf`: a
random product of projections, the mean of five draws: PolySketchFormer's own sketches of degree 3
do not exist, and of degree 2 have D^2 features. `mlp` and `llops` have parameters of their own for
queries and keys, and the best of the rates; t is the number of products that are summed into a
feature. `recall`: the accuracy of the model that gave queries and keys. Not published: the width of
the model and the number of features (ours are in the settings), how long fits were, and the formula
of the error. Attention inside the model is RMS-normalised.
"""


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Notes, and a row for each method with its layers and their mean."""
    found: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["settings"], int(row["degree"]), row["method"]), []).append(row)
    header = [
        "p", "method", "m", "rmae of layers", "mean", "published", "published mean", "held out",
        "frobenius", "held out", "parameters", "recall", "settings",
    ]  # fmt: skip
    lines: list[list[Any]] = []
    for (settings, degree, method), own in found.items():

        def numbers(name, own=own):
            return [float(row[name]) for row in own]

        def three(values):
            return ", ".join(f"{value:.3f}" for value in values)

        printed = PUBLISHED.get((degree, method), ())
        means = [f"{np.mean(numbers(name)):.3f}" for name in COLUMNS[5:9]]
        lines.append(
            [str(degree), method, own[0]["features"], three(numbers("rmae")), means[0]]
            + [three(printed[:3]), three(printed[3:]), means[1], means[2], means[3]]
            + [f"{float(own[0]['parameters']):,.0f}", str(own[0]["recall"]), settings]
        )
    return f"{NOTES}\n{markdown_table(header, lines)}\n"
