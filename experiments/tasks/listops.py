"""ListOps of Long Range Arena: the value 0..9 of a nested expression of 501 to 1999 tokens.

Reads the published files (96,000 / 2,000 / 2,000 rows of `Source<TAB>Target`), or draws a data set
of the same distribution. Both are kept as memory-mapped arrays in a cache folder.

Source: Tay et al., "Long Range Arena" (2020). We differ in the ids, which there come from an
unordered set and change from run to run; here `listops_grammar.VOCABULARY` fixes them.
"""

import functools
import hashlib
import itertools
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tqdm

from experiments.tasks import listops_grammar as grammar
from experiments.tasks.base import DataError, Split, Task, cached_splits
from experiments.tasks.files import file_hash, find_files

MAX_LENGTH = grammar.PADDED_LENGTH
FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
_FOLDERS = ("lra_release/lra_release/listops-1000", "lra_release/listops-1000", "listops-1000", ".")
_GENERATOR_VERSION = 1
_FIT_ROWS = 2_000
_REMEDY = (
    "unpack `lra_release.gz` (really a tar.gz, linked from the README of "
    "github.com/google-research/long-range-arena) and name its folder, or name no data folder: "
    "then the data are generated, in seconds."
)


def load(
    data_dir: Path | str | None,
    cache_dir: Path | str,
    seed: int = 0,
    num_train: int = 96_000,
    num_validation: int = 2_000,
    num_test: int = 2_000,
    progress: bool = True,
) -> Task:
    """Load ListOps.

    Args:
        data_dir: folder with the published files: the archive's root, its `lra_release` or its
            `listops-1000`. Where the archive's doubled tree has two copies the inner one is used.
            None generates the data.
        cache_dir: folder in which the arrays are kept and found again.
        seed, num_train, num_validation, num_test: of generated data, which are a pure function of
            them; unused with `data_dir`. Rows are distinct; the splits follow each other in the
            order of drawing.
        progress: whether to show a bar while generating or parsing.

    Raises:
        DataError: if files are missing, or a row is malformed, longer than 2000 tokens or has a
            target that is not the expression's value. All rows are checked.
        ValueError: if seed < 0 or a number of rows < 1.
    """
    if data_dir is not None:
        folder = find_files(data_dir, _FOLDERS, tuple(FILES.values()), "ListOps", _REMEDY)
        paths = {name: folder / file for name, file in FILES.items()}
        source: dict[str, str | int] = {path.name: file_hash(path) for path in paths.values()}

        def build() -> dict[str, Split]:
            return {name: _parse(path, progress) for name, path in paths.items()}
    else:
        sizes = {"train": num_train, "validation": num_validation, "test": num_test}
        if seed < 0:
            raise ValueError(f"seed={seed}, expected a non-negative integer.")
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"num_{name}={size}, expected at least 1.")
        source = {"generator": _GENERATOR_VERSION, "seed": seed, **sizes}

        def build() -> dict[str, Split]:
            rows = generate(seed, sum(sizes.values()), os.cpu_count() or 1, progress)
            stops = np.cumsum(list(sizes.values())).tolist()
            return {n: _cut(rows, stop - sizes[n], stop) for n, stop in zip(sizes, stops)}

    splits, fingerprint = cached_splits(Path(cache_dir), "listops", source, MAX_LENGTH, build)
    return Task(
        name="listops",
        vocabulary=grammar.VOCABULARY,
        num_classes=10,
        max_length=MAX_LENGTH,
        splits=splits,
        fingerprint=fingerprint,
        reference_lines=functools.partial(reference_lines, splits["train"], splits["test"]),
    )


def generate(seed: int, count: int, workers: int, progress: bool) -> Split:
    """Draw the first `count` distinct expressions of the blocks 0, 1, 2, ... of a seed.

    `workers` threads draw blocks ahead (numpy works outside Python's lock); their number does not
    change the result.
    """
    draw = functools.partial(grammar.generate_block, seed)
    seen: set[bytes] = set()
    parts: list[Split] = []
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm.tqdm(total=count, desc="listops", unit=" rows", disable=not progress) as bar,
    ):
        pending = deque(pool.submit(draw, number) for number in range(2 * workers))
        for number in itertools.count(2 * workers):
            block = pending.popleft().result()
            keep = _mark_new(block, seen)
            tokens = block.tokens[np.repeat(keep, block.lengths)]
            parts.append(Split(tokens, block.lengths[keep], block.labels[keep], MAX_LENGTH))
            bar.update(min(int(keep.sum()), count - bar.n))
            if len(seen) >= count:
                break
            pending.append(pool.submit(draw, number))
        for future in pending:
            future.cancel()
    rows = Split(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.labels for part in parts]),
        MAX_LENGTH,
    )
    return _cut(rows, 0, count)


def _mark_new(block: Split, seen: set[bytes]) -> npt.NDArray[np.bool_]:
    keep = np.zeros(len(block), bool)
    for i, tokens in enumerate(_sequences(block)):
        digest = hashlib.blake2b(tokens.data, digest_size=16).digest()
        keep[i] = digest not in seen
        seen.add(digest)
    return keep


def _sequences(split: Split, stop: int | None = None) -> list[npt.NDArray[Any]]:
    offsets = split.offsets[: None if stop is None else stop + 1].tolist()
    return [split.tokens[i:j] for i, j in itertools.pairwise(offsets)]


def _cut(split: Split, start: int, stop: int) -> Split:
    tokens = split.tokens[split.offsets[start] : split.offsets[stop]]
    return Split(tokens, split.lengths[start:stop], split.labels[start:stop], MAX_LENGTH)


def _parse(path: Path, progress: bool) -> Split:
    tokens, labels = [], []
    number = 1
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            header = file.readline().rstrip("\r\n")
            if header != "Source\tTarget":
                raise ValueError(f"header {header[:80]!r}, expected 'Source\\tTarget'")
            for line in tqdm.tqdm(file, desc=path.name, unit=" rows", disable=not progress):
                number += 1
                ids, value = _parse_row(line.rstrip("\r\n"))
                tokens.append(ids)
                labels.append(value)
            if not labels:
                raise ValueError("no rows after the header")
    except ValueError as error:
        raise DataError(
            f"{path}:{number}: {error}",
            tried=[path],
            expected="`Source<TAB>Target`, then lines of an expression, a tab and its value",
            remedy=_REMEDY,
        ) from None
    lengths = np.array([len(ids) for ids in tokens], np.int32)
    return Split(np.concatenate(tokens), lengths, np.array(labels, np.int32), MAX_LENGTH)


def _parse_row(line: str) -> tuple[npt.NDArray[np.uint8], int]:
    columns = line.split("\t")
    if len(columns) != 2:
        raise ValueError(f"{len(columns)} columns, expected 2 separated by a tab: {line[:80]!r}")
    tokens, target = grammar.tokenize(columns[0]), columns[1]
    ids = grammar.encode(tokens)
    if len(ids) > MAX_LENGTH:
        raise ValueError(f"{len(ids)} tokens, expected at most {MAX_LENGTH}")
    value = grammar.evaluate(tokens)
    if target not in grammar.DIGITS:
        raise ValueError(f"target {target[:80]!r}, expected a digit 0 to 9")
    if value != int(target):
        raise ValueError(f"target {target}, but the expression's value is {value}")
    return ids, value


def reference_lines(train: Split, test: Split) -> dict[str, float]:
    """Measure how far one gets on `test` without solving the task.

    * "majority class": always the most frequent label of `train`.
    * "first token": the most frequent label of `train` for the root operator.
    * "one level": the root operator over its arguments, with each argument that is itself an
      operator replaced by one constant digit.
    * "two levels": the same with the operators below the root evaluated too, and those below them
      replaced. A model that reaches this has learnt one level of nesting.

    The constant is the digit that is right most often on the first 2,000 rows of `train`.

    Returns:
        Accuracies 0..1. Of generated data: about 0.170, 0.362, 0.453 and 0.664.
    """
    counts = np.zeros((len(grammar.VOCABULARY), 10), np.int64)
    np.add.at(counts, (train.tokens[train.offsets[:-1]], train.labels), 1)
    guesses = {
        "majority class": np.full(len(test), counts.sum(0).argmax()),
        "first token": counts.argmax(1)[test.tokens[test.offsets[:-1]]],
    }
    for name, levels in (("one level", 1), ("two levels", 2)):
        fitted = _values_by_constant(train, levels, _FIT_ROWS)
        best = (fitted == train.labels[: len(fitted), None]).sum(0).argmax()
        guesses[name] = _values_by_constant(test, levels, len(test))[:, best]
    return {name: float(np.mean(guess == test.labels)) for name, guess in guesses.items()}


def _values_by_constant(split: Split, levels: int, stop: int) -> npt.NDArray[Any]:
    """Evaluate the top `levels` of the first `stop` rows with each of the 10 constants below."""
    tops = [grammar.decode(grammar.prune(ids, levels)) for ids in _sequences(split, stop)]
    return np.array(
        [
            [grammar.evaluate([c if t == "<mask>" else t for t in top]) for c in grammar.DIGITS]
            for top in tops
        ]
    )
