"""Weights that PyTorch has saved, read without PyTorch and without running what they contain.

Such a file is an uncompressed zip archive of a pickle and of the arrays. A pickle is a program: it
names functions and calls them. Here the names that state dicts need stand for functions of our own,
and any other name is refused before anything is called.
"""

import collections
import pathlib
import pickle
import zipfile

import ml_dtypes
import numpy as np

from lowrank_attn.convert.errors import ConvertError

_STORAGES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
_LOCAL_HEADER = 30  # bytes of a zip entry before its name


def read_torch(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a saved state dict by name, memory-mapped and read-only.

    Raises:
        ConvertError: if the file is damaged, of the format before PyTorch 1.6, holds anything but
            tensors by name, or names any function but those that rebuild tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (root,) = (n.removesuffix("data.pkl") for n in archive.namelist()
                       if n.endswith("/data.pkl"))  # fmt: skip
            storages = _Storages(path, archive, root)
            with archive.open(root + "data.pkl") as file:
                state = _Unpickler(file, storages).load()
    except ConvertError:
        raise
    except Exception as error:
        raise ConvertError(
            f"{path} cannot be read as a file of PyTorch 1.6 or newer ({error!r}): it is damaged, "
            "or of another format."
        ) from error
    if not isinstance(state, dict):
        raise ConvertError(f"{path} holds a {type(state).__name__}, expected tensors by name.")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            raise ConvertError(
                f"{path}: {name!r} is a {type(value).__name__}, expected a tensor with a name."
            )
    return dict(state)


class _Storages:
    """The flat arrays of an archive, mapped from the file."""

    def __init__(self, path, archive, root):
        self.path = path
        self._archive = archive
        self._root = root
        self._data = np.memmap(path, mode="r")
        order = root + "byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise ConvertError(f"{path} is big-endian, which is not supported.")

    def read(self, dtype, key, length):
        info = self._archive.getinfo(f"{self._root}data/{key}")
        size = length * dtype.itemsize
        if info.compress_type != zipfile.ZIP_STORED or info.file_size < size:
            raise ConvertError(
                f"{self.path}: storage {key} has {info.file_size} bytes, expected {size}, not "
                "compressed."
            )
        header = self._data[info.header_offset :][:_LOCAL_HEADER].tobytes()
        name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        offset = info.header_offset + _LOCAL_HEADER + name + extra
        return np.ndarray((length,), dtype, buffer=self._data, offset=offset)


class _Unpickler(pickle.Unpickler):
    """Knows how to rebuild tensors, and nothing else."""

    def __init__(self, file, storages):
        super().__init__(file)
        self._storages = storages

        # made here, so that a pickle that sets attributes of them changes nothing that stays
        def tensor(storage, offset, shape, strides, *_):
            strides = [stride * storage.itemsize for stride in strides]
            start = offset * storage.itemsize
            return np.ndarray(shape, storage.dtype, storage, start, strides)

        def parameter(data, *_):
            return data

        self._known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): tensor,
            ("torch._utils", "_rebuild_parameter"): parameter,
        } | {("torch", name): name for name in _STORAGES}

    def find_class(self, module, name):
        if (module, name) not in self._known:
            raise ConvertError(
                f"{self._storages.path} is refused: it asks for {module}.{name}, which weights do "
                "not need, and which could run any code. Nothing was run. Use a safetensors file, "
                "or a file that holds tensors only."
            )
        return self._known[module, name]

    def persistent_load(self, pid):
        kind, storage, key, _, length = pid
        if kind != "storage":
            raise ConvertError(f"{self._storages.path} refers to a {kind!r}, expected a storage.")
        return self._storages.read(_STORAGES[storage], key, length)
