"""Data sets that are made in parts and kept part by part, so that an interruption costs little."""

import functools
import os
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tqdm

from experiments.tasks.base import ARRAYS, Split


def make_parts(
    folder: Path, name: str, make: Sequence[Callable[[], Split]], count: int, progress: bool
) -> Iterator[Split]:
    """Yield what each of `make` gives, in their order, made by as many threads as there are cores.

    Every part is a file in `folder`, named by `name` and its number. A whole one is read in place
    of being made again; files appear under their name when they are whole.

    Args:
        folder: made if absent; to be removed by whoever has stored the parts elsewhere.
        name: of the sequence of parts.
        make: thread-safe functions whose results never change.
        count: examples in all parts together.
        progress: whether to show a bar.
    """
    workers = os.cpu_count() or 1
    waiting = deque(
        functools.partial(_load_or_make, folder / f"{name}-{number}.npz", function)
        for number, function in enumerate(make)
    )
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm.tqdm(total=count, desc=name, unit=" examples", disable=not progress) as bar,
    ):
        running = deque(pool.submit(waiting.popleft()) for _ in range(min(2 * workers, len(make))))
        try:
            while running:
                part = running.popleft().result()
                if waiting:
                    running.append(pool.submit(waiting.popleft()))
                bar.update(len(part))
                yield part
        finally:
            for future in running:
                future.cancel()


def _load_or_make(path: Path, make: Callable[[], Split]) -> Split:
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            fields = {field: arrays[field] for field in ARRAYS}
            return Split(**fields, max_length=int(arrays["max_length"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        part = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {field: getattr(part, field) for field in ARRAYS}
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        np.savez(Path(temporary) / path.name, max_length=part.max_length, **fields)
        os.replace(Path(temporary) / path.name, path)
    return part
