"""SLAY's 22 synthetic tasks: the published set-up, and a repaired one.

    python -m experiments.slay_tasks --variant=published
    python -m experiments.slay_tasks --variant=repaired

Trains a small attention-only model for every (task, kernel, seed). Rows are added to
`<out>_<variant>.csv` as models end, and the same command started again trains what is missing.
`<out>_<variant>.md` and `.png` set the means beside the paper's, and beside two numbers that no
model is needed for: the best that a causal model can expect, and what the most frequent target of
each position reaches.
"""

import concurrent.futures
import dataclasses
import itertools
import pathlib
import sys
import time
from typing import Any

from experiments.common import flags
from experiments.common.flags import setting
from experiments.common.record import read_csv, write_csv, write_text
from experiments.slay_tasks_run import HEADS, WIDTH, Cell, run_cells
from experiments.slay_tasks_table import plot, table
from experiments.synthetic import VARIANTS, baselines
from lowrank_attn.layers import AttentionMethod
from lowrank_attn.layers.attend import make_kernel

# Names and options of kernels. The paper's rows are softmax, spherical Yat, "Performer" (with
# rectified features), "Linear" and SLAY, with these sizes; favor, slay_auto and llops are not in
# the paper.
KERNELS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "yat_spherical": {"epsilon": 1e-6},
    "favor": {"num_features": 64},
    "favor_relu": {"num_features": 64},
    "elu": {},
    "slay": {
        "num_nodes": 2, "num_anchors": 32, "num_random": 16, "epsilon": 1e-6,
        "frequencies": "iid", "scaled": False,
    },
    "slay_auto": {"num_features": 256},
    "llops": {"num_features": 256},
}  # fmt: skip
LENGTHS = (64, 256)  # that sequences are padded to
COLUMNS = (
    "task", "category", "kernel", "features", "seed", "accuracy", "loss", "ceiling", "majority",
    "settings",
)  # fmt: skip
QUICK = {
    "tasks": "reverse,kv_recall,multihop,pattern,counting,majority,compression",
    "seeds": 1, "steps": 20, "batch_size": 8, "eval_rows": 64,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """Train small models on SLAY's synthetic tasks."""

    variant: str = setting("published", "of the tasks", choices=tuple(VARIANTS))
    out: str = setting(
        "experiments/results/slay_tasks", "files to write, without variant and suffix",
        changes_result=False,
    )  # fmt: skip
    tasks: str = setting(",".join(VARIANTS["published"]), "names", changes_result=False)
    kernels: str = setting(",".join(KERNELS), "names", changes_result=False)
    seeds: int = setting(3, "models of a task and kernel", changes_result=False)
    models: int = setting(66, "at most so many are trained at once", changes_result=False)
    jobs: int = setting(2, "groups at once: one compiles while another runs", changes_result=False)
    quick: bool = setting(False, "a few steps of a few tasks, for a CPU")
    steps: int = setting(200, "of training; 5,000 for repaired tasks, if not given")
    batch_size: int = setting(32, "sequences")
    learning_rate: float = setting(1e-3, "of AdamW")
    eval_rows: int = setting(1024, "new sequences that a model is judged by")

    def __post_init__(self) -> None:
        """Check names and counts.

        Raises:
            ValueError: naming the setting.
        """
        for name, known in (("tasks", VARIANTS[self.variant]), ("kernels", KERNELS)):
            unknown = [n for n in names(getattr(self, name)) if n not in known]
            if unknown or not names(getattr(self, name)):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: {', '.join(unknown) or 'nothing'} is "
                    f"unknown; known: {', '.join(known)}."
                )
        for name in ("seeds", "models", "jobs", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1.")
        if self.eval_rows < 1 or self.eval_rows % self.batch_size:
            raise ValueError(
                f"eval_rows={self.eval_rows}, expected a multiple of batch_size={self.batch_size}."
            )


def names(text: str) -> list[str]:
    """The names of a list with commas."""
    return [name for name in text.split(",") if name]


def of_variant(config: Config) -> dict[str, Any]:
    """Settings that depend on others."""
    steps = {"steps": 5000 if config.variant == "repaired" else 200}
    return steps | (QUICK if config.quick else {})


def num_features(kernel: str) -> int | None:
    """M for the heads of the model; None for exact attention."""
    made = make_kernel(kernel, KERNELS[kernel])
    return None if isinstance(made, AttentionMethod) else made.dim(WIDTH // HEADS)


def read_rows(path: pathlib.Path, settings: str) -> list[dict[str, Any]]:
    """The rows of earlier runs.

    Raises:
        ValueError: if they are of other settings.
    """
    rows = read_csv(path, COLUMNS)
    if any(row["settings"] != settings for row in rows):
        raise ValueError(f"{path} has rows of other settings; give another --out, or remove it.")
    return rows


def missing(config: Config, kernel: str, length: int, rows: list[dict[str, Any]]) -> list[Cell]:
    """The models of one kernel that are still to be trained at one padded length."""
    done = {(row["task"], row["kernel"], int(row["seed"])) for row in rows}
    tasks = {name: VARIANTS[config.variant][name] for name in names(config.tasks)}
    return [
        Cell(name, task, seed)
        for name, task in tasks.items()
        if min(n for n in LENGTHS if n >= task.length) == length
        for seed in range(42, 42 + config.seeds)  # the authors' seeds
        if (name, kernel, seed) not in done
    ]


def train(config: Config, kernel: str, length: int, cells: list[Cell]) -> list[dict[str, Any]]:
    """Train a group of models; the rows that they add."""
    start = time.perf_counter()
    results = run_cells(
        cells,
        length,
        kernel,
        KERNELS[kernel],
        steps=config.steps,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        eval_rows=config.eval_rows,
    )
    seconds = time.perf_counter() - start
    print(f"{kernel}: {len(cells)} models of {length} tokens, {seconds:.1f} s", file=sys.stderr)
    rows = []
    for cell, result in zip(cells, results):
        ceiling, majority = baselines(cell.task)
        rows.append(
            {"task": cell.name, "category": cell.task.category, "kernel": kernel}
            | {"features": num_features(kernel), "seed": cell.seed}
            | {"accuracy": result.accuracy, "loss": result.loss}
            | {"ceiling": ceiling, "majority": majority, "settings": flags.config_hash(config)}
        )
    return rows


def run(config: Config) -> None:
    """Train what is missing, and write rows after each group of models, then the table."""
    out = pathlib.Path(f"{config.out}_{config.variant}")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(out.with_suffix(".csv"), flags.config_hash(config))
    groups = [
        (kernel, length, cells[begin : begin + config.models])
        for kernel, length in itertools.product(names(config.kernels), LENGTHS)
        if (cells := missing(config, kernel, length, rows))
        for begin in range(0, len(cells), config.models)
    ]
    order = {name: i for i, name in enumerate((*VARIANTS[config.variant], *KERNELS))}
    with concurrent.futures.ThreadPoolExecutor(config.jobs) as pool:
        waiting = [pool.submit(train, config, *group) for group in groups]
        for ended in concurrent.futures.as_completed(waiting):
            rows += ended.result()
            rows.sort(key=lambda row: (order[row["task"]], order[row["kernel"]], int(row["seed"])))
            write_csv(out.with_suffix(".csv"), COLUMNS, rows)
    write_text(out.with_suffix(".md"), table(rows, config.variant, config.steps))
    plot(rows, out.with_suffix(".png"))


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings end with exit code 2 and one message."""
    config = flags.parse(Config, argv, of_variant)
    try:
        run(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv)
