"""Associative recall: LLoPS by p, m and width, BASED, and all other kernels at equal state size.

    python -m experiments.recall --out=experiments/results/recall

Trains two-layer models on multi-query associative recall with the published data, sizes and rates.
All rates and seeds of a cell are trained at once; a cell is written when it is finished, and the
same command goes on with those that are missing. `--quick` takes minutes on a CPU.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from experiments.common import flags
from experiments.common.flags import setting
from experiments.common.record import read_csv, write_csv, write_text
from experiments.recall_cells import KERNELS, Cell, check_kernels, groups
from experiments.recall_data import MIXES
from experiments.recall_report import COLUMNS, cell_of, markdown, plot
from experiments.recall_train import (
    Batches,
    Programs,
    Protocol,
    Run,
    compile_cell,
    place,
    train,
)

GROUPS = tuple(groups((), quick=False))
FIRST_SEED = 123
AHEAD = 8  # cells that are compiled while one is trained, at most


@dataclasses.dataclass(frozen=True)
class Config:
    """Train models of associative recall; finished cells are skipped."""

    out: str = setting("experiments/results/recall", "files to write, without suffix")
    cells: str = setting(",".join(GROUPS), f"groups of cells among {', '.join(GROUPS)}")
    kernels: str = setting(",".join(KERNELS), "kernels of the group `kernels`")
    learning_rates: str = setting("1e-3,3.16e-3,1e-2,3.16e-2", "rates to choose from")
    seeds: int = setting(1, f"initial values for each rate, from seed {FIRST_SEED} on")
    epochs: int = setting(32, "passes over the training data, at most")
    share: float = setting(1.0, "of the training examples that are used")
    batch: int = setting(256, "sequences a step")
    vocab_size: int = setting(8192, "tokens")
    dropout: float = setting(0.1, "of the embedding")
    dtype: str = setting("bfloat16", "of layers", choices=("bfloat16", "float32"))
    stop_at: float = setting(0.99, "accuracy of the best rate at which a cell ends")
    quick: bool = setting(False, "a small task, for minutes on a CPU")

    def __post_init__(self) -> None:
        """Refuse unknown names and sizes that are out of range.

        Raises:
            ValueError: naming the setting.
        """
        check_kernels(tuple(self.kernels.split(",")))
        unknown = [name for name in self.cells.split(",") if name not in GROUPS]
        if unknown:
            raise ValueError(f"cells={self.cells!r}: expected names among {', '.join(GROUPS)}.")
        try:
            positive = min(map(float, self.learning_rates.split(","))) > 0
        except ValueError:
            positive = False
        if not positive:
            raise ValueError(
                f"learning_rates={self.learning_rates!r}: expected numbers > 0, such as 1e-3,1e-2."
            )
        for name in ("seeds", "epochs", "share", "batch"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}, expected a number > 0.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}, expected at least 0 and below 1.")

    def protocol(self) -> Protocol:
        """What all cells have in common."""
        names = [field.name for field in dataclasses.fields(Protocol)]
        return Protocol(**{name: getattr(self, name) for name in names})

    def wanted(self) -> dict[str, list[Cell]]:
        """The cells of each group."""
        known = groups(tuple(self.kernels.split(",")), self.quick)
        return {name: known[name] for name in self.cells.split(",")}

    def runs(self) -> list[Run]:
        """The runs of each cell."""
        rates = map(float, self.learning_rates.split(","))
        seeds = range(FIRST_SEED, FIRST_SEED + self.seeds)
        return list(itertools.starmap(Run, itertools.product(rates, seeds)))


def quick_settings(config: Config) -> Mapping[str, Any]:
    """The settings of `--quick`."""
    if not config.quick:
        return {}
    return {
        "cells": "p", "learning_rates": "1e-2", "epochs": 6, "batch": 32, "vocab_size": 128,
        "dropout": 0.0, "dtype": "float32",
    }  # fmt: skip


def describe(protocol: Protocol) -> str:
    """A protocol in one cell of a table; runs of different ones are kept apart by it."""
    return (
        f"{protocol.epochs} epochs of {protocol.share:g}, batch {protocol.batch}, "
        f"V {protocol.vocab_size}, dropout {protocol.dropout:g}, {protocol.dtype}, "
        f"stop at {protocol.stop_at:g}"
    )


def missing(config: Config, rows: Iterable[Mapping[str, Any]]) -> list[tuple[Cell, list[Run]]]:
    """The cells that are wanted, each once, with the runs that have no rows yet."""
    protocol = describe(config.protocol())
    done = {
        (cell_of(row), Run(float(row["learning_rate"]), int(row["seed"])))
        for row in rows
        if row["protocol"] == protocol
    }
    cells = dict.fromkeys(itertools.chain.from_iterable(config.wanted().values()))
    found = ((cell, [run for run in config.runs() if (cell, run) not in done]) for cell in cells)
    return [(cell, runs) for cell, runs in found if runs]


def write(rows: Sequence[Mapping[str, Any]], config: Config) -> None:
    """Write the table as CSV (exact numbers) and markdown, each in one piece."""
    write_csv(f"{config.out}.csv", COLUMNS, rows)
    write_text(f"{config.out}.md", markdown(rows, groups(KERNELS, config.quick)))


def compiled(
    work: Sequence[tuple[Cell, list[Run]]], data: Mapping[str, Batches], protocol: Protocol
) -> Iterator[tuple[Cell, list[Run], Programs]]:
    """The programs of each cell, those of the next cells being compiled by threads meanwhile."""
    workers = min(AHEAD, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        waiting: list[tuple[Cell, list[Run], concurrent.futures.Future]] = []
        for cell, runs in work:
            make = functools.partial(
                compile_cell, cell.width, cell.qk_dim(), cell.kernel, cell.options(), protocol
            )
            waiting.append((cell, runs, pool.submit(make, len(runs), data[cell.data])))
            if len(waiting) > workers:
                cell, runs, future = waiting.pop(0)
                yield cell, runs, future.result()
        for cell, runs, future in waiting:
            yield cell, runs, future.result()


def rows_of(
    cell: Cell, runs: Sequence[Run], programs: Programs, protocol: Protocol, data: Batches
) -> list[dict[str, Any]]:
    """Train a cell; its rows, one for each run and epoch."""
    common = cell._asdict() | {"protocol": describe(protocol), "runs": len(runs)}
    common["device"] = jax.devices()[0].device_kind
    tests = [f"accuracy_{length}_{pairs}" for length, pairs, _ in data.segments]
    rows = []
    for row in train(programs, protocol, runs, data):
        slices = dict(zip(tests, row.pop("accuracies"), strict=True))
        rows.append(dict.fromkeys(COLUMNS, "") | common | row | slices)
    return rows


def run(config: Config) -> None:
    """Train what is missing, writing after each cell."""
    out = pathlib.Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = read_csv(f"{out}.csv", COLUMNS)
    work = missing(config, rows)
    protocol = config.protocol()
    names = dict.fromkeys(cell.data for cell, _ in work)
    data = {name: place(MIXES[name], protocol, FIRST_SEED) for name in names}
    began = time.perf_counter()
    for cell, runs, programs in compiled(work, data, protocol):
        started = time.perf_counter()
        rows += rows_of(cell, runs, programs, protocol, data[cell.data])
        write(rows, config)
        best = max(float(row["accuracy"]) for row in rows[-len(runs) :])
        now = time.perf_counter()
        print(
            f"{cell.kernel} p={cell.p} m={cell.m} width={cell.width} {cell.data}: {best:.3f}, "
            f"{now - started:.1f} s, compiled in {programs.seconds:.1f} s; {now - began:.0f} s",
            file=sys.stderr,
        )
    if rows:
        plot(rows, f"{out}.png")


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings and files end with exit code 2 and one message."""
    config = flags.parse(Config, argv, quick_settings)
    try:
        run(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv)
