"""The comparison of polynomial sketches on queries and keys of a model."""

import csv

import numpy as np
import pytest

from experiments import rmae
from experiments.rmae_model import read_heads, trained_heads, unit_scale
from experiments.rmae_report import COLUMNS, PUBLISHED

SMALL = rmae.Config(features=12, rows=64, fit_steps=200, rates="1e-2")


def heads(n=2, rows=128, D=6):
    return unit_scale(*np.random.default_rng(0).standard_normal((2, n, rows, D)))


@pytest.mark.parametrize("degree", [2, 3])
def test_no_sketch_is_closer_than_the_optimal_one(degree):
    data = heads()
    found = {name: rmae.compare(name, degree, data, SMALL) for name in ("optimal", "llops", "psf")}
    for i in range(2):
        optimal, fitted, random = (found[name][i] for name in ("optimal", "llops", "psf"))
        assert optimal["frobenius"] < fitted["frobenius"] < random["frobenius"]
        assert optimal["rmae"] < fitted["rmae"] < random["rmae"]
        assert fitted["rate"] == "1e-2" and fitted["parameters"] == 2 * degree * 6 * 12


def test_the_bound_is_that_of_the_singular_values():
    data = heads(1)
    q, k = (np.asarray(x[0, :64], np.float64) for x in data)
    sigma = np.linalg.svd((q @ k.T) ** 2, compute_uv=False)
    (row,) = rmae.compare("optimal", 2, data, SMALL)
    expected = np.sqrt(np.sum(sigma[12:] ** 2) / np.sum(sigma**2))
    assert row["frobenius"] == pytest.approx(expected, rel=1e-6)  # float64, but for float32 data
    assert row["held_out_frobenius"] > row["frobenius"]


def test_random_sketches_are_unbiased():
    feature_map = rmae.sketch("psf", 2, 4096)
    data = heads(1, rows=16)
    params, _ = feature_map.init(rmae.jax.random.key(0), 6, 1)
    found = rmae.scores(feature_map, params, *data)[0]
    exact = (np.asarray(data.q[0]) @ data.k[0].T / 6) ** 2
    # a feature's product has a variance of at most 15 (|q| |k| / D)^4 in the worst direction
    size = np.linalg.norm(data.q[0], axis=1)[:, None] * np.linalg.norm(data.k[0], axis=1) / 6
    assert np.all(np.abs(found - exact) < 5 * np.sqrt(15 / 4096) * size**2)


def test_heads_of_another_model(tmp_path):
    arrays = dict(zip("qk", np.random.default_rng(0).standard_normal((2, 3, 40, 5))))
    np.savez(tmp_path / "heads.npz", **arrays)
    data = read_heads(tmp_path / "heads.npz", 30)
    assert data.q.shape == (3, 30, 5)
    np.testing.assert_allclose(np.mean(np.square(data.k), axis=(1, 2)), 1, rtol=1e-5)
    with pytest.raises(ValueError, match="at least 41 tokens"):
        read_heads(tmp_path / "heads.npz", 41)
    np.savez(tmp_path / "short.npz", q=arrays["q"])
    with pytest.raises(ValueError, match="lacks k"):
        read_heads(tmp_path / "short.npz", 30)


def test_the_command_goes_on_where_it_ended(tmp_path, monkeypatch):
    arrays = dict(zip("qk", np.random.default_rng(0).standard_normal((2, 2, 128, 6))))
    np.savez(tmp_path / "heads.npz", **arrays)
    out = tmp_path / "out"
    command = [
        "rmae", f"--heads={tmp_path / 'heads.npz'}", f"--out={out}", "--features=12", "--rows=64",
        "--degrees=2",
    ]  # fmt: skip
    rmae.main([*command, "--methods=optimal"])
    calls = []
    real = rmae.compare
    monkeypatch.setattr(rmae, "compare", lambda *args: calls.append(args[0]) or real(*args))
    rmae.main([*command, "--methods=optimal,psf"])
    rmae.main([*command, "--methods=optimal,psf"])
    assert calls == ["psf"]
    with open(f"{out}.csv") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and [row["layer"] for row in rows] == ["0", "1"] * 2
    assert float(rows[2]["published"]) == PUBLISHED[2, "psf"][0]
    assert "| 2 | psf | 12 |" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize("flag, named", [("--methods=svd", "optimal, psf"), ("--rows=0", "rows=0"),
                                         ("--degrees=two", "degrees='two'")])  # fmt: skip
def test_wrong_settings_end_with_one_message(flag, named, capsys):
    with pytest.raises(SystemExit, match="2"):
        rmae.main(["rmae", flag])
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


@pytest.mark.slow
def test_heads_of_a_trained_model():
    data, recall = trained_heads(2, 2, 16, 128, 2, 1e-3, [0, 1], 100)
    assert data.q.shape == data.k.shape == (2, 100, 16) and 0 <= recall < 0.2
    assert not np.allclose(data.q[0], data.q[1]) and not np.allclose(data.q, data.k)
