"""Image classification of Long Range Arena: CIFAR-10 in grey, one pixel a token, row by row.

Reads the publisher's binary files (records of a label and 3 x 1024 bytes of red, green and blue).
A tenth of the 50,000 training pictures, drawn by the seed, is kept for validation.

Source: Tay et al., "Long Range Arena" (2020), whose validation part is the last tenth in file
order. Black is token 0 and no padding: there, black pixels were masked as if they were.
"""

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt

from experiments.tasks.base import DataError, Split, Task, cached_splits, majority_class
from experiments.tasks.files import file_hash, find_files, hold_out

PIXELS = 32 * 32
VOCABULARY = (*map(str, range(256)), "<mask>")
_CLASSES = 10
_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_TEST = "test_batch.bin"
_RECORD = 1 + 3 * PIXELS
_REMEDY = (
    "download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz, unpack it, and name its "
    "folder with --data_dir."
)


def load(data_dir: Path | str | None, cache_dir: Path | str, seed: int = 0) -> Task:
    """Load CIFAR-10.

    Args:
        data_dir: the folder `cifar-10-batches-bin` or the one that holds it.
        cache_dir: folder in which the grey pictures are kept and found again.
        seed: of the draw of validation pictures.

    Raises:
        DataError: if files are missing or no whole number of records, or a label is beyond 9.
    """
    folder = find_files(
        data_dir, ("cifar-10-batches-bin", "."), (*_TRAIN, _TEST), "CIFAR-10", _REMEDY
    )
    source: dict[str, str | int] = {n: file_hash(folder / n) for n in (*_TRAIN, _TEST)}

    def build() -> dict[str, Split]:
        train = [_read(folder / name) for name in _TRAIN]
        pixels, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
        held = hold_out(len(labels), 0.1, seed)
        return {
            "train": _split(pixels[~held], labels[~held]),
            "validation": _split(pixels[held], labels[held]),
            "test": _split(*_read(folder / _TEST)),
        }

    splits, fingerprint = cached_splits(
        Path(cache_dir), "image", source | {"seed": seed}, PIXELS, build
    )
    return Task(
        name="image",
        vocabulary=VOCABULARY,
        num_classes=_CLASSES,
        max_length=PIXELS,
        splits=splits,
        fingerprint=fingerprint,
        reference_lines=functools.partial(majority_class, splits["train"], splits["test"]),
    )


def to_grey(rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Grey levels of pictures [..., 3, pixels]: floor(511 (2989 R + 5870 G + 1140 B) / 5,100,000).

    This is TensorFlow's conversion of bytes, 0.2989 R + 0.587 G + 0.114 B with its scale of 255.5,
    in exact integers. PIL rounds in place of cutting and differs by 1 in every sixth pixel.
    """
    weighted = np.einsum("...cp,c->...p", rgb.astype(np.int64), np.array([2989, 5870, 1140]))
    return (weighted * 511 // 5_100_000).astype(np.uint8)


def _read(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    records = np.fromfile(path, np.uint8)
    if not records.size or records.size % _RECORD:
        raise DataError(
            f"{path} has {records.size} bytes, which is no whole number of pictures",
            tried=[path],
            expected=f"records of {_RECORD} bytes",
            remedy=f"the file is damaged; {_REMEDY}",
        )
    records = records.reshape(-1, _RECORD)
    labels = records[:, 0].astype(np.int32)
    if labels.max() >= _CLASSES:
        at = int(labels.argmax())
        raise DataError(
            f"{path}: picture {at} has the label {labels[at]}",
            tried=[path],
            expected=f"labels 0 to {_CLASSES - 1}",
            remedy=f"this is no file of CIFAR-10's binary version; {_REMEDY}",
        )
    return to_grey(records[:, 1:].reshape(-1, 3, PIXELS)), labels


def _split(pixels, labels):
    return Split(pixels.reshape(-1), np.full(len(labels), PIXELS, np.int32), labels, PIXELS)
