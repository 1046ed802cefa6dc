"""Published accuracies on Long Range Arena, the rows that `experiments.report` sets beside ours.

Every number is in percent, as printed. Where a publication prints the mean over its tasks it is
kept too, and a test recomputes it.
"""

from typing import NamedTuple

TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")


class Publication(NamedTuple):
    """One table of a publication.

    Attributes:
        source: who printed it, and where.
        protocol: how its models were made, in a few words.
        steps: of training, as far as it is stated.
        tasks: the columns, in the order of the numbers.
        rows: method -> accuracies of `tasks`, then their mean as printed, if it was.
    """

    source: str
    protocol: str
    steps: str
    tasks: tuple[str, ...]
    rows: dict[str, tuple[float, ...]]


PUBLICATIONS = (
    Publication(
        "LLoPS, table 2",
        # its text: the best of prior papers' numbers and of own training; sizes are not stated
        "self-pretraining; some cells quoted from papers that train from scratch",
        "",
        ("image", "text", "retrieval", "listops", "pathfinder"),
        {
            "softmax": (64.36, 82.96, 83.23, 48.49, 70.45, 69.90),
            "Nyströmformer": (58.66, 66.19, 83.90, 45.46, 69.71, 64.78),
            "Skyformer": (58.54, 65.25, 79.55, 46.77, 72.73, 64.57),
            "Hedgehog": (52.68, 66.59, 82.24, 41.03, 74.16, 63.34),
            "PolaFormer": (47.74, 73.06, 80.50, 38.86, 70.53, 62.14),
            "Flatten Transformer": (51.48, 66.13, 78.72, 38.51, 70.27, 61.02),
            "PolySketchFormer": (51.40, 64.60, 81.10, 43.00, 66.20, 61.26),
            "BASED": (51.13, 65.73, 80.76, 43.55, 72.98, 62.83),
            "LLoPS, p = 4": (57.54, 73.94, 82.17, 48.29, 73.84, 67.16),
        },
    ),
    Publication(
        "Skyformer (Chen et al. 2021), table 1",
        "from scratch, 2 layers of width 64",
        "50,000",
        ("text", "listops", "retrieval", "pathfinder", "image"),
        {
            "softmax": (61.95, 38.37, 80.69, 65.26, 40.57, 57.37),
            "Kernelized Attention": (60.22, 38.78, 81.77, 70.73, 41.29, 58.56),
            "Nyströmformer": (64.83, 38.51, 80.52, 69.48, 41.30, 58.93),
            "Performer": (64.19, 38.02, 80.04, 66.30, 41.43, 58.00),
            "Reformer": (62.93, 37.68, 78.99, 66.49, 48.87),
            "BigBird": (63.86, 39.25, 80.28, 68.72, 43.16),
            "Skyformer": (64.70, 38.69, 82.06, 70.73, 40.77, 59.39),
        },
    ),
    Publication(
        "Never Train from Scratch (Amos et al. 2024)",
        "self-pretraining, sizes of Long Range Arena",
        "200 epochs or 24 hours a phase",
        TASKS,
        {
            "softmax, masked": (59.75, 89.27, 88.64, 74.22, 88.45, 87.73, 81.34),
            "softmax, causal": (59.15, 88.81, 90.38, 76.00, 88.49, 88.05, 81.81),
            "softmax, rotary, masked": (61.49, 91.02, 91.57, 86.04, 94.16, 92.98, 86.21),
        },
    ),
    Publication(
        "Never Train from Scratch (Amos et al. 2024)",
        "from scratch",
        "200 epochs or 24 hours",
        TASKS,
        {
            "softmax, rotary": (47.90, 79.08, 82.31, 75.04, 76.64, 84.72, 74.28),
            "S4": (59.60, 86.82, 90.90, 88.65, 94.20, 96.35, 86.09),
        },
    ),
    Publication(
        "Long Range Arena (Tay et al. 2021), table 1",
        "from scratch, sizes of its appendix",
        "",
        TASKS[:-1],
        {"softmax": (36.37, 64.27, 57.46, 42.44, 71.40, 54.39)},
    ),
)
