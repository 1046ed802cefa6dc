"""Writes files in PyTorch's zip format without PyTorch, for tests of the reader."""

import io
import pickle
import struct
import sys
import types
import zipfile

import numpy as np

STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"}


class _Storage:
    def __init__(self, key, array):
        self.key, self.array = key, array


class _Tensor:
    """Pickled as a call of torch._utils._rebuild_tensor_v2, as PyTorch does."""

    def __init__(self, storage, offset, shape, strides):
        self.args = (storage, offset, shape, strides, False, {})

    def __reduce__(self):
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.args


def write_torch(path, arrays, extra=None):
    """Save arrays by name, transposed views and all; `extra` are more values by name."""

    def _rebuild_tensor_v2(*args):
        raise NotImplementedError

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    for name in STORAGES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if not isinstance(value, _Storage):
                return None
            kind = getattr(torch, STORAGES[value.array.dtype.name])
            return ("storage", kind, value.key, "cpu", value.array.size)

    storages, state = {}, {}
    for i, (name, array) in enumerate(arrays.items()):
        base = array if array.flags.c_contiguous else array.T
        assert base.flags.c_contiguous
        storages[str(i)] = np.concatenate([np.zeros(3, array.dtype), base.reshape(-1)])
        strides = tuple(n // array.itemsize for n in array.strides)
        state[name] = _Tensor(_Storage(str(i), storages[str(i)]), 3, array.shape, strides)
    file = io.BytesIO()
    before = {name: sys.modules.get(name) for name in ("torch", "torch._utils")}
    sys.modules |= {"torch": torch, "torch._utils": utils}
    try:
        Pickler(file, protocol=2).dump(state | (extra or {}))
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    write_archive(path, file.getvalue(), storages)


def write_archive(path, program, storages):
    """Write a pickle and its storages, each aligned to 64 bytes by padding as PyTorch does."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        for key, array in storages.items():
            info = zipfile.ZipInfo(f"archive/data/{key}")
            info.extra = struct.pack("<HH", 0x4246, 13) + b"Z" * 13
            archive.writestr(info, array.tobytes())
