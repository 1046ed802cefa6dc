"""The benchmark: what it counts, what it refuses to print, what it writes."""

import csv
import logging

import jax
import pytest

from experiments import bench, bench_fla, bench_timing
from experiments.bench_cases import Case, cases, implementations
from experiments.bench_plot import plot_times

PEAKS = (1e12, 1e11)
SMALL = Case("llops", "forward+backward", 2, "rms", 1, 40, 2, 8, 16, 8)


def test_cases_are_what_the_speed_table_needs():
    rows = cases([1024, 16384, 131072], 2**20)
    assert len(set(rows)) == len(rows)
    shape = (16, 128, 256, 128)
    for wanted in (
        Case("llops", "forward", 2, "none", 4, 131072, *shape),
        Case("llops", "forward", 2, "none", 1, 2**20, *shape),
        Case("llops", "forward", 2, "sum", 4, 16384, *shape),
        Case("llops", "forward+backward", 2, "none", 4, 16384, *shape),
        Case("features", "scan+backward", 0, "none", 1, 16384, 16, 128, 128, 128),
        Case("llops", "decode", 4, "rms", 64, 1, *shape),
    ):
        assert wanted in rows
    assert max(row.T for row in rows if row.kernel == "softmax") == 16384
    assert 2**20 not in [row.T for row in cases([1024], 0)]


def test_the_count_of_operations_and_bytes():
    row = Case("llops", "forward", 2, "none", 4, 16384, 16, 128, 256, 128)
    tokens = 4 * 16384 * 16
    assert row.flops() == tokens * (4 * 2 * 128 * 256 + 4 * 256 * 128 + 64 * (256 + 128))
    assert row.bytes() == tokens * 2 * 4 * 128
    decode = row._replace(direction="decode", T=1)
    assert decode.bytes() == pytest.approx(64 * 2 * 4 * 256 * 128, rel=0.01)  # the state, twice


def test_a_row_is_measured_and_written(tmp_path):
    (line,) = bench.measured([bench.Row(SMALL, "xla")], 2, PEAKS)
    assert float(line["ms"]) > 0 and 0 < float(line["rel_err"]) < bench.BACKWARD_TOLERANCE
    assert float(line["peak_mib"]) > 0 and line["block_sizes"].startswith("chunk=128")
    longer = line | {"T": 80, "ms": "2.0"}
    bench.write([line, longer], tmp_path, PEAKS)
    (path,) = tmp_path.glob("bench_*.csv")
    with open(path, newline="") as f:
        read = list(csv.DictReader(f))
    assert [row["T"] for row in read] == ["40", "80"] and list(read[0]) == bench.COLUMNS
    assert path.with_suffix(".md").read_text().count("\n| xla |") == 2
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_no_plot_of_single_points(tmp_path):
    line = SMALL._asdict() | {"implementation": "xla", "ms": "1.0", "roofline_fraction": "0.5"}
    plot_times([line], tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_a_wrong_row_is_left_out_aloud(monkeypatch, caplog):
    monkeypatch.setattr(bench, "BACKWARD_TOLERANCE", 1e-9)
    with caplog.at_level(logging.ERROR, logger="absl"):
        assert list(bench.measured([bench.Row(SMALL, "xla")], 1, PEAKS)) == []
    assert "left out, relative error" in caplog.text


def test_a_peer_that_is_not_there_is_left_out_aloud(caplog):
    features = SMALL._replace(kernel="features", direction="scan", p=0, normalize="none")
    names = implementations(features, None)
    assert names == ["xla", "fla_chunk_linear_attn"]
    with pytest.raises(NotImplementedError, match="fla|GPU"):
        bench_fla.ready(features, names[1])
    with caplog.at_level(logging.WARNING, logger="absl"):
        assert list(bench.measured([bench.Row(features, names[1])], 1, PEAKS)) == []
    assert "left out" in caplog.text


def test_a_peer_that_breaks_does_not_end_the_others(monkeypatch, caplog):
    def broken(case, implementation):
        raise TypeError("'NoneType' object is not a mapping")

    monkeypatch.setattr(bench_fla, "ready", broken)
    rows = [bench.Row(SMALL, "fla_chunk_linear_attn"), bench.Row(SMALL, "xla")]
    assert [line["implementation"] for line in bench.measured(rows, 1, PEAKS)] == ["xla"]
    assert "TypeError: 'NoneType' object is not a mapping" in caplog.text


def test_errors_are_seen():
    """The error of outputs that are a little off is what it should be."""
    it = bench_timing.ready(SMALL, "xla")

    def worse(case):
        wrong = it._replace(call=lambda x: jax.tree.map(lambda y: 1.1 * y, it.call(x)))
        assert case == SMALL.small()._replace(B=SMALL.B)
        return wrong

    assert bench_timing.error(SMALL, worse) == pytest.approx(0.1, rel=0.1)
