"""Data sets that are made in parts and kept part by part, so that an interruption costs little."""

import contextlib
import functools
import os
import random
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import tqdm

from experiments.tasks.base import ARRAYS, Split


def make_parts(
    folder: Path,
    make: Mapping[str, Sequence[Callable[[], Split]]],
    count: int,
    name: str,
    progress: bool,
) -> dict[str, Iterator[Split]]:
    """Make all parts of some splits, in as many threads as there are cores, and give them in order.

    Every part becomes a file in `folder`, which appears when it is whole. One that an interrupted
    run has left, or that another run at the same time has made, is not made again, unless it is
    damaged. Only the parts that are being made, or the one that is given, are in memory.

    Args:
        folder: made if absent; to be removed by whoever has stored the parts elsewhere.
        make: for each split thread-safe functions, which always give the same.
        count: examples in all parts together.
        name: what the bar shows.
        progress: whether to show a bar.
    """
    parts = {
        split: [
            functools.partial(_load_or_make, folder / f"{split}-{number}.npz", function)
            for number, function in enumerate(functions)
        ]
        for split, functions in make.items()
    }
    with (
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        tqdm.tqdm(total=count, desc=name, unit=" examples", disable=not progress) as bar,
    ):
        jobs = [part for split in parts.values() for part in split]
        random.shuffle(jobs)  # so that runs at the same time do not make the same parts
        running = [pool.submit(_length, part) for part in jobs]
        try:
            for future in as_completed(running):
                bar.update(future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return {split: (part() for part in functions) for split, functions in parts.items()}


def _length(part: Callable[[], Split]) -> int:
    return len(part())


def _load_or_make(path: Path, make: Callable[[], Split]) -> Split:
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            fields = {field: arrays[field] for field in ARRAYS}
            return Split(**fields, max_length=int(arrays["max_length"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        part = make()
    fields = {field: getattr(part, field) for field in ARRAYS}
    with contextlib.suppress(FileNotFoundError):  # when a faster run has removed the folder
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            np.savez(Path(temporary) / path.name, max_length=part.max_length, **fields)
            os.replace(Path(temporary) / path.name, path)
    return part
