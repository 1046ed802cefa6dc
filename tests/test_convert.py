"""Published checkpoints: their logits, and every array there and back.

The golden files hold random weights in the published layouts, exact in bfloat16, and what the
public code computes with them in float64 (tests/golden/README.md).
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import assert_close
from decoder_cases import golden, write_published
from flax import nnx
from torch_zip import write_torch

from experiments import convert as command
from lowrank_attn.convert import ConvertError, build, read_checkpoint, with_llops, write_checkpoint
from lowrank_attn.convert.safetensors import read_safetensors
from lowrank_attn.models.decoder import Decoder
from lowrank_attn.models.folder import arrays_of, load_decoder

# Through three or four layers, relative to the largest logit: the public code's own float32 runs
# are 4.4e-7 to 6.8e-7 off.
LOGITS, GRADIENTS = 2e-6, 1e-5
EMBEDDING = "transformer.embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def based(tmp_path_factory):
    """The folder of the BASED checkpoint and its contents."""
    weights, config, arrays = golden("based_lm")
    return write_published(
        tmp_path_factory.mktemp("checkpoints") / "based", weights, config
    ), arrays


def loss_and_gradients(config, params, ids):
    """Mean cross entropy of the next token, logits, and gradients by path."""
    graph, state = nnx.split(build(config, params))

    @jax.jit
    def program(state):
        def loss(state):
            logits, _ = nnx.merge(graph, state)(ids)
            log_p = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.mean(jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1)), logits

        return jax.value_and_grad(loss, has_aux=True)(state)

    (loss, logits), gradients = program(state)
    named = nnx.to_flat_state(gradients)
    return loss, logits, {"/".join(map(str, path)): leaf[...] for path, leaf in named}


@pytest.mark.parametrize("name", ["based_lm", "attn_lm", "mamba_lm"])
def test_logits_and_gradients_are_those_of_the_public_code(name, tmp_path):
    weights, published, arrays = golden(name)
    config, params, source = read_checkpoint(
        write_published(tmp_path / "published", weights, published)
    )
    ids = jnp.asarray(arrays["ids"])
    loss, logits, gradients = loss_and_gradients(config, params, ids)
    assert_close(logits[: len(arrays["logits"])], arrays["logits"], LOGITS)
    assert_close(loss, arrays["loss"], 1e-6)
    norms = dict(zip(weights, arrays["grad_norm"])) if "grad_norm" in arrays else {}
    leaves = [leaf for leaf in source["leaves"] if "tied" not in leaf["note"]]
    for leaf in leaves:
        found, there = gradients[leaf["path"]], leaf["source"]
        if f"grad.{there}" in arrays:
            expected = np.linalg.norm(arrays[f"grad.{there}"])
        else:
            expected = norms[there] if norms else arrays[f"grad_norm.{there}"]
        assert_close({there: jnp.linalg.norm(found)}, {there: expected}, GRADIENTS)
    assert len(gradients) == len(leaves)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["based_lm", "attn_lm", "mamba_lm"])
def test_there_and_back_is_the_same_bits(name, dtype, tmp_path):
    weights, published, _ = golden(name)
    random = np.random.default_rng(0)
    weights = {
        # not exact in bfloat16, and both tied matrices with other arrays between them
        f"model.{key}": random.normal(size=array.shape).astype(dtype)
        for key, array in weights.items()
    }
    embedding = next(iter(weights))
    weights["model.lm_head.weight"] = weights[embedding]
    weights["model.transformer.decay.decay"] = np.ones(4, dtype)
    folder = write_published(tmp_path / "published", weights, published)
    config, params, source = read_checkpoint(folder)
    assert {array.dtype for array in params.values()} == {np.dtype(np.float32)}
    write_checkpoint(tmp_path / "back", config, params, json.loads(json.dumps(source)))
    found = read_safetensors(tmp_path / "back" / "model.safetensors")
    del weights["model.transformer.decay.decay"]
    assert found.keys() == weights.keys()
    for key, array in weights.items():
        assert found[key].dtype == array.dtype and found[key].tobytes() == array.tobytes(), key
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == published


@pytest.mark.parametrize("name", ["based_lm", "attn_lm", "mamba_lm"])
def test_models_that_were_not_published_are_written_in_the_layouts(name, tmp_path):
    config, params, _ = read_checkpoint(write_published(tmp_path / "published", *golden(name)[:2]))
    write_checkpoint(tmp_path / "back", config, params)
    again, found, source = read_checkpoint(tmp_path / "back")
    assert again == config and found.keys() == params.keys()
    assert all(np.array_equal(found[path], array) for path, array in params.items())
    assert any("tied" in leaf["note"] for leaf in source["leaves"])


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("linear", {"kernel": "elu"}),
        ("linear", {"use_rotary": True}),
        ("linear", {"normalize": "none"}),
        ("sliding_window", {"rotary_fraction": 0.5}),
        ("short_conv", {"kernel_size": 4}),
    ],
)
def test_what_a_layout_cannot_express_is_not_written(based, mixer, options, tmp_path):
    config, params, source = read_checkpoint(based[0])
    changed = config.replace_mixer(mixer, **options)
    for origin in (source, None):
        with pytest.raises(ConvertError, match="cannot express this model: it would be read as"):
            write_checkpoint(tmp_path / "back", changed, params, origin)
    assert not (tmp_path / "back").exists()
    how = config.replace_mixer("linear", implementation="xla", chunk_size=64)
    write_checkpoint(tmp_path / "back", how, params, source)
    layers = (*config.layers[:-1], "mamba")
    with pytest.raises(ConvertError, match="no published layout has the layers linear, mamba, "):
        write_checkpoint(tmp_path / "other", dataclasses.replace(config, layers=layers), params)


def test_every_array_is_reported_once(based, tmp_path):
    weights, published, _ = golden("based_lm")
    weights = {f"model.{name}": array for name, array in weights.items()}
    weights["model.lm_head.weight"] = weights[f"model.{EMBEDDING}"]
    extra = {"model.transformer.decay.decay": 4, "model.train_metrics.num-tokens.count": 1}
    weights |= {name: np.ones(n, np.float32) for name, n in extra.items()}
    folder = write_published(tmp_path / "published", weights, published)
    _, params, source = read_checkpoint(folder)
    leaves = {leaf["source"]: leaf for leaf in source["leaves"]}
    assert len(leaves) == len(source["leaves"]) and leaves.keys() == weights.keys()
    for name, array in weights.items():
        assert tuple(leaves[name]["shape"]) == array.shape and leaves[name]["dtype"] == "float32"
    assert leaves["model.lm_head.weight"]["note"] == "tied to the embedding, the same array"
    ignored = {name: leaf["note"] for name, leaf in leaves.items() if leaf["path"] is None}
    assert ignored == dict(zip(extra, ["not used by BASED's code", "a measurement"]))
    assert {leaf["path"] for leaf in leaves.values()} - {None} == set(params)


def test_one_tied_matrix_and_every_file_format_give_the_same_model(based, tmp_path):
    expected = read_checkpoint(based[0])
    weights, published, _ = golden("based_lm")
    weights["lm_head.weight"] = weights.pop(EMBEDDING)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        folder = tmp_path / np.dtype(dtype).name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(published))
        arrays = {f"model.{name}": array.astype(dtype) for name, array in weights.items()}
        view = "model.transformer.layers.0.mlp.fc1.weight"
        arrays[view] = np.ascontiguousarray(arrays[view].T).T  # a view with other strides
        arrays["model.train_metrics.count"] = np.ones((), dtype)
        write_torch(folder / "pytorch_model.bin", arrays)
        config, params, _ = read_checkpoint(folder)
        assert config == expected[0] and params.keys() == expected[1].keys()
        assert all(np.array_equal(params[path], array) for path, array in expected[1].items())


def test_files_of_one_model_in_parts(based, tmp_path):
    weights, published, _ = golden("based_lm")
    names = sorted(weights)
    folder = write_published(tmp_path / "parts", {n: weights[n] for n in names[::2]}, published)
    half = write_published(tmp_path / "half", {n: weights[n] for n in names[1::2]}, published)
    (half / "model.safetensors").rename(folder / "model-2.safetensors")
    _, params, _ = read_checkpoint(folder)
    assert params.keys() == read_checkpoint(based[0])[1].keys()
    (folder / "copy.safetensors").write_bytes((folder / "model-2.safetensors").read_bytes())
    with pytest.raises(ConvertError, match="repeats .*: which file is the right one"):
        read_checkpoint(folder)


def test_a_mamba_of_transformers_is_the_same_model(tmp_path):
    weights, published, _ = golden("mamba_lm")
    expected = read_checkpoint(write_published(tmp_path / "ssm", weights, published))
    weights["backbone.embeddings.weight"] = weights.pop("backbone.embedding.weight")
    theirs = {
        "model_type": "mamba",
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "state_size": 16,
        "time_step_rank": 3,
    }
    config, params, _ = read_checkpoint(write_published(tmp_path / "transformers", weights, theirs))
    assert config == expected[0]
    assert all(np.array_equal(params[path], array) for path, array in expected[1].items())


@pytest.mark.parametrize(("num_factors", "num_features"), [(2, 153), (4, 256)])
def test_llops_begins_as_based_and_can_change(based, num_factors, num_features):
    """Also the columns beyond BASED's, which are silent, have gradients, of 1 / 103 the size."""
    folder, arrays = based
    config, params, _ = read_checkpoint(folder)
    config, params = with_llops(config, params, num_factors=num_factors, num_features=num_features)
    ids = jnp.asarray(arrays["ids"])
    _, logits, gradients = loss_and_gradients(config, params, ids)
    assert_close(logits[:1], arrays["logits"], LOGITS)
    W = gradients["blocks/1/mixer/attend/phi/W"]
    assert W.shape == (4, 2, num_factors, 1, 16, num_features)
    spare = W[:, 0, 0, 0, :, 153:]  # the first factor of the queries
    assert jnp.all(jnp.max(jnp.abs(spare), axis=1) > 1e-5 * jnp.max(jnp.abs(W[:, 0, 0])))
    # no two factors move together for ever
    b = gradients["blocks/1/mixer/attend/phi/b"][:, 1, :, 0, :153]
    for i in range(num_factors):
        for j in range(i):
            assert jnp.max(jnp.abs(b[:, i] - b[:, j])) > 1e-3 * jnp.max(jnp.abs(b))


def test_what_cannot_become_llops_is_refused(tmp_path, based):
    weights, published, _ = golden("mamba_lm")
    config, params, _ = read_checkpoint(write_published(tmp_path / "mamba", weights, published))
    with pytest.raises(ValueError, match="begins as the taylor features .* has the layers mamba"):
        with_llops(config, params)
    config, params, source = read_checkpoint(based[0])
    with pytest.raises(ValueError, match="num_features=152 with init='based' and D=16: expected"):
        with_llops(config, params, num_features=152)
    with pytest.raises(ConvertError, match="has no place for blocks/1/mixer/attend/phi/W"):
        write_checkpoint(tmp_path / "back", *with_llops(config, params), source)
    assert not (tmp_path / "back").exists()


def test_command_there_and_back(based, tmp_path, capsys):
    folder, arrays = based
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert command.main(["convert", f"--checkpoint={folder}", f"--out={ours}"]) == 0
    assert "arrays; a line for each" in capsys.readouterr().out
    report = (ours / "report.txt").read_text().splitlines()
    line = "transformer.layers.2.mixer.Wqkv.weight float32[384, 128] -> blocks/2/mixer/qkv/kernel"
    assert line in report and len(report) == len(golden("based_lm")[0])
    config, params, _ = load_decoder(ours)
    expected_config, expected, _ = read_checkpoint(folder)
    assert config == expected_config
    found = arrays_of(build(config, params))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], array) for path, array in expected.items())
    assert command.main(["convert", f"--checkpoint={ours}", f"--out={back}", "--back"]) == 0
    found, expected = ((of / "model.safetensors").read_bytes() for of in (back, folder))
    assert found == expected

    llops = tmp_path / "llops"
    arguments = [f"--checkpoint={folder}", f"--out={llops}", "--kernel=llops", "--num-features=160"]
    assert command.main(["convert", *arguments]) == 0
    assert "blocks/1/mixer/attend/phi/W float32[4, 2, 4, 1, 16, 160] is new" in (
        (llops / "report.txt").read_text()
    )
    config, params, _ = load_decoder(llops)
    logits, _ = nnx.jit(Decoder.__call__)(build(config, params), jnp.asarray(arrays["ids"][:1]))
    assert_close(logits, arrays["logits"], LOGITS)


def test_command_refuses_and_leaves_everything_as_it_was(based, tmp_path, capsys):
    folder, _ = based
    out = tmp_path / "out"
    assert command.main(["convert", f"--checkpoint={tmp_path}", f"--out={out}"]) == 1
    assert "has no weights, expected *.safetensors or pytorch_model*.bin" in capsys.readouterr().err
    arguments = [f"--checkpoint={folder}", f"--out={out}", "--kernel=llops", "--num_features=5"]
    assert command.main(["convert", *arguments]) == 1
    assert "num_features=5" in capsys.readouterr().err
    assert not out.exists()
    assert command.main(["convert", f"--checkpoint={folder}", f"--out={out}", "--back"]) == 1
    assert "has no decoder.json" in capsys.readouterr().err
    out.mkdir()
    (out / "precious").write_text("x")
    for arguments, message in (
        ([f"--checkpoint={folder}", f"--out={out}"], "exists already; nothing was changed"),
        ([f"--out={tmp_path / 'new'}"], "--checkpoint=FOLDER is needed"),
        (
            [f"--checkpoint={folder}", f"--out={tmp_path / 'new'}", "--back", "--kernel=llops"],
            "the published layout has no llops features",
        ),
    ):
        with pytest.raises(SystemExit) as exit:
            command.main(["convert", *arguments])
        assert exit.value.code == 2 and message in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_parameters_that_do_not_fit_are_named(based):
    config, params, _ = read_checkpoint(based[0])
    params["norm/scale"] = params["norm/scale"][:5]
    params["bias"] = params.pop("blocks/0/mixer/conv")
    with pytest.raises(ValueError, match=r"conv is missing; bias is not .*expected \[128\], fou"):
        build(config, params)
    with pytest.raises(ValueError, match="this is no description of a decoder"):
        type(config).from_dict(dataclasses.asdict(config) | {"depth": 3})
