"""The comparison of approximations of SLAY's kernel."""

import csv

import jax
import numpy as np
import pytest

from experiments import slay_kernel
from experiments.slay_kernel_cases import DATA, by_quadrature, cosines, kernel, methods, read_heads


def sample(name, T=16):
    return DATA[name](np.random.default_rng(0), T)


@pytest.mark.parametrize("name", DATA)
def test_rows_are_unit_vectors_and_the_exact_kernel_has_no_error(name):
    data = sample(name)
    for x in (data.q, data.k):
        np.testing.assert_allclose(np.linalg.norm(x, axis=-1), 1, rtol=1e-6)
    exact = kernel(cosines(data.q, data.k), data.epsilon)
    errors = slay_kernel.compare(exact, exact, data)
    assert errors["output_error"] == errors["score_error"] == errors["negative_scores"] == 0
    assert errors["cosine"] == pytest.approx(1)
    doubled = slay_kernel.compare(2 * exact, exact, data)
    assert doubled["output_error"] < 1e-12 and doubled["score_error"] < 1e-7


def test_the_clamp_changes_what_signed_sums_give():
    data = sample("isotropic")
    scores = np.random.default_rng(1).standard_normal((8, 16, 16))
    errors = slay_kernel.compare(scores, kernel(cosines(data.q, data.k), data.epsilon), data)
    assert errors["clamped_error"] > 1e3 * errors["output_error"] > 1e3
    assert 0.4 < errors["negative_scores"] < 0.6


def test_outputs_are_causal_attention_and_the_projection():
    data = sample("protocol", 5)
    y = slay_kernel.outputs(np.ones((32, 5, 5)), data, False)
    weights, bias = data.out
    first = np.concatenate([data.v[head, 0] for head in range(4)])
    np.testing.assert_allclose(y[0, 0], first @ weights + bias, rtol=1e-5, atol=1e-7)
    mean = np.concatenate([data.v[head].mean(0) for head in range(4)])
    np.testing.assert_allclose(y[0, 4], mean @ weights + bias, rtol=1e-4, atol=1e-6)


def test_more_nodes_are_closer_to_the_kernel():
    data = sample("isotropic")
    exact = kernel(cosines(data.q, data.k), data.epsilon)
    errors = [
        slay_kernel.compare(by_quadrature(n, data.epsilon)(None, data.q, data.k), exact, data)
        for n in (1, 4)
    ]
    assert errors[1]["score_error"] < 0.1 * errors[0]["score_error"]


def test_methods_have_the_budget_and_the_signs_of_theirs():
    data = sample("isotropic")
    known = methods(128, data)
    assert set(slay_kernel.PUBLISHED) <= set(known)
    assert [name for name, (_, predicted) in known.items() if predicted] == ["slay_auto"]
    for name in ("anchor", "slay_auto", "nystrom"):
        scores = known[name][0](jax.random.key(0), data.q, data.k)
        assert scores.shape == (8, 16, 16)
        assert (name == "nystrom") == bool(np.any(scores < 0))


def test_heads_of_a_model(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((2, 20, 8)) for name in "qkv"}
    np.savez(tmp_path / "heads.npz", **arrays)
    data = read_heads(tmp_path / "heads.npz", 10)
    assert data.q.shape == (2, 10, 8) and data.causal
    with pytest.raises(ValueError, match="at least 21 tokens"):
        read_heads(tmp_path / "heads.npz", 21)
    np.savez(tmp_path / "short.npz", q=arrays["q"])
    with pytest.raises(ValueError, match="lacks k, v"):
        read_heads(tmp_path / "short.npz", 10)


@pytest.mark.slow
def test_the_command_leaves_a_table_and_a_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slay_kernel, "SIZES", ((16, 32),))
    slay_kernel.main(["slay_kernel", f"--out={tmp_path / 'out'}", "--data=protocol", "--draws=2"])
    with open(tmp_path / "out.csv") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert float(rows["uniform attention"]["output_error"]) > 0.1
    assert float(rows["anchor"]["published"]) == 0.663 and not rows["pairs"]["published"]
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert "| protocol | 16 | 32 | slay_auto |" in (tmp_path / "out.md").read_text()
    with pytest.raises(SystemExit, match="2"):
        slay_kernel.main(["slay_kernel", "--data=spheres"])
    assert "low_rank" in capsys.readouterr().err
