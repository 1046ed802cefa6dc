"""Pathfinder's pictures as Long Range Arena published them.

    lra_release/lra_release/pathfinder32/curv_contour_length_14/imgs/0/sample_0.png ...
    lra_release/lra_release/pathfinder32/curv_contour_length_14/metadata/0.npy ...

A row of the metadata has 11 columns, among them the picture's folder and name (0 and 1) and its
label (3). In the archive these files are plain text, in spite of their name; those of the original
generator are arrays. Both are read.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from absl import logging
from PIL import Image

from experiments.tasks.base import DataError, Split
from experiments.tasks.files import find_files
from experiments.tasks.image import to_grey

LEVELS = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
_COLUMNS = 11
_REMEDY = (
    "unpack `lra_release.gz` (8 GB, really a tar.gz, linked from the README of "
    "github.com/google-research/long-range-arena) and name its folder with --data_dir, or name no "
    "data folder: then pictures are generated."
)
_RECORDS = tuple(f"{'*/' * depth}*.tfrecord*" for depth in range(4))


class Picture(NamedTuple):
    """A row of the metadata: path relative to the level's folder, label, `FILE:LINE`."""

    name: str
    label: int
    row: str


def find_level(data_dir: Path | str, task_folder: str, difficulty: str) -> Path:
    """The folder of one level, for example `lra_release/pathfinder32/curv_contour_length_14`.

    Args:
        data_dir: the archive's root, its `lra_release`, the one in there, or the task's folder.
        task_folder: `pathfinder32` or `pathfinder128`.
        difficulty: a name in `LEVELS`.

    Raises:
        DataError: if it is not there; also for records of TensorFlow Datasets.
    """
    level = LEVELS[difficulty]
    inner = (f"lra_release/lra_release/{task_folder}", f"lra_release/{task_folder}")
    try:
        found = find_files(
            data_dir,
            (*inner, task_folder, "."),
            (f"{level}/metadata", f"{level}/imgs"),
            task_folder,
            _REMEDY,
        )
    except DataError:
        records = next((p for g in _RECORDS for p in sorted(Path(data_dir).glob(g))), None)
        if records is None:
            raise
        raise DataError(
            f"{records} belongs to the archive `pathfinder_tfds`, whose format is not read",
            tried=[Path(data_dir)],
            expected=f"pictures: {task_folder}/{level}/imgs and {task_folder}/{level}/metadata",
            remedy=_REMEDY,
        ) from None
    return found / level


def metadata_files(level: Path) -> list[Path]:
    """The files `metadata/N.npy` in the order of N.

    Raises:
        DataError: if there are none.
    """
    found = [path for path in (level / "metadata").glob("*.npy") if path.stem.isdecimal()]
    if not found:
        raise DataError(
            "there are no metadata",
            tried=[level / "metadata"],
            expected="files 0.npy, 1.npy, ...",
            remedy=_REMEDY,
        )
    return sorted(found, key=lambda path: int(path.stem))


def level_hash(level: Path) -> str:
    """SHA-256 of the metadata and of the names and sizes of all pictures."""
    digest = hashlib.sha256()
    for path in metadata_files(level):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    for folder in sorted(path for path in (level / "imgs").iterdir() if path.is_dir()):
        with os.scandir(folder) as files:
            for line in sorted(
                f"{folder.name}/{file.name} {file.stat().st_size}" for file in files
            ):
                digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def list_pictures(level: Path) -> list[Picture]:
    """All pictures of a level in the order of the metadata, without those of zero bytes.

    The archive has one of these, `imgs/0/sample_172.png` of pathfinder32's easy level.

    Raises:
        DataError: if the metadata cannot be read, a picture is not there, a folder of pictures has
            no metadata, or there are fewer than the 10 pictures that can be split.
    """
    pictures: list[Picture] = []
    empty: list[Picture] = []
    paths = metadata_files(level)
    described = {path.stem for path in paths}
    for folder in sorted((level / "imgs").iterdir()):
        if folder.name not in described:
            raise _error(str(folder), "there are no metadata of it", f"metadata/{folder.name}.npy")
    for path in paths:
        for number, columns in enumerate(_rows(path), 1):
            row = f"{path}:{number}"
            if len(columns) != _COLUMNS:
                raise _error(row, f"{len(columns)} columns", f"{_COLUMNS} columns")
            if columns[3] not in ("0", "1"):
                raise _error(row, f"label {columns[3]!r}", "label 0 or 1")
            picture = Picture(f"{columns[0]}/{columns[1]}", int(columns[3]), row)
            try:
                size = os.stat(level / picture.name).st_size
            except (FileNotFoundError, NotADirectoryError):
                raise _error(row, f"there is no {level / picture.name}", "a picture") from None
            (pictures if size else empty).append(picture)
    if empty:
        logging.warning(
            "%d of %d pictures of %s are empty and left out, the first is %s.",
            len(empty), len(empty) + len(pictures), level, empty[0].name,
        )  # fmt: skip
    if len(pictures) < 10:
        raise _error(str(level), f"{len(pictures)} pictures", "at least 10 pictures to be split")
    return pictures


def _rows(path: Path) -> list[list[str]]:
    with path.open("rb") as file:
        is_array = file.read(6) == b"\x93NUMPY"
    try:
        if not is_array:
            return [line.split() for line in path.read_text("utf-8").splitlines()]
        array = np.load(path, allow_pickle=False)
        if array.ndim != 2 or array.dtype.kind != "U":
            raise ValueError(f"an array {array.shape} of {array.dtype}, not a table of text")
        return array.tolist()
    except ValueError as error:
        raise _error(
            str(path), str(error), f"text or a table of text, {_COLUMNS} columns"
        ) from None


def read_pictures(level: Path, pictures: Sequence[Picture], side: int) -> Split:
    """Read PNG files of side x side pixels; those in colour become grey by `image.to_grey`.

    Raises:
        DataError: naming the metadata's row and the picture, if one is damaged.
    """
    pixels = np.empty((len(pictures), side * side), np.uint8)
    for i, picture in enumerate(pictures):
        try:
            pixels[i] = _read_png(level / picture.name, side)
        except (OSError, SyntaxError, ValueError) as error:
            problem = f"{level / picture.name} is damaged: {error}"
            raise _error(picture.row, problem, f"a PNG file of {side} x {side} pixels") from None
    labels = np.array([picture.label for picture in pictures], np.int32)
    lengths = np.full(len(pictures), side * side, np.int32)
    return Split(pixels.reshape(-1), lengths, labels, side * side)


def _read_png(path: Path, side: int) -> npt.NDArray[np.uint8]:
    with Image.open(path, formats=["PNG"]) as picture:
        if picture.size != (side, side):
            raise ValueError(f"{picture.width} x {picture.height} pixels")
        if picture.mode == "L":
            return np.asarray(picture).reshape(-1)
        if picture.mode not in ("RGB", "RGBA", "P", "1", "LA"):
            raise ValueError(f"its pixels are of the mode {picture.mode}, not grey or RGB bytes")
        return to_grey(np.asarray(picture.convert("RGB")).reshape(-1, 3).T)


def _error(row: str, problem: str, expected: str) -> DataError:
    return DataError(
        f"{row}: {problem}",
        tried=[Path(row.rpartition(":")[0] or row)],
        expected=expected,
        remedy=f"the data are damaged; {_REMEDY}",
    )
