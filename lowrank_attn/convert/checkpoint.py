"""From a folder of a published checkpoint to our parameters by path, and back."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lowrank_attn.convert.errors import ConvertError
from lowrank_attn.convert.layouts import TIED, entries, skeleton
from lowrank_attn.convert.published_configs import published_config, read_config
from lowrank_attn.convert.safetensors import read_safetensors, write_safetensors
from lowrank_attn.convert.torch_file import read_torch
from lowrank_attn.models.decoder_configs import DecoderConfig
from lowrank_attn.models.folder import Arrays, shapes_of

# Files of weights, the safe format first; all that a pattern finds belong together.
FILES: dict[str, Callable[[pathlib.Path], dict[str, np.ndarray]]] = {
    "*.safetensors": read_safetensors,
    "pytorch_model*.bin": read_torch,
}
# Options of mixers that a published layout fixes, and those that change no result.
DEFAULTS: dict[str, dict[str, Any]] = {
    "short_conv": {"expand": 2, "kernel_size": 3},
    "linear": {
        "kernel": "llops",
        "options": None,
        "rule": "additive",
        "normalize": None,
        "num_kv_heads": None,
        "value_dim": None,
        "use_rotary": False,
        "rotary_base": 10000.0,
    },
    "sliding_window": {"window": 128, "rotary_fraction": 1.0},
    "softmax": {"window": None, "rotary_fraction": 1.0},
    "mamba": {"expand": 2, "state_size": 16, "conv_size": 4, "dt_rank": None},
}
# Parts of names of arrays that are left out.
IGNORED = {
    "metrics": "a measurement",
    "decay": "not used by BASED's code",
    "rotary_emb.inv_freq": "follows from the configuration",
}
HOW = ("chunk_size", "implementation")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What became of one array of a checkpoint; a line of the report.

    Attributes:
        source: its name there.
        path: its path here, None if it is left out.
        shape: its shape there.
        dtype: its dtype there.
        note: why it is left out, or what is special.
    """

    source: str
    path: str | None
    shape: tuple[int, ...]
    dtype: str
    note: str = ""

    def __str__(self) -> str:
        """As a line of text."""
        where = "ignored" if self.path is None else f"-> {self.path}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.source} {self.dtype}{list(self.shape)} {where}{note}"


def read_checkpoint(
    folder: str | os.PathLike[str],
) -> tuple[DecoderConfig, dict[str, np.ndarray], dict[str, Any]]:
    """Read a folder with `config.json` and `*.safetensors` or `pytorch_model*.bin`.

    A leading `model.` of names is dropped, either of the two tied matrices is enough, and arrays
    named `...decay...` (a buffer that BASED's code does not use), `...metrics...` or
    `...rotary_emb.inv_freq` (which follows from the configuration) are left out.

    Returns:
        The model, its parameters by path in float32, and the source: `config`, the contents of
        `config.json`, and `leaves`, a `Leaf` as a dict for every array, for `write_checkpoint`.

    Raises:
        ConvertError: if files are missing, damaged or not safe to read, or arrays are missing,
            unknown or of another shape than `config.json` says; every such array is named.
    """
    folder = pathlib.Path(folder)
    arrays = _read_arrays(folder)
    try:
        published = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConvertError(f"{folder / 'config.json'} cannot be read: {error}.") from error
    named, leaves = _named(arrays)
    shapes_there = {name: array.shape for name, (_, array) in named.items()}
    config = read_config(published, shapes_there)
    shapes = shapes_of(config)

    wrong, params = [], {}
    tied = [name for name in TIED[skeleton(config)] if name in named]
    for entry in entries(config, shapes):
        shared = config.tied and entry.path == "embedding/embedding"
        names = tied if shared else [entry.source]
        found = [named.pop(name) for name in names if name in named]
        if not found:
            wrong.append(f"{entry.source} {list(entry.shape)} is missing")
            continue
        first, array = found[0]
        leaves.append(_leaf(first, entry.place, array, ""))
        if array.shape != entry.shape:
            wrong.append(
                f"{first}: expected {list(entry.shape)} by config.json, found {list(array.shape)}"
            )
        for other, same in found[1:]:
            leaves.append(_leaf(other, entry.path, same, "tied to the embedding, the same array"))
            if not np.array_equal(same, array):
                wrong.append(f"{other} differs from {first}, but this model ties them")
        if wrong:
            continue
        shape = shapes[entry.path]
        if entry.part is None:
            params[entry.path] = entry.here(array, shape)
        else:
            whole = params.setdefault(entry.path, np.empty(shape, np.float32))
            whole[:, entry.part] = entry.here(array, (shape[0], *shape[2:]))
    wrong += [f"{source} is unknown" for source, _ in named.values()]
    if wrong:
        raise ConvertError(f"{folder} does not hold the model of its config: {'; '.join(wrong)}.")
    order = list(arrays)
    leaves.sort(key=lambda leaf: order.index(leaf.source))
    source = {"config": published, "leaves": [dataclasses.asdict(leaf) for leaf in leaves]}
    return config, params, source


def write_checkpoint(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    params: Arrays,
    source: Mapping[str, Any] | None = None,
) -> None:
    """Write `model.safetensors` and `config.json` in a published layout.

    Args:
        folder: where to; it must not be there yet.
        config: the model.
        params: its parameters by path.
        source: what `read_checkpoint` returned, for the same names, dtypes and configuration; None:
            float32 and both tied matrices.

    Raises:
        ConvertError: if the layout has no place for a parameter or an option of the model, such as
            another kernel.
        FileExistsError: if there is something of the folder's name.
    """
    published = published_config(config) if source is None else source["config"]
    by_place = {entry.place: entry for entry in entries(config, shapes_of(config))}
    _check_expressible(config, params, published, by_place.values())
    if source is None:
        both = [*by_place.values()]
        if config.tied:
            both.append(by_place["embedding/embedding"]._replace(source="lm_head.weight"))
        leaves = [Leaf(entry.source, entry.place, entry.shape, "float32") for entry in both]
    else:
        leaves = [Leaf(**leaf) for leaf in source["leaves"] if leaf["path"] is not None]
    shapes = {leaf.source: (tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves}
    found = ((leaf, by_place[str(leaf.path)]) for leaf in leaves)
    arrays = (
        (leaf.source, entry.there(params[entry.path], np.dtype(leaf.dtype)))
        for leaf, entry in found
    )
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", shapes, arrays)
    (folder / "config.json").write_text(json.dumps(published, indent=1) + "\n")


def _check_expressible(config, params, published, entries):
    homeless = [path for path in params if path not in {entry.path for entry in entries}]
    if homeless:
        raise ConvertError(
            f"the published layout has no place for {', '.join(homeless)}: only a model with the "
            "kernels of the published ones can be written in it."
        )
    there = {entry.source: entry.shape for entry in entries}
    meant, ours = read_config(published, there), _without_defaults(config)
    if _without_defaults(meant) != ours:
        raise ConvertError(
            f"the published layout cannot express this model: it would be read as {meant}, and it "
            f"is {config}."
        )


def _without_defaults(config):
    """A model with all options of its mixers, but those that only say how it is computed."""
    mixers = {}
    for name in sorted(set(config.layers)):
        options = {**DEFAULTS[name], **config.mixers.get(name, {})}
        mixers[name] = {k: v for k, v in options.items() if k not in HOW}
    return dataclasses.replace(config, mixers=mixers)


def _read_arrays(folder):
    for pattern, read in FILES.items():
        paths = sorted(folder.glob(pattern))
        arrays: dict[str, np.ndarray] = {}
        for path in paths:
            part = read(path)
            if twice := sorted(set(arrays) & set(part)):
                raise ConvertError(f"{path} repeats {twice[0]}: which file is the right one?")
            arrays |= part
        if paths:
            return arrays
    raise ConvertError(f"{folder} has no weights, expected {' or '.join(FILES)}.")


def _named(arrays):
    """The arrays by name without `model.`, as (full name, array), and the leaves left out."""
    named, leaves = {}, []
    for source, array in arrays.items():
        name = source.removeprefix("model.")
        why = next((why for part, why in IGNORED.items() if part in name), None)
        if why:
            leaves.append(_leaf(source, None, array, why))
        else:
            named[name] = (source, array)
    return named, leaves


def _leaf(source, path, array, note):
    return Leaf(source, path, array.shape, array.dtype.name, note)
