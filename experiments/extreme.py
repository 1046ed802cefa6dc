"""Extreme multi-label classification by kernels, as in SLAY's paper: python -m experiments.extreme

    python -m experiments.extreme --train=Eurlex/eurlex_train.txt --test=Eurlex/eurlex_test.txt \
        --dataset=Eurlex-4K

Without files, data of the size of Eurlex-4K are generated in the same format. The table on disk is
complete after every row; started again, the command goes on with the rows that are missing.
"""

import csv
import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import numpy as np

from experiments import extreme_data, extreme_metrics, extreme_model
from experiments.common import flags
from experiments.common.flags import setting
from experiments.common.record import code_version, markdown_table, write_csv, write_text
from experiments.extreme_model import KERNELS

METRICS = tuple(f"{name}@{k}" for name in ("P", "PSP", "raw") for k in extreme_metrics.KS)
NAMES = ("kernel", "seed", "config", "jax", "device", "code")  # what a row is known by
COLUMNS = (*NAMES, "dataset", "features", *METRICS, "loss")
# Eurlex-4K as printed: P and the un-normalised propensity scores.
PUBLISHED = {
    "slay_paper": (0.4978, 0.3953, 0.3261, 0.9391, 0.7862, 0.6693),
    "performer_paper": (0.3442, 0.2703, 0.2263, 0.5970, 0.4785, 0.4141),
}
ABOUT = (
    "Protocol of the extreme classification of SLAY (arXiv 2602.04915), which is no attention: "
    "mean of feature embeddings (E = 256), scores of labels by features of 4 heads of 64, "
    "softmax cross-entropy, Adam at 1e-3, 3 epochs of batches of 512. The paper gives SLAY "
    "4 x 1,024 features and Performer 4 x 64 (`slay_paper`, `performer_paper`); all others here "
    "have 4 x 1,024, but `hedgehog` (4 x 128), `elu` and `relu` (4 x 64), which have no choice. "
    "`linear` and `yat_spherical` are exact. Learned maps: `llops`, squared, and `hedgehog`. "
    "`PSP@k` is normalised by the best that k labels can reach, as in the literature; `raw@k` "
    "is not, as in the authors' code, whose PSP is to be compared with it."
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Extreme multi-label classification with kernel scores, as in SLAY's paper."""

    out: str = setting(
        "experiments/results/extreme", "files to write, without suffix", changes_result=False
    )
    quick: bool = setting(False, "small generated data and model, to see that everything works")
    dataset: str = setting(
        "generated",
        "name of the data, for the propensities",
        choices=tuple(extreme_metrics.PROPENSITIES),
    )
    train: str | None = setting(None, "training file; None generates data")
    test: str | None = setting(None, "test file")
    data_dir: str = setting("data/extreme", "where generated files are kept", changes_result=False)
    data_seed: int = setting(0, "of generated data")
    examples: int = setting(15539, "generated examples for training")
    test_examples: int = setting(3809, "generated examples for tests")
    inputs: int = setting(5000, "features of generated data")
    labels: int = setting(3993, "labels of generated data")
    kernels: str = setting(",".join(KERNELS), "kernels, separated by commas")
    width: int = setting(256, "E, the size of embeddings")
    heads: int = setting(4, "parts that vectors are cut into")
    features: int = setting(1024, "features a head, a square number and a multiple of 32")
    epochs: int = setting(3, "passes over the training examples")
    batch_size: int = setting(512, "examples")
    learning_rate: float = setting(1e-3, "of Adam")
    seeds: int = setting(3, "runs, from seed 0 on")
    parallel: int = setting(1, "models trained at the same time", changes_result=False)

    def __post_init__(self) -> None:
        """Refuse what does not fit.

        Raises:
            ValueError: naming the setting.
        """
        unknown = [name for name in self.kernels.split(",") if name not in KERNELS]
        if unknown:
            raise ValueError(f"kernels: {unknown[0]!r} is unknown; known: {', '.join(KERNELS)}.")
        if (self.train is None) != (self.test is None) or (
            (self.train is None) != (self.dataset == "generated")
        ):
            raise ValueError(
                f"train={self.train!r}, test={self.test!r}, dataset={self.dataset!r}: give both "
                "files and the name of the data, or none of them."
            )
        if self.width % self.heads:
            raise ValueError(f"width={self.width}, expected a multiple of heads={self.heads}.")
        root = round(self.features**0.5)
        if self.features < 1 or self.features % 32 or root * root != self.features:
            raise ValueError(
                f"features={self.features}, expected a square number that is a multiple of 32, "
                "such as 64, 256 or 1024."
            )
        for name in (
            "examples",
            "test_examples",
            "inputs",
            "epochs",
            "batch_size",
            "seeds",
            "parallel",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1.")


def quick(config: Config) -> dict[str, Any]:
    """Settings of `--quick`."""
    if not config.quick:
        return {}
    return {
        "examples": 600, "test_examples": 200, "inputs": 400, "labels": 100, "width": 32,
        "features": 64, "batch_size": 64, "seeds": 1,
    }  # fmt: skip


def load(config: Config) -> tuple[extreme_data.Examples, extreme_data.Examples]:
    """Training and test examples; generated ones are written first and read like others.

    Raises:
        ValueError, OSError: if a file is missing or damaged, or both do not fit together.
    """
    if config.train is not None and config.test is not None:
        files = pathlib.Path(config.train), pathlib.Path(config.test)
    else:
        sizes = (config.examples, config.test_examples, config.inputs, config.labels)
        folder = pathlib.Path(config.data_dir) / "_".join(map(str, (config.data_seed, *sizes)))
        files = folder / "train.txt", folder / "test.txt"
        if not files[1].is_file():
            folder.mkdir(parents=True, exist_ok=True)
            both = extreme_data.generate(config.data_seed, sum(sizes[:2]), *sizes[2:])
            for path, part in zip(files, extreme_data.split(both, config.examples), strict=True):
                extreme_data.write(path, part)
    train, test = (extreme_data.read(path) for path in files)
    shapes = [(part.num_features, part.num_labels) for part in (train, test)]
    if shapes[0] != shapes[1] or shapes[0][1] < max(extreme_metrics.KS):
        raise ValueError(
            f"{files[0]} has {shapes[0]} features and labels, {files[1]} {shapes[1]}: expected the "
            "same numbers, and at least 5 labels."
        )
    return train, test


def run(config: Config, train: extreme_data.Examples, test: extreme_data.Examples) -> None:
    """Measure what is missing and write the table after every row."""
    p = extreme_metrics.propensities(train, *extreme_metrics.PROPENSITIES[config.dataset])
    fixed = {
        "most frequent labels": extreme_metrics.evaluate(
            extreme_metrics.most_frequent(train, len(test)), test, p
        ),
        "the true labels": extreme_metrics.ceiling(test, p),
    }
    modules = (extreme_data, extreme_metrics, extreme_model)
    version = {
        "config": flags.config_hash(dataclasses.replace(config, kernels="linear", seeds=1)),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "code": code_version(*(str(module.__file__) for module in modules)),
    }
    out = pathlib.Path(f"{config.out}_quick" if config.quick else config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if out.with_suffix(".csv").is_file():
        with open(out.with_suffix(".csv"), newline="") as file:
            rows = [row for row in csv.DictReader(file) if version.items() <= row.items()]
    done = {(row["kernel"], int(row["seed"])) for row in rows}
    for seed in range(config.seeds):
        missing = [k for k in config.kernels.split(",") if (k, seed) not in done]
        with ThreadPoolExecutor(config.parallel) as pool:
            started = [
                pool.submit(measure, config, kernel, seed, train, test, p) for kernel in missing
            ]
            for finished in as_completed(started):
                rows.append(version | {"dataset": config.dataset} | finished.result())
                write_csv(out.with_suffix(".csv"), COLUMNS, rows)
                print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
        write_text(out.with_suffix(".md"), report(config, rows, fixed, train, test))
    plot(rows, out.with_suffix(".png"))


def measure(config, kernel, seed, train, test, p) -> dict[str, Any]:
    """Train one model; its metrics on the test examples."""
    it = extreme_model.model(
        kernel, train.num_features, train.num_labels, config.width, config.heads, config.features
    )
    top, loss = extreme_model.train(
        it,
        train,
        test,
        jax.random.key(seed),
        epochs=config.epochs,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        seed=seed,
    )
    metrics = extreme_metrics.evaluate(top, test, p)
    return {
        "kernel": kernel,
        "seed": seed,
        "features": it.features or "",
        "loss": f"{loss:.4f}",
        **{name: f"{value:.4f}" for name, value in metrics.items()},
    }


def by_kernel(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of every kernel, the best mean P@1 first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["kernel"], []).append(row)
    means = {kernel: _mean(group, "P@1") for kernel, group in groups.items()}
    return {kernel: groups[kernel] for kernel in sorted(groups, key=lambda k: -means[k])}


def _mean(group, metric):
    return float(np.mean([float(row[metric]) for row in group]))


def report(
    config: Config,
    rows: list[dict[str, Any]],
    fixed: Mapping[str, Mapping[str, float]],
    train: extreme_data.Examples,
    test: extreme_data.Examples,
) -> str:
    """The table as markdown, with the published numbers of Eurlex-4K in parentheses."""
    A, B = extreme_metrics.PROPENSITIES[config.dataset]
    where = "generated data, not Eurlex-4K" if config.dataset == "generated" else config.dataset
    text = [
        ABOUT,
        f"Here: E = {config.width}, {config.heads} heads of {config.width // config.heads}, "
        f"{config.features:,} features a head, Adam at {config.learning_rate:g}, {config.epochs} "
        f"epochs of batches of {config.batch_size}; {where}: {len(train):,} and {len(test):,} "
        f"examples, {train.num_features:,} features, {train.num_labels:,} labels; propensities "
        f"with A = {A}, B = {B}. Means over seeds, ± half their range. In parentheses what the "
        "paper prints for Eurlex-4K, whatever the data are here. "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}.",
    ]
    table = []
    printed = [name for name in METRICS if not name.startswith("PSP")]
    for kernel, group in by_kernel(rows).items():
        published = dict(zip(printed, PUBLISHED.get(kernel, ())))
        cells = []
        for metric in (*METRICS, "loss"):
            half = np.ptp([float(row[metric]) for row in group]) / 2
            spread = f" ± {half:.4f}" if len(group) > 1 else ""
            known = f" ({published[metric]:.4f})" if metric in published else ""
            cells.append(f"{_mean(group, metric):.4f}{spread}{known}")
        table.append([f"`{kernel}`", str(group[0]["features"]), str(len(group)), *cells])
    for name, metrics in fixed.items():
        table.append([name, "", "", *(f"{metrics[metric]:.4f}" for metric in METRICS), ""])
    text.append(markdown_table(["scores", "features", "seeds", *METRICS, "loss"], table))
    return "\n\n".join(text) + "\n"


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw P@k and PSP@k of every kernel as bars, with the range over seeds."""
    from matplotlib.figure import Figure

    groups = by_kernel(rows)
    figure = Figure(figsize=(11, 0.4 * len(groups) + 2), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), ("P", "PSP"), strict=True):
        for i, k in enumerate(extreme_metrics.KS):
            values = [[float(row[f"{name}@{k}"]) for row in group] for group in groups.values()]
            axis.barh(
                np.arange(len(groups)) + 0.27 * (i - 1),
                [np.mean(each) for each in values],
                0.25,
                xerr=[np.ptp(each) / 2 for each in values],
                label=f"{name}@{k}",
            )
        axis.set_yticks(range(len(groups)), list(groups))
        axis.invert_yaxis()
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings and files end with exit code 2 and one message."""
    config = flags.parse(Config, argv, preset=quick)
    try:
        train, test = load(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    run(config, train, test)


if __name__ == "__main__":
    main(sys.argv)
