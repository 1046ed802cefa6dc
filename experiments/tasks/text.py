"""Text classification of Long Range Arena: the sentiment of movie reviews, one byte a token.

Reads aclImdb as published (`{train,test}/{pos,neg}/ID_RATING.txt`), bytes as they are, the first
4,096 of each review. Token 0 is padding, byte b is token b + 1.

Source: Tay et al., "Long Range Arena" (2020), which cuts at 1,000 to 4,000 bytes and takes the test
reviews for validation too. Here a tenth of the training reviews, drawn by the seed, is kept for it.
"""

import dataclasses
import functools
import hashlib
from pathlib import Path

import numpy as np
import tqdm

from experiments.tasks.base import DataError, Split, Task, cached_splits, majority_class
from experiments.tasks.files import find_files, hold_out

MAX_LENGTH = 4096
BUCKETS = (512, 1024, 2048)
VOCABULARY = ("<pad>", *(f"0x{byte:02x}" for byte in range(256)), "<mask>")
_CLASSES = ("neg", "pos")
_FOLDERS = tuple(f"{part}/{name}" for part in ("train", "test") for name in _CLASSES)
_REMEDY = (
    "download https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz, unpack it, and name "
    "its folder with --data_dir."
)


def load(
    data_dir: Path | str | None,
    cache_dir: Path | str,
    seed: int = 0,
    validation: str = "train",
    unique: bool = False,
    progress: bool = True,
) -> Task:
    """Load the reviews.

    Args:
        data_dir: the folder `aclImdb` or the one that holds it.
        cache_dir: folder in which the arrays are kept and found again.
        seed: of the draw of validation reviews.
        validation: `train` draws them from the training part; `test` takes the test reviews, as
            Long Range Arena did, so that all 25,000 train and the best step is chosen on the test.
        unique: whether to leave out training reviews that repeat an earlier one or are in the test
            part too (of aclImdb's 25,000: 96 and 123 texts). The test part stays as it is.
        progress: whether to show a bar while reading.

    Raises:
        DataError: if folders are missing or empty, or a review is empty.
        ValueError: if `validation` is neither.
    """
    if validation not in ("train", "test"):
        raise ValueError(f"validation={validation!r}, expected 'train' or 'test'.")
    folder = find_files(data_dir, ("aclImdb", "."), _FOLDERS, "aclImdb", _REMEDY)
    paths = {
        part: [
            (path, label)
            for label, name in enumerate(_CLASSES)
            for path in sorted((folder / part / name).glob("*.txt"))
        ]
        for part in ("train", "test")
    }
    for name, found in paths.items():
        if not found:
            raise DataError(
                f"aclImdb's {name} part has no reviews",
                tried=[folder / name / label for label in _CLASSES],
                expected="ID_RATING.txt files",
                remedy=_REMEDY,
            )
    names = hashlib.sha256()
    for part in paths.values():
        for path, _ in part:
            names.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
    source = {"files": names.hexdigest(), "seed": seed, "validation": validation}
    if unique:
        source["unique"] = unique

    def build() -> dict[str, Split]:
        train, test = (_read(paths[part], progress) for part in ("train", "test"))
        if unique:
            train = _unique(train, test)
        if validation == "test":
            return {"train": _split(train), "validation": _split(test), "test": _split(test)}
        held = hold_out(len(train), 0.1, seed)
        return {
            "train": _split([row for row, out in zip(train, held, strict=True) if not out]),
            "validation": _split([row for row, out in zip(train, held, strict=True) if out]),
            "test": _split(test),
        }

    splits, fingerprint = cached_splits(Path(cache_dir), "text", source, MAX_LENGTH, build)
    splits = {n: dataclasses.replace(split, buckets=BUCKETS) for n, split in splits.items()}
    return Task(
        name="text",
        vocabulary=VOCABULARY,
        num_classes=len(_CLASSES),
        max_length=MAX_LENGTH,
        splits=splits,
        fingerprint=fingerprint,
        reference_lines=functools.partial(majority_class, splits["train"], splits["test"]),
    )


def encode(text: bytes) -> np.ndarray:
    """Token ids of the first 4,096 bytes, int16; a character may be cut in two."""
    return np.frombuffer(text[:MAX_LENGTH], np.uint8).astype(np.int16) + 1


def _read(paths, progress):
    rows = []
    for path, label in tqdm.tqdm(paths, desc="aclImdb", unit=" reviews", disable=not progress):
        text = path.read_bytes()
        if not text:
            raise DataError(f"{path} is empty", tried=[path], expected="a review", remedy=_REMEDY)
        rows.append((encode(text), label))
    return rows


def _unique(rows, others):
    """The rows whose text is in no earlier row and in none of the others."""
    seen = {tokens.tobytes() for tokens, _ in others}
    kept = []
    for tokens, label in rows:
        if tokens.tobytes() not in seen:
            seen.add(tokens.tobytes())
            kept.append((tokens, label))
    return kept


def _split(rows):
    tokens, labels = zip(*rows, strict=True)
    lengths = np.array([len(t) for t in tokens], np.int32)
    return Split(np.concatenate(tokens), lengths, np.array(labels, np.int32), MAX_LENGTH)
