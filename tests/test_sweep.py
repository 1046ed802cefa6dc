"""Sweeps over the number of tokens: what is measured, kept, reported and refused."""

import csv
import math

import jax
import numpy as np
import pytest

from experiments import bench_timing, latency, slay_scaling, sweep, sweep_report
from experiments.sweep_kernels import KERNELS, Point, arrays, based, num_features, program

SMALL = ["--quick", "--directions=forward", "--tokens=8,16", "--head_size=8"]


def rows(path):
    with open(path, newline="") as file:
        return {(row["kernel"], int(row["T"])): row for row in csv.DictReader(file)}


def test_a_sweep_goes_on_where_it_was_killed(tmp_path, monkeypatch):
    command = ["latency", *SMALL, "--kernels=elu,softmax", f"--out={tmp_path}"]
    measure = sweep.measure
    measured = []

    def killed(point, *rest):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((point.kernel, point.T))
        return measure(point, *rest)

    monkeypatch.setattr(sweep, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        latency.main(command)
    path = tmp_path / "latency_quick_cpu.csv"
    before = rows(path)
    assert sorted(before) == sorted(measured) and len(measured) == 3

    monkeypatch.setattr(sweep, "measure", measure)
    latency.main(command)
    after = rows(path)
    assert len(after) == 4 and all(after[key] == before[key] for key in before)
    assert all(float(row["ms"]) > 0 and row["status"] == "ok" for row in after.values())
    report = path.with_suffix(".md").read_text()
    assert "| softmax |" in report and "T = 16" in report and report.startswith("Protocol")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(sweep, "versions", lambda: {"device": "cpu", "jax": "0", "code": "x"})
    latency.main([*command, "--kernels=elu"])
    assert [row["code"] for row in rows(path).values()].count("x") == 2


def test_rows_without_memory_or_program_are_recorded(tmp_path, monkeypatch):
    command = ["slay_scaling", *SMALL, "--kernels=elu", f"--out={tmp_path}"]
    path = tmp_path / "slay_scaling_quick_cpu.csv"
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "available_bytes", lambda: 1.0)
        slay_scaling.main(command)
    row = rows(path)["elu", 8]
    assert row["status"] == sweep.OUT_OF_MEMORY and float(row["compiler_mib"]) > 0
    assert not row["ms"] and "out of memory |" in path.with_suffix(".md").read_text()
    slay_scaling.main(command)  # kept
    assert rows(path)["elu", 8] == row

    def timed(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    ready = (bench_timing.in_jax(lambda x: x, 1.0, 2.0), "xla")
    monkeypatch.setattr(sweep, "timed", timed)
    point = Point("elu", "forward", 1, 8, 1, 8, "float32")
    assert sweep.measure(point, ready, None)["status"] == sweep.OUT_OF_MEMORY
    assert sweep.measure(point, ValueError("odd"), None) == {"status": "failed: odd"}
    assert sweep.measure(point, ValueError(), None) == {"status": "failed: ValueError()"}


@pytest.mark.parametrize("main", [latency.main, slay_scaling.main])
@pytest.mark.parametrize(
    ("flag", "known"),
    [("--kernels=elu,atention", "favor_relu"), ("--directions=back", "forward"),
     ("--tokens=1k", "1000,2000"), ("--heads=0", "at least 1")],
)  # fmt: skip
def test_wrong_settings_end_with_code_2(main, flag, known, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sweep", flag])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert known in message and len(message.splitlines()) == 1


def test_points_come_in_order_and_quadratic_ones_end():
    config = latency.Config(tokens="16,8,16", kernels="softmax,elu", longest_quadratic=8)
    found = [(p.direction, p.T, p.kernel) for p in config.points()]
    forward = [("forward", 16, "elu"), ("forward", 8, "softmax"), ("forward", 8, "elu")]
    assert found == forward + [("forward+backward", *rest) for _, *rest in forward]
    assert "llops_p2" in slay_scaling.Config().kernels.split(",")


def test_crossovers_are_where_the_curves_meet():
    slow = {T: 0.01 * T for T in (100, 1000, 10_000)}
    quadratic = {T: 1e-5 * T**2 for T in (100, 1000, 10_000)}  # equal at 1,000
    shifted = {T: 2 * ms for T, ms in slow.items()}
    text = sweep_report.crossover(shifted, quadratic)
    assert text.startswith("slower at first, faster from about T = 2,000 on")
    assert "1,000 and 10,000" in text
    assert "faster at first, slower from about T = 2,000" in sweep_report.crossover(
        quadratic, shifted
    )
    assert "faster at every length" in sweep_report.crossover(slow, shifted)
    assert "not faster at any length" in sweep_report.crossover(shifted, slow)
    assert "no length" in sweep_report.crossover({1: 1.0}, {2: 1.0})


def test_the_time_of_kernels_counts_where_it_is_known():
    assert sweep_report.milliseconds({"ms": "2.0", "kernel_ms": "1.5"}) == 1.5
    assert sweep_report.milliseconds({"ms": "2.0", "kernel_ms": ""}) == 2.0
    assert sweep_report.milliseconds({"status": "out of memory"}) is None


def test_published_numbers_stand_beside_ours(tmp_path):
    point = Point("elu", "forward", 1, 8192, 8, 32, "float32")
    line = point._asdict() | {"M": 32, "status": "ok", "ms": "3.25", "compiler_mib": "10"}
    text = sweep_report.table([line], "forward", "ms", {"elu": {8192: 8.42}})
    assert "| elu | 32 |  | 3.25 (8.42) |" in text
    assert slay_scaling.MS["slay_1024"][-1] == 149.6 and slay_scaling.MIB["elu"][1] == 826


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_causal_attention_with_gradients(kernel):
    """Shapes only: no program is compiled."""
    for direction in ("forward", "forward+backward"):
        point = Point(kernel, direction, 2, 12, 2, 8, "float32")
        shapes = jax.eval_shape(lambda point=point: arrays(point, jax.random.key(0)))
        out = jax.eval_shape(lambda inputs: program(point)(**inputs), shapes)  # noqa: B023
        y = out if direction == "forward" else out[0]
        assert y.shape == (2, 12, 2, 8)
        if direction == "forward+backward":
            assert {"q", "k", "v", "trainable"} == set(out[1][0])
    sizes = {"based": 273, "slay_1024": 1024, "elu": 8, "llops_p4": 256, "favor_relu": 64}
    if kernel in sizes:
        assert num_features(point) == sizes[kernel]


def test_inputs_repeat_their_block_and_kernels_see_different_ones(monkeypatch):
    monkeypatch.setattr("experiments.sweep_kernels.BLOCK", 4)
    found = arrays(Point("elu", "forward", 1, 10, 1, 2, "float32"), jax.random.key(0))
    q = np.asarray(found["q"])
    assert q.shape == (1, 10, 1, 2)
    np.testing.assert_array_equal(q[:, :4], q[:, 4:8])
    np.testing.assert_array_equal(q[:, :2], q[:, 8:])
    assert not np.array_equal(q, found["k"])


def test_the_map_of_based_is_that_of_the_projections():
    features = based(3)
    params = features.init(jax.random.key(0), 8, 1)[0]
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    phi_q, phi_k = (
        np.asarray(features.apply({"W": params["W"][0]}, x, is_query=is_query), np.float64)
        for is_query in (True, False)
    )
    W = np.asarray(params["W"][0], np.float64)
    s = (x @ W[0]) @ (x @ W[1]).T / math.sqrt(3)
    np.testing.assert_allclose(phi_q @ phi_k.T, 1 + s + s**2 / 2, rtol=1e-5)
