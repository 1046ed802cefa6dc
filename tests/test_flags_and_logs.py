"""Flags, CSV files, the clock and the record of a run."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from toy_run import (
    ToyConfig,
)

from experiments.common import flags, log, plot, record


def exit_of(capsys, *arguments, preset=None):
    with pytest.raises(SystemExit) as exit_:
        flags.parse(ToyConfig, ["toy", *arguments], preset)
    return exit_.value.code, capsys.readouterr()


def test_flags_overrule_the_preset_and_the_preset_the_defaults():
    def preset(config):
        return {"width": 16, "learning_rate": 0.5, "seed": 1 if config.pool == "max" else 2}

    config = flags.parse(ToyConfig, ["toy", "--pool=max", "--learning-rate", "0.25"], preset)
    assert (config.width, config.learning_rate, config.seed) == (16, 0.25, 1)
    assert flags.parse(ToyConfig, ["toy"]) == ToyConfig()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widht=3"], "unknown flag --widht; did you mean --width? Known flags: distributed, "),
        (["--pool=sum"], "mean|max"),
        (["--width=wide"], "width"),
        (["--eval_every=0"], "eval_every=0 must be at least 1"),
        (["listops"], "unexpected argument 'listops'"),
    ],
)
def test_wrong_flags_exit_with_2(capsys, arguments, message):
    code, printed = exit_of(capsys, *arguments)
    assert code == 2 and message in printed.err and not printed.out
    assert printed.err.startswith("error: ") and len(printed.err.strip().split("\n")) == 1


def test_settings_that_refuse_themselves_exit_with_2(capsys):
    def preset(config):
        raise ValueError("no preset for this")

    code, printed = exit_of(capsys, preset=preset)
    assert (code, printed.err) == (2, "error: no preset for this\n")


def test_print_config_and_help(capsys):
    code, printed = exit_of(capsys, "--print-config", "--width=3")
    lines = printed.out.strip().split("\n")
    assert code == 0 and "width = 3" in lines and "pool = mean" in lines
    assert lines == sorted(lines) and len(lines) == len(dataclasses.fields(ToyConfig))
    code, printed = exit_of(capsys, "--help")
    assert code == 0 and printed.out.startswith("A toy experiment.\n")
    assert "model:\n  --width=8" in printed.out and "pooling (mean | max)" in printed.out
    assert "logtostderr" not in printed.out


def test_hash_names_what_changes_the_result():
    config = ToyConfig()
    assert len(flags.config_hash(config)) == 12
    assert flags.config_hash(config) == flags.config_hash(dataclasses.replace(config, run_dir="x"))
    assert flags.config_hash(config) != flags.config_hash(dataclasses.replace(config, width=9))


def test_csv_drops_what_comes_after_the_step(tmp_path):
    path = tmp_path / "x.csv"
    rows = log.CsvLog(path, 0)
    for step in (1, 2, 3):
        rows.append(step, {"loss": np.float32(0.1) * step})
    with pytest.raises(ValueError, match="the new row has"):
        rows.append(4, {"accuracy": 1.0})
    rows.close()
    path.write_text(path.read_text() + "4,0.")
    log.CsvLog(path, 2).close()
    assert path.read_text() == "step,loss\n1,0.100000001\n2,0.200000003\n"
    assert np.float32("0.200000003") == np.float32(0.1) * np.float32(2)
    log.CsvLog(path, 0).close()
    assert path.read_text() == ""


def test_clock_counts_idle_devices_and_waiting():
    clock = log.Clock()
    with clock.paused():
        time.sleep(0.05)
    with clock.waiting():
        time.sleep(0.1)
    clock.enqueued(was_idle=True)
    time.sleep(0.1)
    clock.seen_busy()
    clock.enqueued(was_idle=False)
    clock.computed(100)
    numbers = clock.read()
    assert numbers["seconds"] == pytest.approx(0.2, abs=0.08)
    assert numbers["input_wait_fraction"] == pytest.approx(0.5, abs=0.15)
    assert numbers["host_fraction"] == pytest.approx(0.5, abs=0.15)
    assert numbers["tokens_per_second"] == pytest.approx(100 / numbers["seconds"])
    assert clock.read()["tokens_per_second"] == 0


def test_record_and_plot(short_run, monkeypatch):
    config, run_dir = short_run
    path = run_dir / "result.json"
    written = record.write_result(path, config, {"accuracy": 0.5}, started=0.0, seconds=2.0)
    assert record.read_json(path) == written and not list(run_dir.glob("*.tmp"))
    assert written["config_hash"] == flags.config_hash(config)
    assert written["versions"]["jax"] == jax.__version__
    assert written["started"] == "1970-01-01T00:00:00+00:00"
    monkeypatch.setenv("GIT_DIR", str(run_dir / "nowhere"))
    assert record.git_state() == (None, None)
    assert plot.plot_run(run_dir).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no rows"):
        plot.plot_run(run_dir / "checkpoints")
