"""The README's way from a published checkpoint to a table, at the size of a test."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import convert, lm, prepare_text
from lowrank_attn.convert import read_checkpoint, write_checkpoint
from lowrank_attn.models.decoder_configs import DecoderConfig, based_layers, based_mixers
from lowrank_attn.models.folder import arrays_of, load_decoder

ROOT = pathlib.Path(__file__).parent.parent
BASED = DecoderConfig(
    257, 32, based_layers(3, (1,), (2,)), based_mixers(2, 8), mlp_width=32, vocab_multiple=8
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in the published layout, and text."""
    folder = tmp_path_factory.mktemp("commands")
    model = BASED.make(rngs=nnx.Rngs(params=0))
    write_checkpoint(folder / "published", BASED, arrays_of(model), None)
    (folder / "text").mkdir()
    lines = (json.dumps({"text": f"{i % 7} is a number. " * (1 + i % 3)}) for i in range(200))
    (folder / "text" / "a.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def continued(folder):
    """The run that goes on from the checkpoint with LLoPS."""
    models, shards, run_dir = (folder / name for name in ("based", "shards", "run"))
    convert.main(["convert", f"--checkpoint={folder / 'published'}", f"--out={models}"])
    shared = ["--tokenizer=bytes", "--validation_share=0.2", f"--cache_dir={shards}"]
    prepare_text.main(["prepare_text", f"--data={folder / 'text'}", *shared])
    (tokens,) = shards.glob("tokens-*")
    lm.main([
        "lm", f"--checkpoint={models}", "--kernel=llops", f"--data={tokens}", *shared,
        f"--run_dir={run_dir}", "--steps=6", "--eval_every=6", "--batch_size=4", "--length=32",
    ])  # fmt: skip
    return run_dir


@pytest.mark.slow
def test_from_a_checkpoint_to_a_continued_model(folder, continued):
    metrics = json.loads((continued / "result.json").read_text())["metrics"]
    assert metrics["validation_loss"] < metrics["validation_loss_before"]
    decoder, params, _ = load_decoder(continued / "model")
    assert decoder.mixers["linear"]["kernel"] == "llops"
    _, published, _ = read_checkpoint(folder / "published")
    changed = np.abs(published["embedding/embedding"] - params["embedding/embedding"])
    assert 0 < np.max(changed) < 0.05


@pytest.mark.slow
def test_readme_example_runs(folder, continued, monkeypatch):
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(from lowrank_attn.convert import.*?)```", text, re.S)
    (folder / "models").mkdir()
    (folder / "based").rename(folder / "models" / "based-360m")
    monkeypatch.chdir(folder)
    names = {"prompts": [[1, 2, 3], [4]], "key": jax.random.key(0)}
    exec(example, names)
    assert names["tokens"].shape == (2,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of lm_eval and what it imports
def test_from_the_continued_model_to_a_table(folder, continued, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when lm_eval is imported
    pytest.importorskip("lm_eval", reason="pip install lowrank-attn[lm_eval]")
    from zero_shot_cases import ITEMS

    from experiments import zero_shot

    (folder / "items").mkdir()
    (folder / "items" / "piqa.jsonl").write_text(json.dumps(ITEMS["piqa"]) + "\n")
    zero_shot.main([
        "zero_shot", f"--model={continued / 'model'}", "--tokenizer=bytes", "--tasks=piqa",
        f"--local={folder / 'items'}", f"--run_dir={folder / 'scores'}",
    ])  # fmt: skip
    assert "PIQA" in (folder / "scores" / "result.md").read_text()
