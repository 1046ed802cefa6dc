"""Extreme multi-label classification: files, metrics, scores, the command."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import extreme, extreme_data, extreme_metrics, extreme_model

TEXT = "3 5 4\n0,2 1:0.5 4:1.25\n3 0:1\n 2:0.75\n"


def rows_of(data):
    return [
        (
            data.labels[slice(*data.label_starts[i : i + 2])].tolist(),
            data.features[slice(*data.feature_starts[i : i + 2])].tolist(),
            data.values[slice(*data.feature_starts[i : i + 2])].tolist(),
        )
        for i in range(len(data))
    ]


def test_files_are_read_and_written(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(TEXT)
    data = extreme_data.read(path)
    assert (len(data), data.num_features, data.num_labels) == (3, 5, 4)
    assert rows_of(data) == [([0, 2], [1, 4], [0.5, 1.25]), ([3], [0], [1.0]), ([], [2], [0.75])]
    extreme_data.write(path, data)
    assert path.read_text() == TEXT
    first, rest = extreme_data.split(data, 1)
    assert rows_of(first) + rows_of(rest) == rows_of(data)


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        (1, "3 5", "header of three numbers"),
        (1, "4 5 4", "ends after 3 examples"),
        (2, "0,9 1:0.5", "label '9', expected a number from 0 to 3"),
        (2, "0,,2 1:0.5", "label ''"),
        (3, "1 5:1", "feature '5', expected a number from 0 to 4"),
        (3, "1 0;1", "expected feature:value"),
        (3, "1 0:x", "expected a number after the colon"),
        (3, "1 0:nan", "finite"),
        (3, "1 0:1 0:2", "a feature is given twice"),
        (3, "1,1 0:1", "a label is given twice"),
        (4, "2:0.75", "must begin with a space"),
    ],
)
def test_damaged_files_are_named_with_the_line(tmp_path, line, wrong, message):
    lines = TEXT.splitlines()
    lines[line - 1] = wrong
    path = tmp_path / "train.txt"
    path.write_text("\n".join(lines) + "\n")
    where = 4 if "ends after" in message else line
    with pytest.raises(ValueError, match=f"train.txt:{where}: .*{message}"):
        extreme_data.read(path)


def test_generated_data_follow_their_seed_and_sizes(tmp_path):
    data = extreme_data.generate(0, 300, 200, 50)
    again, other = (extreme_data.generate(seed, 300, 200, 50) for seed in (0, 1))
    np.testing.assert_array_equal(data.features, again.features)
    assert not np.array_equal(data.labels, other.labels)
    assert 3 < np.diff(data.label_starts).mean() < 5.5 and np.diff(data.label_starts).min() >= 1
    assert data.labels.max() < 50 and data.features.max() < 200
    extreme_data.write(tmp_path / "x.txt", data)
    back = extreme_data.read(tmp_path / "x.txt")
    np.testing.assert_allclose(back.values, data.values, rtol=1e-5)
    np.testing.assert_array_equal(back.labels, data.labels)


def small(rows, num_labels=8):
    return extreme_data.examples(3, num_labels, [(labels, [0], [1.0]) for labels in rows])


def test_propensities_are_the_formula():
    train = small([[0], [0, 1], [0]])
    p = extreme_metrics.propensities(train, 0.55, 1.5)
    C = (np.log(3) - 1) * 2.5**0.55
    expected = [1 / (1 + C * np.exp(-0.55 * np.log(n + 1.5))) for n in (3, 1, 0)]
    np.testing.assert_allclose(p[:3], expected)
    assert extreme_metrics.PROPENSITIES["Amazon-670K"] == (0.6, 2.6)


def test_metrics_by_hand():
    test = small([[0, 1], [2], []])
    p = np.array([0.5, 0.25, 0.8, 1, 1, 1, 1, 1])
    top = np.array([[0, 3, 1, 4, 5], [3, 2, 4, 5, 6], [0, 1, 2, 3, 4]])
    found = extreme_metrics.evaluate(top, test, p)
    assert found["P@1"] == pytest.approx(1 / 3) and found["P@3"] == pytest.approx(3 / 9)
    assert found["P@5"] == pytest.approx(3 / 15)
    assert found["raw@1"] == pytest.approx(2 / 3)
    assert found["PSP@1"] == pytest.approx(2 / (4 + 1.25))
    assert found["PSP@3"] == pytest.approx(1.0)  # all true labels are among the three


def test_the_true_labels_are_the_ceiling_and_the_frequent_ones_a_baseline():
    test = small([[0, 1], [2], [], [1, 3, 4, 5, 6, 7]])
    p = np.linspace(0.2, 0.9, 8)
    best = extreme_metrics.ceiling(test, p)
    assert best["PSP@1"] == best["PSP@5"] == pytest.approx(1)
    assert best["P@1"] == 3 / 4 and best["P@5"] == pytest.approx((2 + 1 + 5) / 20)
    top = extreme_metrics.most_frequent(small([[1], [1, 2], [2, 1], [5]]), 2)
    assert top[:, :3].tolist() == [[1, 2, 5]] * 2


def test_batches_hold_every_example_with_its_shares():
    data = extreme_data.generate(0, 7, 20, 6)
    order = np.array([6, 0, 1, 2, 3, 4, 5])
    found = list(extreme_model.batches(data, order, 4))
    assert len({batch.features.shape for batch in found}) == 1 and len(found) == 2
    for first, batch in zip((0, 4), found, strict=True):
        bags = np.zeros((4, 20))
        np.add.at(bags, (batch.feature_rows, batch.features), batch.feature_weights)
        targets = np.zeros((4, 6))
        np.add.at(targets, (batch.label_rows, batch.labels), batch.label_weights)
        for i, row in enumerate(order[first : first + 4]):
            labels, features, _ = rows_of(data)[row]
            expected = np.zeros(20)
            expected[features] = 1 / len(features)
            np.testing.assert_allclose(bags[i], expected, rtol=1e-6)
            assert set(np.flatnonzero(targets[i])) == set(labels)
            assert targets[i].sum() == pytest.approx(1)
    assert not bags[3].any() and not targets[3].any()  # the last batch is filled up


@pytest.mark.parametrize("kernel", extreme_model.KERNELS)
def test_every_kernel_has_as_many_features_as_said(kernel):
    """Shapes only: no program is compiled."""
    it = extreme_model.model(kernel, 12, 5, 32, 2, 64)
    trained, constant = jax.eval_shape(it.init, jax.random.key(0))
    logits = jax.eval_shape(it.logits, trained, constant, jnp.eye(3, 12))
    assert logits.shape == (3, 5)
    sizes = {"hedgehog": 32, "elu": 16, "relu": 16}
    expected = None if kernel in extreme_model.EXACT else 2 * sizes.get(kernel, 64)
    assert it.features == expected
    if kernel in extreme_model.MAPS:
        assert extreme_model.MAPS[kernel](64).non_negative


@pytest.mark.parametrize("kernel", ["linear", "yat_spherical", "llops_p2", "favor_relu"])
def test_scores_are_sums_over_heads(kernel):
    heads, D = 2, 8
    it = extreme_model.model(kernel, 12, 5, heads * D, heads, 64)
    trained, constant = jax.jit(it.init)(jax.random.key(0))
    logits = np.asarray(jax.jit(it.logits)(trained, constant, jnp.eye(3, 12)))
    q, w = (np.asarray(x, np.float64) for x in (trained["embedding"][:3], trained["w"]))
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    if kernel == "linear":
        np.testing.assert_allclose(logits, q @ w.T, rtol=1e-5, atol=1e-6)
    elif kernel == "yat_spherical":
        x = q @ (w / np.linalg.norm(w, axis=1, keepdims=True)).T
        # x is rounded by some 1e-7, of which log x^2 makes 2e-7 / |x|
        expected = np.log(x**2 / (2 + 1e-4 - 2 * x))
        np.testing.assert_allclose(logits, expected, atol=1e-6 / np.abs(x).min())
    else:
        features = extreme_model.MAPS[kernel](64)
        scores = 0
        for h in range(heads):
            part = slice(h * D, (h + 1) * D)
            params = jax.tree.map(lambda x, h=h: x[h], trained["map"] | constant)
            phi_q, phi_w = (
                features.apply(params, jnp.asarray(x[:, part], jnp.float32), is_query=is_query)
                for x, is_query in ((q, True), (w, False))
            )
            scores += np.asarray(phi_q, np.float64) @ np.asarray(phi_w, np.float64).T
        # sums of 128 non-negative terms: relative rounding of some 128 * 2^-24 at most
        np.testing.assert_allclose(logits, np.log(np.maximum(scores, 1e-9)), atol=3e-5)


def test_training_beats_the_most_frequent_labels():
    train, test = extreme_data.split(extreme_data.generate(0, 500, 200, 60, words=100), 400)
    p = extreme_metrics.propensities(train, 0.55, 1.5)
    frequent = extreme_metrics.evaluate(extreme_metrics.most_frequent(train, 100), test, p)
    it = extreme_model.model("linear", 200, 60, 32, 2, 64)
    options = {"batch_size": 64, "learning_rate": 1e-2, "seed": 0, "epochs": 15}
    top, loss = extreme_model.train(it, train, test, jax.random.key(0), **options)
    found = extreme_metrics.evaluate(top, test, p)
    assert loss < np.log(60) and found["P@1"] > 2 * frequent["P@1"]


def test_the_command_goes_on_and_writes_a_table(tmp_path, monkeypatch):
    command = ["extreme", "--quick", f"--out={tmp_path / 'x'}", f"--data_dir={tmp_path}"]
    command += ["--examples=80", "--test_examples=40", "--kernels=elu"]
    extreme.main(command)
    with open(tmp_path / "x_quick.csv") as file:
        before = list(csv.DictReader(file))
    measured = []
    measure = extreme.measure
    monkeypatch.setattr(
        extreme, "measure", lambda c, kernel, *rest: measured.append(kernel) or measure(
            c, kernel, *rest
        )
    )  # fmt: skip
    extreme.main([*command, "--kernels=linear,elu"])
    assert measured == ["linear"]
    with open(tmp_path / "x_quick.csv") as file:
        after = list(csv.DictReader(file))
    assert after[:1] == before and [row["kernel"] for row in after] == ["elu", "linear"]
    report = (tmp_path / "x_quick.md").read_text()
    assert report.startswith("Protocol") and "| the true labels |" in report
    assert "generated data, not Eurlex-4K: 80 and 40 examples" in report
    assert (tmp_path / "x_quick.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--kernels=linear,softmx", "'softmx' is unknown"),
        ("--features=100", "square number"),
        ("--train=x", "give both files"),
        ("--dataset=Eurlex-4K", "give both files"),
        ("--heads=3", "multiple of heads"),
        ("--seeds=0", "at least 1"),
    ],
)
def test_wrong_settings_end_with_code_2(flag, message, capsys):
    with pytest.raises(SystemExit) as ended:
        extreme.main(["extreme", flag])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_missing_and_unequal_files_end_with_code_2(tmp_path, capsys):
    (tmp_path / "train.txt").write_text(TEXT)
    files = [f"--train={tmp_path / 'train.txt'}", "--dataset=Eurlex-4K"]
    for test, message in (("none.txt", "No such file"), ("train.txt", "at least 5 labels")):
        with pytest.raises(SystemExit) as ended:
            extreme.main(["extreme", *files, f"--test={tmp_path / test}"])
        assert ended.value.code == 2 and message in capsys.readouterr().err
