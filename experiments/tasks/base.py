"""What all Long Range Arena tasks share: a `Task` is a value with three `Split`s of rows.

Each task module offers `load(data_dir, cache_dir, ...) -> Task`. Nothing here needs jax.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from absl import logging

SPLITS = ("train", "validation", "test")
_FORMAT = 1
ARRAYS = ("tokens", "lengths", "labels")


class DataError(ValueError):
    """Data are missing or wrong. The message says what was tried, what was expected, what to do."""

    def __init__(self, problem: str, *, tried: Sequence[Path], expected: str, remedy: str):
        """Put the message together.

        Args:
            problem: what is wrong.
            tried: the paths that were looked at, in order.
            expected: the files, or the content, that should have been there.
            remedy: how to make or get them.
        """
        paths = "".join(f"\n    {path}" for path in tried)
        super().__init__(f"{problem}\n  tried:{paths}\n  expected: {expected}\n  to do: {remedy}")


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """N examples as a random-access sequence; a source for `grain.MapDataset`.

    Example i is `{"tokens": [size], "length": int32, "label": int32}`: its `length` ids, in the
    dtype of `tokens`, and then zeros. Zero may also be a proper id (a black pixel), so mask by
    `length`. With lengths [N, 2] (two documents an example) it is `tokens` [2, size] and `length`
    [2].

    Attributes:
        tokens: ids of all sequences one after the other, uint8 or int16 [sum of lengths]; with
            `starts` each sequence once, however many examples have it.
        lengths: int32 [N], or [N, 2]; each 1..max_length.
        labels: int32 [N].
        max_length: the largest size to which sequences are padded. Nothing is ever cut to it.
        buckets: smaller sizes, ascending; an example is padded to the first that holds it.
        starts: where each sequence begins in `tokens`, int64 in the shape of `lengths`; None: where
            the one before ends.
    """

    tokens: npt.NDArray[Any] = dataclasses.field(repr=False)
    lengths: npt.NDArray[Any] = dataclasses.field(repr=False)
    labels: npt.NDArray[Any] = dataclasses.field(repr=False)
    max_length: int
    buckets: tuple[int, ...] = ()
    starts: npt.NDArray[np.int64] | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Without `starts`, where each sequence begins, and the end: int64 [sequences + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @functools.cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """The size to which each example is padded: int64 [N]."""
        longest = self.lengths if self.lengths.ndim == 1 else self.lengths.max(axis=1)
        sizes = np.array([*self.buckets, self.max_length])
        return sizes[np.searchsorted(sizes, longest)]

    @functools.cached_property
    def _rows(self) -> npt.NDArray[Any] | None:
        """`tokens` [N, max_length] if all sequences have that length, as pictures do."""
        one_after_the_other = self.lengths.ndim == 1 and self.starts is None
        if not one_after_the_other or not np.all(self.lengths == self.max_length):
            return None
        return self.tokens.reshape(-1, self.max_length)

    def __len__(self) -> int:
        """Give N."""
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Give example i, padded.

        Raises:
            IndexError: unless 0 <= i < N.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of {len(self)}")
        return {name: array[0] for name, array in self.take(np.array([i])).items()}

    def take(self, indices: npt.NDArray[np.integer]) -> dict[str, npt.NDArray[Any]]:
        """Give examples `indices` [B] stacked, padded to the largest of their sizes."""
        if self._rows is not None:
            tokens, lengths = self._rows[indices], self.lengths[indices]
            return {"tokens": tokens, "length": lengths, "label": self.labels[indices]}
        lengths = self.lengths[indices]
        starts = self.starts
        if starts is None:
            starts = self.offsets[:-1].reshape(self.lengths.shape)
        column = np.arange(self.sizes[indices].max())
        real = column < lengths[..., None]
        tokens = self.tokens[np.where(real, starts[indices][..., None] + column, 0)]
        tokens[~real] = 0
        return {"tokens": tokens, "length": lengths, "label": self.labels[indices]}


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """One classification task.

    Attributes:
        name: as in `experiments.tasks.TASKS`.
        vocabulary: the token of each id, with `<mask>` for self-pretraining. Sequences end by their
            `length`: 0 fills up and may also be an id.
        num_classes: labels are 0..num_classes-1.
        max_length: the size of padded sequences.
        splits: "train", "validation" and "test".
        fingerprint: a hash of all tokens, lengths and labels. Equal fingerprints, equal data.
        reference_lines: `reference_lines()` gives the accuracies (0..1) that trivial predictors,
            fitted on "train", reach on "test".
    """

    name: str
    vocabulary: tuple[str, ...]
    num_classes: int
    max_length: int
    splits: Mapping[str, Split]
    fingerprint: str
    reference_lines: Callable[[], dict[str, float]]

    @property
    def two_towers(self) -> bool:
        """Whether an example is a pair of sequences."""
        return self.splits["train"].lengths.ndim == 2


def majority_class(train: Split, test: Split) -> dict[str, float]:
    """The accuracy on `test` of always saying the most frequent label of `train`."""
    guess = np.bincount(train.labels).argmax()
    return {"majority class": float(np.mean(test.labels == guess))}


def _digest(array: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _write(
    folder: Path, description: dict[str, Any], splits: Mapping[str, Split | Iterable[Split]]
) -> None:
    folder.mkdir()
    counts, digests = {}, {}
    for name, split in splits.items():
        fields = ARRAYS if getattr(split, "starts", None) is None else (*ARRAYS, "starts")
        paths = {field: folder / f"{name}.{field}.npy" for field in fields}
        if isinstance(split, Split):
            for field, path in paths.items():
                np.save(path, getattr(split, field))
        else:
            _write_parts(paths, split)
        for field, path in paths.items():
            digests[f"{name}.{field}"] = _digest(np.load(path, mmap_mode="r"))
        counts[name] = len(np.load(paths["labels"], mmap_mode="r"))
    manifest = {"description": description, "counts": counts, "sha256": digests}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _write_parts(paths: Mapping[str, Path], parts: Iterable[Split]) -> None:
    """Write the splits `parts` as one, with no more than one of their tokens in memory."""
    lengths: list[npt.NDArray[Any]] = []
    labels: list[npt.NDArray[Any]] = []
    with paths["tokens"].open("wb") as file:
        for part in parts:
            if not lengths:
                _write_header(file, part.tokens.dtype, 0)  # leaves space for longer numbers
            file.write(np.ascontiguousarray(part.tokens).data)
            lengths.append(part.lengths)
            labels.append(part.labels)
        file.seek(0)
        _write_header(file, part.tokens.dtype, sum(int(x.sum()) for x in lengths))
    np.save(paths["lengths"], np.concatenate(lengths))
    np.save(paths["labels"], np.concatenate(labels))


def _write_header(file: BinaryIO, dtype: np.dtype, size: int) -> None:
    description = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": description, "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(file, header)


def _open(folder: Path, description: dict[str, Any]) -> tuple[dict[str, Split], str] | None:
    """Memory-map a cache; None if there is none or if it is damaged.

    Raises:
        DataError: if the folder is a sound cache of something else.
    """
    if not folder.exists():
        return None
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        found, digests = manifest["description"], manifest["sha256"]
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in digests}
        damaged = [name for name, array in arrays.items() if _digest(array) != digests[name]]
        if damaged:
            raise ValueError(f"other content than when it was written: {damaged}")
        splits = {}
        for name in SPLITS:
            tokens, lengths, labels = (arrays[f"{name}.{field}"] for field in ARRAYS)
            starts = arrays.get(f"{name}.starts")
            splits[name] = Split(tokens, lengths, labels, found["max_length"], starts=starts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logging.warning("The data cache %s is damaged and will be rebuilt: %s", folder, error)
        return None
    if found != description:
        raise DataError(
            f"the cache holds other data: {found}",
            tried=[folder],
            expected=str(description),
            remedy="remove that folder, or name another cache folder.",
        )
    return splits, hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]


def cached_splits(
    cache_dir: Path,
    name: str,
    source: Mapping[str, Any],
    max_length: int,
    build: Callable[[], Mapping[str, Split | Iterable[Split]]],
) -> tuple[dict[str, Split], str]:
    """Give memory-mapped splits, calling `build` only if the cache lacks them.

    A cache is written to a temporary folder and renamed when complete, so an interrupted run leaves
    none and of two runs that build at once the first to finish wins. Every opening compares the
    content with the hashes of the manifest; a damaged cache is rebuilt with a warning.

    Args:
        cache_dir: folder of all caches; made if absent.
        name: the task.
        source: JSON values that determine the result of `build`; a cache is found by them.
        max_length: of all splits.
        build: makes the splits; one that is larger than memory as splits that follow each other.

    Returns:
        The splits, and the fingerprint of their content.

    Raises:
        DataError: if the cache's folder holds other data.
    """
    description = {
        "format": _FORMAT,
        "task": name,
        "max_length": max_length,
        "source": dict(source),
    }
    key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]
    cache_dir = Path(cache_dir)
    folder = cache_dir / f"{name}-{key}"
    opened = _open(folder, description)
    if opened is not None:
        return opened
    shutil.rmtree(folder, ignore_errors=True)
    splits = build()
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f".{name}-") as temporary:
        complete = Path(temporary) / "complete"
        _write(complete, description, splits)
        with contextlib.suppress(OSError):  # when another run was faster
            os.replace(complete, folder)
    opened = _open(folder, description)
    if opened is None:
        raise DataError(
            "the cache could not be written",
            tried=[folder],
            expected="a writable folder with enough space",
            remedy="free some space, or name another cache folder.",
        )
    return opened
