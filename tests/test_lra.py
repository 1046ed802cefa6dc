"""The main job from its command line: trains, resumes, refuses, and leaves what it promises."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import lra, presets
from experiments.common.flags import parse_options
from experiments.lra_settings import Config
from experiments.tasks import listops

ROOT = pathlib.Path(__file__).parents[1]
SMALL = [
    "--task=listops", "--preset=quick", "--kernel_options=num_features=8,num_factors=2",
    "--width=16", "--num_heads=1", "--mlp_width=16", "--head_width=16", "--batch_size=2",
    "--steps=8", "--eval_every=4", "--steps_per_dispatch=2", "--log_every=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder laid out like the published ListOps, with few rows."""
    folder = tmp_path_factory.mktemp("published") / "listops-1000"
    folder.mkdir()
    rows = listops.generate(0, 40, 1, progress=False)
    for name, start, stop in (("train", 0, 24), ("val", 24, 31), ("test", 31, 40)):
        lines = ["Source\tTarget"]
        for i in range(start, stop):
            ids = rows.tokens[rows.offsets[i] : rows.offsets[i + 1]]
            lines.append(f"{' '.join(listops.grammar.decode(ids))}\t{rows.labels[i]}")
        (folder / f"basic_{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder.parent


def command(data, tmp_path, *arguments):
    """A process that runs the command line."""
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.lra", *SMALL, f"--data_dir={data}",
         f"--cache_dir={data / 'cache'}", f"--run_dir={tmp_path / 'run'}", *arguments],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finished(process):
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def curves(run_dir):
    return {p.name: p.read_bytes() for p in run_dir.glob("*.csv") if "timing" not in p.name}


@pytest.mark.slow
def test_killed_command_continues_bit_for_bit(data, tmp_path):
    """SIGKILL in both phases, then the same command: the curves of the uninterrupted run."""
    arguments = ("--pretrain_steps=8", "--checkpoint_every=2")
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    code, out, err = finished(command(data, tmp_path / "whole", *arguments))
    assert code == 0, err
    for phase, rows in (("pretrain", 3), ("train", 5)):
        process = command(data, tmp_path / "killed", *arguments)
        path = tmp_path / "killed" / "run" / f"{phase}_train.csv"
        while process.poll() is None and (
            not path.exists() or path.read_text().count("\n") < rows + 1
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    code, again, err = finished(command(data, tmp_path / "killed", *arguments))
    assert code == 0, err
    assert curves(tmp_path / "killed" / "run") == curves(tmp_path / "whole" / "run")
    whole, killed = (json.loads(text.splitlines()[-1]) for text in (out, again))
    assert killed["test_accuracy"] == whole["test_accuracy"]


@pytest.mark.slow
def test_a_run_leaves_what_it_promises(data, tmp_path):
    code, out, err = finished(command(data, tmp_path, "--log_features"))
    assert code == 0, err
    header = (tmp_path / "run" / "train_eval.csv").read_text().split("\n")[0]
    assert "effective_rank_0" in header and "active_features_0" in header
    summary = json.loads(out.splitlines()[-1])
    assert list(summary) == [
        "task", "kernel", "preset", "steps", "seconds", "test_accuracy", "at_chance", "run_dir",
    ]  # fmt: skip
    run_dir = pathlib.Path(summary["run_dir"])
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").rglob("*tfevents*"))
    result = json.loads((run_dir / "result.json").read_text())
    assert result["command"].startswith("python -m experiments.lra --task=listops")
    assert result["metrics"]["test_accuracy"] == summary["test_accuracy"]
    assert summary["test_accuracy"] * 9 == pytest.approx(round(summary["test_accuracy"] * 9))
    task = listops.load(data, data / "cache", progress=False)
    assert result["metrics"]["data"] == task.fingerprint
    assert json.loads((run_dir / "run.json").read_text())["config"]["data"] == task.fingerprint
    assert result["metrics"]["at_chance"] is summary["at_chance"]
    assert ("AT CHANCE" in err) is summary["at_chance"]
    assert set(result["metrics"]["reference"]) == {
        "majority class", "first token", "one level", "two levels",
    }  # fmt: skip
    for name in ("majority class", "first token", "test accuracy"):
        assert name in err

    code, again, err = finished(command(data, tmp_path, "--log_features"))
    assert code == 0 and "already complete" in err
    assert json.loads(again.splitlines()[-1])["test_accuracy"] == summary["test_accuracy"]

    code, _, err = finished(command(data, tmp_path, "--log_features", "--learning_rate=1"))
    assert code == 1 and "learning_rate: 0.003 there, 1.0 now" in err

    report = tmp_path / "table"
    subprocess.run(
        [sys.executable, "-m", "experiments.report", f"--runs={tmp_path}", f"--out={report}"],
        cwd=ROOT, check=True,
    )  # fmt: skip
    table = report.with_suffix(".md").read_text()
    assert f"| {100 * summary['test_accuracy']:.2f} |" in table and "--task=listops" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=listop"], "listop.*listops"),
        (["--kernel=lops"], "lops.*llops"),
        (["--preset=fast"], "fast.*quick"),
        (["--learnig_rate=1"], "unknown flag --learnig_rate; did you mean --learning_rate"),
        (["--pretrain_steps=5", "--mask_ratio=0"], "mask_ratio=0.* nothing to learn"),
        (["--pretrain_steps=5", "--objective=next_token"], "next_token needs --causal"),
        (["--kernel_options=p"], "kernel_options='p': 'p' is not of the form name=value"),
        (["--kernel_options=degree=2"], "options=.* do not fit kernel='llops'"),
        (["--log_features", "--kernel=softmax", "--kernel_options="], "which has no features"),
        (["--rule=delta"], "rule='delta' with causal=False: .* needs --causal"),
        (["--steps=0"], "steps=0, expected at least 1"),
        (["--pooling=cls", "--causal"], "use_cls=True with causal=True"),
    ],
)
def test_wrong_settings_exit_with_2_and_write_nothing(data, tmp_path, capsys, arguments, message):
    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        lra.main(["lra", *SMALL, f"--data_dir={data}", f"--cache_dir={data / 'cache'}",
                  f"--run_dir={run_dir}", *arguments])  # fmt: skip
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err, re.S)
    assert not run_dir.exists()


def test_missing_data_say_what_to_do(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        lra.main(["lra", *SMALL, f"--data_dir={tmp_path}", f"--cache_dir={tmp_path / 'cache'}"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert str(tmp_path) in message and "basic_train.tsv" in message and "to do:" in message


@pytest.mark.parametrize("preset", presets.PRESETS)
@pytest.mark.parametrize("kernel", ["llops", "slay", "softmax"])
def test_every_preset_builds(data, preset, kernel):
    """Shapes only: parameters are never computed."""
    name, settings = presets.resolve(preset, "listops", kernel, "gpu")
    assert name == preset
    config = Config(kernel=kernel, **settings)
    phases, _ = lra.make_phases(config, listops.load(data, data / "cache", progress=False))
    assert len(phases) == (2 if preset.startswith("spt") else 1)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_are_settings(preset):
    for task in presets.PRESETS[preset]:
        Config(task=task, **presets.resolve(preset, task, "llops", "gpu")[1])


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_print_config_shows_what_a_preset_sets(preset, capsys):
    with pytest.raises(SystemExit) as stop:
        lra.main(["lra", "--task=image", f"--preset={preset}", "--print-config", "--seed=7"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    expected = presets.resolve(preset, "image", "llops", "cpu")[1] | {"seed": 7, "preset": preset}
    assert {f"{name} = {value}" for name, value in expected.items()} <= {*lines}


def test_auto_is_quick_on_a_cpu_and_skyformer_elsewhere():
    assert presets.resolve("auto", "listops", "llops", "cpu")[0] == "quick"
    assert presets.resolve("auto", "listops", "llops", "gpu")[0] == "skyformer"
    assert presets.resolve("auto", "listops", "llops", "tpu")[0] == "skyformer"


def test_options_are_literals_or_words():
    assert parse_options("x", "a=1,b=x,c=False,d=0.5") == {"a": 1, "b": "x", "c": False, "d": 0.5}
    assert parse_options("x", "") == {}


def test_readme_example_runs():
    text = (ROOT / "README.md").read_text()
    example, *_ = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict = {}
    exec(example, names)
    assert names["y"].shape == (2, 1000, 256) and names["y_next"].shape == (2, 1, 256)
    assert np.all(np.isfinite(names["y"]))
    assert len(example.strip().splitlines()) <= 10
