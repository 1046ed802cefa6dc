"""Files of weights that are damaged, foreign, dangerous, or of another model."""

import collections
import json
import os
import pathlib
import pickle

import numpy as np
import pytest
from decoder_cases import golden, write_published
from test_convert import EMBEDDING
from torch_zip import write_archive, write_torch

from lowrank_attn.convert import ConvertError, read_checkpoint
from lowrank_attn.convert.safetensors import read_safetensors, write_safetensors
from lowrank_attn.convert.torch_file import read_torch


def change(edit):
    """A BASED checkpoint and its configuration after an edit of both."""
    weights, config, _ = golden("based_lm")
    edit(weights, config)
    return weights, config


def resize(weights, name, *shape):
    weights[name] = np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda w, c: c.update(vocab_size=120),
            rf"{EMBEDDING}: expected \[120, 128\] by config.json, found \[104, 128\]",
        ),
        (
            lambda w, c: resize(w, "transformer.layers.1.mixer.proj_q.weight", 32, 128),
            r"layers.1.mixer.proj_q.weight: expected \[64, 128\] by config.json, found \[32, 128\]",
        ),
        (
            lambda w, c: c.update(n_layer=5),
            r"transformer.layers.4.norm1.weight \[128\] is missing; .*layers.4.mixer.in_proj",
        ),
        (
            lambda w, c: resize(w, "transformer.layers.0.mixer.gate.weight", 2, 2),
            "transformer.layers.0.mixer.gate.weight is unknown",
        ),
        (lambda w, c: resize(w, "lm_head.weight", 104, 128), "lm_head.weight differs from .*ties"),
        (lambda w, c: w.pop(EMBEDDING), r"word_embeddings.weight \[104, 128\] is missing"),
        (
            lambda w, c: w.pop("transformer.layers.0.mlp.fc1.weight"),
            "transformer.layers.0.mlp.fc1.weight is missing",
        ),
        (lambda w, c: c.pop("n_head"), "config.json has no 'n_head'"),
        (lambda w, c: c.update(rms_norm=False), "rms_norm=False, expected True: RMSNorm only"),
        (lambda w, c: c.update(rotary_emb_base=500), "rotary_emb_base=500, expected 10000"),
        (
            lambda w, c: c.update(mixer={"_target_": "based.models.mixers.Hyena"}),
            "has a mixer 'based.models.mixers.Hyena', which is unknown; known: BaseConv",
        ),
        (
            lambda w, c: c.update(alt_mixer={"_target_": "a.SlidingAttention"}),
            "has a sliding_window as alt_mixer, expected linear",
        ),
        (
            lambda w, c: (c.clear(), c.update(model_type="gemma", hidden_size=128)),
            "or model_type 'mamba', 'llama' or 'mistral', found hidden_size, model_type",
        ),
    ],
)
def test_another_model_is_refused_with_the_arrays_and_shapes(edit, message, tmp_path):
    folder = write_published(tmp_path / "published", *change(edit))
    with pytest.raises(ConvertError, match=message):
        read_checkpoint(folder)


def header(text, data=b""):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "no safetensors file, or only a part of one: it has 0 bytes"),
        (b"PK\x03\x04 something else entirely", "no safetensors file, or only a part"),
        (header({"a": ENTRY})[:20], "only a part of one: it has 20 bytes"),
        (header({"a": ENTRY}, b"1234"), "is truncated: its header describes .* bytes, it has"),
        (header(b"not JSON"), "its header is not readable"),
        (header([1, 2]), "its header is not readable"),
        (header({"a": {"dtype": "F32"}}, bytes(8)), "not readable .*data_offsets"),
        (header({"a": ENTRY | {"dtype": "F4"}}, bytes(8)), "its header is not readable .*F4"),
        (header({"a": ENTRY | {"shape": [3]}}, bytes(8)), r"a has 8 bytes, which is not float32"),
        (header({"a": ENTRY | {"data_offsets": [-8, 0]}}, bytes(8)), "a has 8 bytes, which is not"),
    ],
)
def test_damaged_safetensors_are_refused(contents, message, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents)
    with pytest.raises(ConvertError, match=message):
        read_safetensors(path)


def test_safetensors_hold_every_dtype_and_appear_when_complete(tmp_path):
    path = tmp_path / "model.safetensors"
    arrays = {
        "a": np.arange(3, dtype=np.int8),  # what follows is not aligned
        "b": np.array(2.5, np.float16),
        "c": np.zeros((0, 4), np.float64),
        "d": np.array([[True, False]]),
        "e": np.arange(6, dtype=np.float32).reshape(3, 2).T,
    }
    shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(path, shapes, iter(arrays.items()))
    found = read_safetensors(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
    before = path.read_bytes()

    def fails():
        yield "a", arrays["a"]
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_safetensors(path, shapes, fails())
    assert path.read_bytes() == before


class Attack:
    """A value whose unpickling calls a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "name"),
    [(os.mkdir, "posix.mkdir"), (eval, "__builtin__.eval"), (getattr, "__builtin__.getattr")],
)
@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_that_would_run_code_is_refused(function, name, archive, tmp_path):
    mark = tmp_path / "mark"
    args = {os.mkdir: (str(mark),), eval: (f"__import__('os').mkdir({str(mark)!r})",)}
    value = {"weight": Attack(function, *args.get(function, (dict, "keys")))}
    path = tmp_path / "pytorch_model.bin"
    if archive:
        write_torch(path, {"first": np.ones(2, np.float32)}, value)
        message = f"is refused: it asks for {name}, .* Nothing was run"
    else:  # before PyTorch 1.6 the file was the pickle
        path.write_bytes(pickle.dumps(value))
        message = "it is damaged, or of another format"
    with pytest.raises(ConvertError, match=message):
        read_torch(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(value))  # the attack is real
    assert mark.exists() or function is getattr


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "holds a list, expected tensors by name"),
        ({"epoch": 3}, "'epoch' is a int, expected a tensor with a name"),
        (collections.OrderedDict({3: 4}), "3 is a int, expected a tensor"),
    ],
)
def test_torch_files_of_other_things_are_refused(value, message, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write_archive(path, pickle.dumps(value), {})
    with pytest.raises(ConvertError, match=message):
        read_torch(path)


def test_damaged_torch_files_are_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    write_torch(path, {"a": np.arange(100, dtype=np.float32)})
    whole = path.read_bytes()
    assert np.array_equal(read_torch(path)["a"], np.arange(100))
    path.write_bytes(whole[:-40])
    with pytest.raises(ConvertError, match="it is damaged, or of another format"):
        read_torch(path)
    # A tensor larger than its storage must not read the memory behind it.
    path.write_bytes(whole.replace(b"Kd\x85", b"Kf\x85"))
    assert path.read_bytes() != whole
    with pytest.raises(ConvertError, match="damaged|bytes, expected"):
        read_torch(path)


def test_a_folder_without_config_is_refused(tmp_path):
    folder = write_published(tmp_path / "published", *change(lambda w, c: None))
    pathlib.Path(folder, "config.json").write_text("{")
    with pytest.raises(ConvertError, match="config.json cannot be read"):
        read_checkpoint(folder)
