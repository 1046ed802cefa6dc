"""Published zero-shot scores, the rows that `experiments.zero_shot` sets beside ours.

Every number is in percent, as printed. Means are as printed too, and a test recomputes them.
"""

TASKS = {
    "winogrande": "Wino",
    "piqa": "PIQA",
    "lambada_openai": "LAM",
    "hellaswag": "Hella",
    "arc_easy": "ARC-E",
    "arc_challenge": "ARC-C",
    "fda": "FDA",
    "swde": "SWDE",
    "squad_completion": "SQuAD",
}
SOURCE = "LLoPS, table of zero-shot evaluation"
# its text does not say which metric a column is: Hella and ARC-C are at the height of acc_norm,
# nor which version FDA, SWDE and SQuAD have
ROWS = {
    ("360M", "softmax"): (51.78, 63.71, 29.32, 33.60, 42.85, 24.32, 57.89, 56.08, 27.88, 43.05),
    ("360M", "Mamba"): (50.36, 63.76, 27.89, 33.88, 42.42, 24.66, 5.90, 17.37, 24.83, 32.34),
    ("360M", "BASED"): (51.30, 63.55, 26.64, 33.23, 41.88, 24.23, 17.42, 27.18, 27.41, 34.76),
    ("360M", "BASED+CT"): (50.91, 65.40, 27.73, 36.85, 43.10, 25.51, 8.35, 30.87, 26.27, 35.00),
    ("360M", "BASED+LLoPS, p = 4"): (
        53.04, 66.70, 29.23, 37.07, 43.94, 25.51, 7.53, 31.41, 31.94, 36.26,
    ),
    ("1B", "softmax"): (52.49, 67.30, 38.07, 39.12, 51.05, 22.10, 68.78, 68.68, 35.79, 49.26),
    ("1B", "Mamba"): (51.30, 66.81, 38.87, 39.34, 46.80, 26.11, 11.07, 28.17, 29.46, 37.55),
    ("1B", "BASED"): (51.62, 66.70, 37.86, 39.10, 45.54, 25.60, 24.05, 42.84, 34.58, 40.88),
    ("1B", "BASED+CT"): (51.22, 68.44, 36.43, 41.59, 47.01, 27.30, 24.41, 46.80, 36.23, 42.16),
    ("1B", "BASED+LLoPS, p = 2"): (
        51.62, 68.72, 38.11, 42.69, 47.31, 27.13, 26.32, 47.97, 36.36, 42.91,
    ),
}  # fmt: skip
