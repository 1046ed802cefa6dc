"""Files in the safetensors format: a JSON header, then the arrays, little-endian, in C order."""

import json
import os
import pathlib
from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np

from lowrank_attn.convert.errors import ConvertError

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes, as in the format's own library


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name, memory-mapped and read-only.

    Raises:
        ConvertError: if the file is truncated, or is no safetensors file of known dtypes.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_LONGEST_HEADER, size - 8):
            raise ConvertError(
                f"{path} is no safetensors file, or only a part of one: it has {size} bytes and "
                f"should begin with a header of {length}."
            )
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            specs = {name: _spec(entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConvertError(
                f"{path} is no safetensors file: its header is not readable ({error!r})."
            ) from error
    start = 8 + length
    end = start + max((spec[3] for spec in specs.values()), default=0)
    if end > size:
        raise ConvertError(
            f"{path} is truncated: its header describes {end} bytes, it has {size}. Download it "
            "again."
        )
    data = np.memmap(path, mode="r")
    arrays = {}
    for name, (dtype, shape, first, last) in specs.items():
        if last - first != dtype.itemsize * int(np.prod(shape, dtype=np.int64)) or first < 0:
            raise ConvertError(
                f"{path}: {name} has {last - first} bytes, which is not {dtype}{list(shape)}."
            )
        arrays[name] = np.ndarray(shape, dtype, buffer=data, offset=start + first)
    return arrays


def write_safetensors(
    path: pathlib.Path,
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Write a file, one array after another; it gets its name when it is complete.

    Args:
        path: the file.
        shapes: name -> shape and dtype, in the order of the file.
        arrays: the arrays in the same order, each made when it is written.
    """
    header, end = {}, 0
    for name, (shape, dtype) in shapes.items():
        first, end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".part")
    with open(unfinished, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, array), (expected, (shape, dtype)) in zip(arrays, shapes.items(), strict=True):
            assert (name, array.shape, array.dtype) == (expected, shape, dtype)
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
    os.replace(unfinished, path)


def _spec(entry):
    """Dtype, shape, first and last byte of an array."""
    first, last = (int(x) for x in entry["data_offsets"])
    return DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"]), first, last
