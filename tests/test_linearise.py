"""Softmax to linear attention: fits of layers, and the command from a Llama to a model."""

import json
import re

import jax
import numpy as np
import pytest
from conftest import assert_close
from decoder_cases import write_published
from llama_cases import LLAMA, llama_weights

from experiments import heads, linearise, lm
from experiments.common.tokenizer import load_tokenizer
from experiments.linearise_fit import LayerFitter, first_sample
from experiments.text_data.rows import Rows
from experiments.text_data.shards import load_text
from lowrank_attn.convert import with_kernel
from lowrank_attn.models.folder import build, load_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in Llama's layout, and text."""
    folder = tmp_path_factory.mktemp("linearise")
    write_published(folder / "llama", llama_weights(), LLAMA)
    (folder / "text").mkdir()
    lines = (json.dumps({"text": f"{i % 7} is a number. " * (1 + i % 3)}) for i in range(200))
    (folder / "text" / "a.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def command(folder, capsys, monkeypatch):
    """`command(*arguments)` runs in this process and gives the summary."""
    monkeypatch.setattr(lm, "write_samples", lambda *unused: "")

    def run(*arguments):
        linearise.main([
            "linearise", f"--checkpoint={folder / 'llama'}", f"--data={folder / 'text'}",
            "--tokenizer=bytes", "--validation_share=0.2", f"--cache_dir={folder / 'cache'}",
            "--length=32", "--fit_rows=16", "--fit_batch=4", "--fit_steps=20",
            "--steps=4", "--eval_every=4", "--batch_size=4", "--validation_rows=16", *arguments,
        ])  # fmt: skip
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_a_fit_lowers_the_error_of_a_layer(folder):
    """It starts below 1, the error of silence, with the gain of the least error."""
    decoder, params, _ = linearise.read_teacher(str(folder / "llama"))
    teacher = build(decoder, params)
    student = build(*with_kernel(decoder, params, "llops", {"num_features": 16}))
    tokens = np.random.default_rng(0).integers(0, 256, (8, 24))
    fitter = LayerFitter(teacher, student, 15, 8, 0.03)
    sample = fitter.next_sample(0, first_sample(teacher, tokens, 256))
    fitted = fitter.fit(1, sample, sample, jax.random.key(0))
    before, after = fitted.errors
    assert after < 0.9 * before and before < 1
    assert {name.split("/")[0] for name in fitted.params} == {"attend", "query", "key"}
    x, _ = teacher.hidden(tokens)
    last = fitter.next_sample(1, sample).x
    assert_close(teacher.norm(last), x)


def test_heads_that_are_written_give_the_outputs_of_the_model(folder, tmp_path):
    settings = {
        "data": str(folder / "text"), "tokenizer": "bytes", "validation_share": 0.2,
        "cache_dir": str(folder / "cache"),
    }  # fmt: skip
    heads.main([
        "heads", f"--checkpoint={folder / 'llama'}", "--length=9",
        f"--out={tmp_path / 'heads.npz'}",
        *(f"--{name}={value}" for name, value in settings.items()),
    ])  # fmt: skip
    q, k, v = (np.load(tmp_path / "heads.npz")[name] for name in "qkv")
    model = build(*linearise.read_teacher(str(folder / "llama"))[:2])
    H = q.shape[0] // len(model.blocks)
    assert q.shape == k.shape == v.shape == (2 * H, 9, q.shape[2])
    scores = np.einsum("htd,hsd->hts", q[:H], k[:H]) / q.shape[2] ** 0.5
    weights = jax.nn.softmax(np.where(np.tri(9), scores, -np.inf))
    y = np.einsum("hts,hsp->thp", weights, v[:H])
    text = load_text(heads.Config(**settings), load_tokenizer("bytes"))
    tokens = Rows(text.splits["validation"], 9, 1)[0]["tokens"]
    block = model.blocks[0]
    x = model.embedding(tokens[None].astype(int))
    assert_close(block.mixer.out(y[None]), block.mixer(block.mixer_norm(x))[0])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["llops", "slay_auto"])
def test_fits_lower_the_error_of_every_layer(command, tmp_path, kernel):
    summary = command(f"--out={tmp_path}", f"--kernel={kernel}", "--kernel_options=num_features=32")
    metrics = json.loads((tmp_path / "result.json").read_text())["metrics"]
    assert all(0 < layer["after"] < layer["before"] for layer in metrics["layers"])
    assert all(np.isfinite(summary[f"perplexity_{n}"]) for n in ("before", "fitted", "tuned"))
    options = load_decoder(tmp_path / "fitted")[0].mixers["linear"]["options"]
    if kernel == "slay_auto":
        assert sum(options["histogram"]) == pytest.approx(1)


@pytest.mark.slow
def test_from_a_checkpoint_to_a_tuned_model(command, folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = (f"--out={out}", "--kernel=hedgehog")
    fit, fitted = LayerFitter.fit, []

    def stopped_after_a_layer(self, layer, *rest):
        if fitted:
            raise KeyboardInterrupt
        fitted.append(layer)
        return fit(self, layer, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LayerFitter, "fit", stopped_after_a_layer)
        command(*arguments)
    assert [path.name for path in (out / "layers").iterdir()] == ["0.npz"]

    def others(self, layer, *rest):
        fitted.append(layer)
        return fit(self, layer, *rest)

    monkeypatch.setattr(LayerFitter, "fit", others)
    summary = command(*arguments)
    assert fitted == [0, 1]
    metrics = json.loads((out / "result.json").read_text())["metrics"]
    assert all(0 < layer["after"] < layer["before"] for layer in metrics["layers"])
    assert metrics["perplexity_tuned"] < metrics["perplexity_fitted"]
    decoder, params, source = load_decoder(out / "fitted")
    assert decoder.mixers["linear"]["kernel"] == "hedgehog" and source["config"] == LLAMA
    # the fit leaves everything else as it was
    value = llama_weights()["model.layers.1.self_attn.v_proj.weight"]
    assert np.array_equal(params["blocks/1/mixer/value/kernel"].reshape(24, 16), value.T)
    tuned, after, _ = load_decoder(summary["model"])
    assert tuned == decoder and after.keys() == params.keys()
    assert command(*arguments) == summary and fitted == [0, 1]

    with pytest.raises(SystemExit) as stop:
        command(*arguments, "--fit_rate=0.02")
    assert stop.value.code == 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"intermediate_size": 48}, r"up_proj.weight: expected \[48, 24\] .*, found \[40, 24\]"),
        ({"vocab_size": 100}, r"embed_tokens.weight: expected \[100, 24\] .*, found \[257, 24\]"),
        ({"model_type": "gemma"}, "config.json is not of BASED"),
    ],
)
def test_a_foreign_checkpoint_is_refused(command, tmp_path, capsys, edit, message):
    write_published(tmp_path / "other", llama_weights(), LLAMA | edit)
    with pytest.raises(SystemExit) as stop:
        command(f"--checkpoint={tmp_path / 'other'}", f"--out={tmp_path / 'out'}")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and re.search(message, error), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out=FOLDER is needed"),
        (["--out=x", "--fit_batch=17"], "fit_batch=17 is more than fit_rows=16"),
        (["--out=x", "--fit_steps=0"], "fit_steps=0, expected at least 1"),
        (["--out=x", "--kernel=softmax"], "softmax"),
        (["--out=x", "--checkpoint=nowhere"], "nowhere has no weights"),
    ],
)
def test_wrong_settings_exit_with_2(command, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        command(*arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
