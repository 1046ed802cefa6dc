"""Pathfinder and Path-X of Long Range Arena: are two dots the ends of one dashed path?

One grey pixel is a token, row by row: 32 x 32 = 1,024 (`pathfinder`) or 128 x 128 = 16,384
(`pathx`). Reads the published pictures, or draws a data set by `pathfinder_generator`. Both are
kept as memory-mapped arrays in a cache folder, and while they are made in parts that survive an
interruption.

Source: Tay et al., "Long Range Arena" (2020). There the first 80 % in stored order train, the next
10 % validate, the rest tests. Here names decide, as file systems list them in different orders.
Black is token 0 and no padding: there, black pixels were masked as if they were.
"""

import functools
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.tasks import pathfinder_files as files
from experiments.tasks import pathfinder_generator as generator
from experiments.tasks.base import Split, Task, cached_splits, majority_class
from experiments.tasks.image import VOCABULARY
from experiments.tasks.parts import make_parts

PART = 1_000
_CONTOUR_LENGTHS = {"easy": 6, "intermediate": 9, "hard": 14}
_GENERATOR_VERSION = 1


# The number of pictures, and for each split the functions that make it part by part.
_Jobs = tuple[int, Mapping[str, Sequence[Callable[[], Split]]]]


class Variant(NamedTuple):
    """What differs between the tasks: name, pixels along a side, folder in the archive."""

    name: str
    side: int
    folder: str


PATHFINDER = Variant("pathfinder", 32, "pathfinder32")
PATHX = Variant("pathx", 128, "pathfinder128")


def load(
    variant: Variant,
    data_dir: Path | str | None,
    cache_dir: Path | str,
    difficulty: str = "hard",
    seed: int = 0,
    num_train: int = 160_000,
    num_validation: int = 20_000,
    num_test: int = 20_000,
    progress: bool = True,
) -> Task:
    """Load the pictures.

    Args:
        variant: `PATHFINDER` or `PATHX`.
        data_dir: folder with the published files: the archive's root, its `lra_release`, the
            `lra_release` in there, or the task's `pathfinder32` or `pathfinder128`. Where the
            archive's doubled tree has two copies the inner one is used. None generates the data.
        cache_dir: folder in which the arrays are kept and found again.
        difficulty: long paths of 6 (`easy`), 9 (`intermediate`) or 14 dashes (`hard`).
        seed: of generated pictures, which are a pure function of all arguments, or of the split of
            published ones, see `split_names`.
        num_train, num_validation, num_test: of generated pictures; unused with `data_dir`.
        progress: whether to show a bar, and how many pictures there are of each label.

    Raises:
        DataError: if files are missing or damaged, or have a label that is not 0 or 1.
        ValueError: if seed < 0, a number of pictures < 1, or the difficulty is unknown.
    """
    if difficulty not in _CONTOUR_LENGTHS:
        known = ", ".join(_CONTOUR_LENGTHS)
        raise ValueError(f"difficulty={difficulty!r} is unknown; known: {known}.")
    if seed < 0:
        raise ValueError(f"seed={seed}, expected a non-negative integer.")
    source: dict[str, Any]
    jobs: Callable[[], _Jobs]
    if data_dir is not None:
        level = files.find_level(data_dir, variant.folder, difficulty)
        source = {"files": files.level_hash(level), "split": {"by": "name", "seed": seed}}
        jobs = functools.partial(_reading, level, variant.side, seed)
    else:
        sizes = {"train": num_train, "validation": num_validation, "test": num_test}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"num_{name}={size}, expected at least 1.")
        source = {"generator": _GENERATOR_VERSION, "seed": seed, **sizes}
        jobs = functools.partial(_drawing, variant.side, difficulty, seed, sizes)
    source |= {"difficulty": difficulty}
    key = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:16]
    parts = Path(cache_dir) / f".{variant.name}-parts-{key}"

    def build() -> dict[str, Iterator[Split]]:
        if data_dir is None and progress:
            print(f"{variant.name}: no data_dir, so pictures are generated", file=sys.stderr)
        count, make = jobs()
        return make_parts(parts, make, count, variant.name, progress)

    splits, fingerprint = cached_splits(
        Path(cache_dir), variant.name, source, variant.side**2, build
    )
    shutil.rmtree(parts, ignore_errors=True)
    if progress:
        for name, split in splits.items():
            share = f"{np.mean(split.labels):.1%} of one path"
            print(f"{variant.name}: {len(split):,} pictures to {name}, {share}", file=sys.stderr)
    return Task(
        name=variant.name,
        vocabulary=VOCABULARY,
        num_classes=2,
        max_length=variant.side**2,
        splits=splits,
        fingerprint=fingerprint,
        reference_lines=functools.partial(majority_class, splits["train"], splits["test"]),
    )


def split_names(names: Sequence[str], seed: int) -> dict[str, list[int]]:
    """Divide pictures into 80 % for training, 10 % for validation and 10 % for the test.

    Names are ordered by SHA-256 of `SEED/NAME`; the first tenth validates, the second tests. So the
    result depends on nothing but the names as a set and the seed, and one picture more or less
    moves few others.

    Returns:
        Positions in `names`, ascending.
    """
    digests = [hashlib.sha256(f"{seed}/{name}".encode()).digest() for name in names]
    order = sorted(range(len(names)), key=digests.__getitem__)
    tenth = len(names) // 10
    validation, test, train = order[:tenth], order[tenth : 2 * tenth], order[2 * tenth :]
    return {"train": sorted(train), "validation": sorted(validation), "test": sorted(test)}


def _reading(level: Path, side: int, seed: int) -> _Jobs:
    pictures = files.list_pictures(level)
    make = {}
    for name, places in split_names([picture.name for picture in pictures], seed).items():
        chosen = [pictures[i] for i in places]
        make[name] = [
            functools.partial(files.read_pictures, level, chosen[start : start + PART], side)
            for start in range(0, len(chosen), PART)
        ]
    return len(pictures), make


def _drawing(side: int, difficulty: str, seed: int, sizes: Mapping[str, int]) -> _Jobs:
    p = generator.parameters(side, _CONTOUR_LENGTHS[difficulty])
    make = {}
    for number, (name, size) in enumerate(sizes.items()):
        make[name] = [
            functools.partial(_draw, p, (seed, number, start), min(PART, size - start))
            for start in range(0, size, PART)
        ]
    return sum(sizes.values()), make


def _draw(p: generator.Parameters, seed: tuple[int, ...], count: int) -> Split:
    pixels, labels = generator.generate(p, seed, count)
    return Split(pixels.reshape(-1), np.full(count, p.side**2, np.int32), labels, p.side**2)
