"""Language models that differ in their kernel only."""

import csv
import dataclasses
import json
import pathlib

import pytest

from experiments import lm, slay_lm
from experiments.common.phase import NonFiniteError
from experiments.common.tokenizer import load_tokenizer
from experiments.flops import training_flops
from experiments.lm_settings import EXACT
from experiments.lm_start import make_start
from lowrank_attn.models.decoder_configs import CONFIGS


@pytest.fixture
def config(tmp_path):
    return slay_lm.Config(**slay_lm.QUICK | {"quick": True, "runs": str(tmp_path / "runs")})


def test_runs_differ_in_the_kernel_only(config):
    runs = [dataclasses.asdict(slay_lm.run_config(config, kernel)) for kernel in slay_lm.KERNELS]
    differ = {name for name in runs[0] if len({run[name] for run in runs}) > 1}
    assert differ == {"kernel", "kernel_options", "run_dir", "remat"}
    for run in runs:
        start = make_start(lm.Config(**run), load_tokenizer("bytes"))
        assert start.decoder.vocab_size == 257
        assert training_flops(start.decoder, 64) > 6 * 257 * 48


def test_states_of_kernels_with_a_choice_are_equal():
    def sizes(kernel):
        options = slay_lm.KERNELS[kernel](256, 1024)
        return slay_lm.state_size(kernel, options, "gpt2-small")

    assert sizes("slay") == sizes("favor") == sizes("slay_auto") == (256, 256 * 65)
    assert sizes("llops") == (256, 256 * 64)  # no sum of scores
    assert sizes("elu") == (64, 64 * 65) and sizes("cosformer") == (128, 128 * 65)
    assert sizes("softmax") == sizes("yat_spherical") == (None, None)


def test_text_is_the_same_every_time(tmp_path):
    one, two = (pathlib.Path(slay_lm.generated_text(tmp_path / name)) for name in "ab")
    assert len(list(one.iterdir())) == 40
    for path in one.iterdir():
        assert path.read_text() == (two / path.name).read_text()
        assert len(path.read_text().split()) == 200


def test_the_command_writes_a_table_after_each_run(tmp_path, monkeypatch, capsys):
    losses = {"softmax": 4.0, "slay": 4.5, "elu": 4.25}

    def run(made):
        if made.kernel == "favor":
            raise NonFiniteError("loss is nan")
        folder = pathlib.Path(made.run_dir)
        folder.mkdir(parents=True)
        loss = losses[made.kernel]
        (folder / "train_eval.csv").write_text(f"step,loss\n4,{loss + 1}\n8,{loss}\n")
        metrics = {
            "parameters": 70896, "tokens": 1024, "validation_loss": loss,
            "validation_perplexity": 2.0, "timing": {"tokens_per_second": 1e5},
        }  # fmt: skip
        (folder / "result.json").write_text(json.dumps({"metrics": metrics}))

    monkeypatch.setattr(lm, "run", run)
    out = tmp_path / "folder" / "lm"
    slay_lm.main(["x", "--quick", f"--out={out}", f"--runs={tmp_path / 'runs'}",
                  "--kernels=slay,favor,softmax,elu"])  # fmt: skip
    with open(f"{out}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["kernel"] for row in rows] == ["softmax", "elu", "slay", "favor"]
    assert rows[2]["published_loss"] == "4.676" and rows[3]["loss"] == "nan"
    text = out.with_suffix(".md").read_text()
    order = "Order of losses: softmax < elu < slay; in the paper softmax < slay < elu."
    assert order in text and "| slay | 32 | 800 | 70,896 | 1,024 | 4.5 |" in text
    assert out.with_suffix(".png").stat().st_size > 5_000
    assert "favor: loss is nan" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag, known",
    [("--kernels=softmax,linear", "cosformer"), ("--features=40", "multiple of 16"),
     ("--noquick", "--data=FOLDER"), ("--model=gpt3", "gpt2-small"),
     ("--batch_size=0", "at least 1")],
)  # fmt: skip
def test_wrong_settings(flag, known, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        slay_lm.main(["x", "--quick", f"--runs={tmp_path}", f"--out={tmp_path / 'lm'}", flag])
    assert known in capsys.readouterr().err


def test_models_without_a_state_write_no_text(config):
    made = dataclasses.replace(slay_lm.run_config(config, "yat_spherical"), samples=True)
    with pytest.raises(
        ValueError, match="kernel='yat_spherical' in linear layers, .*samples=false"
    ):
        make_start(made, load_tokenizer("bytes"))
    assert CONFIGS["gpt2-small"].mixers["linear"]["kernel"] in EXACT


@pytest.mark.slow
def test_quick_trains_and_finds_its_runs_again(tmp_path, capfd):
    arguments = ["x", "--quick", f"--out={tmp_path / 'lm'}", f"--runs={tmp_path / 'runs'}",
                 "--kernels=yat_spherical", "--learning_rate=0.02", "--steps=24"]  # fmt: skip
    slay_lm.main(arguments)
    table = (tmp_path / "lm.csv").read_text()
    (row,) = csv.DictReader(table.splitlines())
    assert float(row["loss"]) < 4.5 and int(row["tokens"]) == 24 * 2 * 64
    slay_lm.main(arguments)
    assert "already complete" in capfd.readouterr().err
    assert (tmp_path / "lm.csv").read_text() == table
