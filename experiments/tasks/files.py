"""What readers of published files share: finding, hashing, drawing a validation part."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from absl import logging

from experiments.tasks.base import DataError


def find_files(
    data_dir: Path | str | None,
    folders: Sequence[str],
    names: Sequence[str],
    data: str,
    remedy: str,
) -> Path:
    """The first of `folders` below `data_dir` that holds all `names`.

    If several hold them, as in the doubled tree of Long Range Arena's archive, the first one is
    used, aloud.

    Args:
        data_dir: where to look; None is an error that says how to get the data.
        folders: relative to it, in the order of preference.
        names: files or folders, relative to each folder.
        data: what is looked for, in words.
        remedy: how to get it.

    Raises:
        DataError: naming every path that was tried.
    """
    tried = [] if data_dir is None else [Path(data_dir) / folder for folder in folders]
    complete = [folder for folder in tried if all((folder / name).exists() for name in names)]
    if not complete:
        raise DataError(
            f"data_dir={None if data_dir is None else str(data_dir)!r} has no {data} files",
            tried=tried,
            expected=", ".join(names),
            remedy=remedy,
        )
    if len(complete) > 1:
        logging.warning("Two copies of %s: using %s, not %s.", data, *complete[:2])
    return complete[0]


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hold_out(count: int, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Mark floor(count * share) of `count` examples, a pure function of the arguments, as a mask.

    Raises:
        ValueError: if seed < 0, or the share is less than one example.
    """
    if seed < 0:
        raise ValueError(f"seed={seed}, expected a non-negative integer.")
    if int(count * share) == 0:
        raise ValueError(f"{count} examples are too few to hold out {share:.0%} of them.")
    order = np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")
    held = np.zeros(count, bool)
    held[order[: int(count * share)]] = True
    return held
