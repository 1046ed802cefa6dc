"""Checkpoints of Llama: their logits, and every array there and back."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from decoder_cases import write_published
from flax import nnx
from llama_cases import LLAMA, llama_logits, llama_weights

from experiments.flops import training_flops
from lowrank_attn.convert import ConvertError, build, read_checkpoint, write_checkpoint
from lowrank_attn.convert.kernels import with_kernel
from lowrank_attn.convert.safetensors import read_safetensors
from lowrank_attn.models.decoder import Decoder
from lowrank_attn.models.generate import generate

IDS = np.random.default_rng(1).integers(0, 257, (2, 19))
run = nnx.jit(Decoder.__call__)


def published(folder, edit=lambda weights, config: None):
    weights, config = llama_weights(), dict(LLAMA)
    edit(weights, config)
    return write_published(folder, weights, config)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_a_loop_in_float64(tied, tmp_path):
    config = LLAMA | {"tie_word_embeddings": tied}
    weights = llama_weights(config)
    decoder, params, _ = read_checkpoint(write_published(tmp_path / "llama", weights, config))
    logits, _ = run(build(decoder, params), jnp.asarray(IDS))
    assert_close(logits, np.stack([llama_logits(weights, config, row) for row in IDS]), 2e-6)


def test_generated_text_is_that_of_whole_reads(tmp_path):
    """The cache of keys and values, for rows of unequal length."""
    model = build(*read_checkpoint(published(tmp_path / "llama"))[:2])
    whole, lengths = IDS.copy(), (7, 12)
    prompts = [row[:n].tolist() for row, n in zip(IDS, lengths)]
    found = generate(model, prompts, max_new_tokens=3)
    for row, n, tokens in zip(whole, lengths, found):
        row[n : n + 3] = tokens
    best = np.argmax(run(model, jnp.asarray(whole))[0], axis=-1)
    assert found == [row[n - 1 : n + 2].tolist() for row, n in zip(best, lengths)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_is_the_same_bits(dtype, tmp_path):
    def edit(weights, config):
        for name in weights:
            weights[name] = weights[name].astype(dtype)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    folder = published(tmp_path / "llama", edit)
    decoder, params, source = read_checkpoint(folder)
    places = {leaf["source"]: leaf["path"] for leaf in source["leaves"]}
    assert places["model.layers.1.mlp.gate_proj.weight"] == "blocks/1/mlp/up/kernel[:, 1]"
    assert places["model.layers.0.self_attn.rotary_emb.inv_freq"] is None
    write_checkpoint(tmp_path / "back", decoder, params, json.loads(json.dumps(source)))
    write_checkpoint(tmp_path / "new", decoder, params)
    expected = read_safetensors(folder / "model.safetensors")
    del expected["model.layers.0.self_attn.rotary_emb.inv_freq"]
    found = read_safetensors(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == x.tobytes() for name, x in expected.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == LLAMA
    again, same, _ = read_checkpoint(tmp_path / "new")
    assert again == decoder and all(np.array_equal(same[name], x) for name, x in params.items())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda w, c: c.update(num_key_value_heads=4),
            r"0.self_attn.k_proj.weight: expected \[32, 24\] by config.json, found \[16, 24\]",
        ),
        (
            lambda w, c: c.update(intermediate_size=48),
            r"1.mlp.gate_proj.weight: expected \[48, 24\] by config.json, found \[40, 24\]",
        ),
        (
            lambda w, c: c.update(tie_word_embeddings=True),
            "lm_head.weight differs from model.embed",
        ),
        (lambda w, c: w.pop("lm_head.weight"), r"lm_head.weight \[257, 24\] is missing"),
        (
            lambda w, c: w.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32)}),
            "layers.0.self_attn.q_proj.bias is unknown",
        ),
        (lambda w, c: c.update(rope_scaling={"factor": 8}), "rope_scaling={'factor': 8}, expected"),
        (
            lambda w, c: c.update(rope_parameters={"rope_type": "yarn"}),
            "'yarn'.*rope_type 'default",
        ),
        (lambda w, c: c.update(attention_bias=True), "attention_bias=True, expected False"),
        (lambda w, c: c.update(model_type="mistral", sliding_window=64), "sliding_window=64"),
        (lambda w, c: c.pop("hidden_size"), "config.json has no 'hidden_size'"),
    ],
)
def test_another_model_is_refused_with_the_arrays_and_shapes(edit, message, tmp_path):
    with pytest.raises(ConvertError, match=message):
        read_checkpoint(published(tmp_path / "llama", edit))


def test_another_kernel_has_the_same_projections(tmp_path):
    decoder, params, source = read_checkpoint(published(tmp_path / "llama"))
    options = {"num_features": 12}
    student, changed = with_kernel(decoder, params, "llops", options)
    assert student.mixers["linear"]["options"] == options and student.tied is False
    assert all(changed[name] is x for name, x in params.items())
    assert build(student, changed).blocks[1].mixer.attend.gain.shape == (4, 8)
    with pytest.raises(ConvertError, match="has no place for .*blocks/0/mixer/attend/phi/W"):
        write_checkpoint(tmp_path / "back", student, changed, source)
    back, same = with_kernel(student, changed, "elu")
    assert same.keys() == params.keys() and back.mixers["linear"]["kernel"] == "elu"
    with pytest.raises(ValueError, match="kernel='softmax' has no features"):
        with_kernel(decoder, params, "softmax")


def test_operations_of_grouped_heads(tmp_path):
    decoder, params, _ = read_checkpoint(published(tmp_path / "llama"))
    count = functools.partial(training_flops, decoder)
    matrices = sum(x.size for name, x in params.items() if name != "embedding/embedding")
    assert count(10) == 3 * (2 * matrices + 2 * 4 * (8 + 8) * 11)
    linear, _ = with_kernel(decoder, params, "hedgehog")
    maps = 2 * 2 * 2 * 8 * 8  # of two layers, two heads, queries and keys
    expected = 3 * (2 * (matrices + maps) + 2 * 2 * (2 + 4) * 16 * 8)
    assert training_flops(linear, 10) == expected
