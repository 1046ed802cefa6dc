"""Associative recall: its generator, its model, and the command."""

import csv
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FLOAT32_TOLERANCE
from flax import nnx

from experiments import recall
from experiments.recall_cells import KERNELS, PUBLISHED, groups, make
from experiments.recall_data import (
    MIXES,
    POWER,
    Mix,
    Segment,
    assemble,
    distinct,
    draw,
    draw_slots,
    generate,
)
from experiments.recall_model import RecallModel
from experiments.recall_train import Programs, Protocol, Run, compile_cell, place, train
from lowrank_attn.features import FEATURE_MAPS

GOLDEN = pathlib.Path(__file__).parent / "golden" / "mqar.npz"
# 64 tokens, of which noise takes few that are keys or values
TINY = Mix((Segment(24, 3, 1600),), (Segment(24, 3, 400),))
TRAINING = Protocol(
    epochs=6, share=1, batch=32, vocab_size=64, dropout=0.0, dtype="float32", stop_at=0.9
)


@pytest.mark.parametrize("case", ["plain", "plain_uniform", "full", "noise"])
def test_sequences_are_the_published_ones_from_their_draws(case):
    with np.load(GOLDEN) as golden:
        inputs, labels = golden[f"{case}.inputs"], golden[f"{case}.labels"]
        args = json.loads(str(golden["meta"]))["cases"][case]
    L, n, V = args["input_seq_len"], args["num_kv_pairs"], args["vocab_size"]
    rng = np.random.RandomState(args["seed"])

    def rows(values, p=None):
        one = [rng.choice(values, size=n, replace=False, p=p) for _ in range(args["num_examples"])]
        return np.stack(one)

    keys, values = rows(np.arange(1, V // 2)), rows(np.arange(V // 2, V))
    a = args.get("power_a", POWER)
    weights = a * np.arange(1, (L - 2 * n) // 2 + 1) ** (a - 1)
    slots = rows(np.arange(len(weights)), weights / weights.sum())
    made = assemble(keys, values, slots, L)
    expected = np.full((len(keys), L), -100)
    np.put_along_axis(expected, made.positions.astype(int), made.targets, axis=1)
    np.testing.assert_array_equal(expected, labels)
    shown = made.tokens if case != "noise" else np.where(made.tokens == 0, inputs, made.tokens)
    np.testing.assert_array_equal(shown, inputs)


def test_draws_are_distinct_and_have_their_law():
    rows = distinct(np.random.default_rng(0), 7, 4, 20_000)
    assert all(len(set(row)) == 4 for row in rows[:1000])
    # each number in each column: binomial with 20,000 trials of 1/7, deviation 49.5; 28 counts
    counts = np.stack([np.bincount(column, minlength=7) for column in rows.T])
    assert np.max(np.abs(counts - 20_000 / 7)) < 4.5 * 49.5
    slots = draw_slots(np.random.default_rng(1), 5, 5, 20_000)
    assert all(len(set(row)) == 5 for row in slots[:1000])
    weights = np.arange(1.0, 6) ** (POWER - 1)
    first = weights / weights.sum()
    deviations = np.sqrt(20_000 * first * (1 - first))
    assert np.all(np.abs(np.bincount(slots[:, 0]) - 20_000 * first) < 4.5 * deviations)
    after = np.bincount(slots[slots[:, 0] == 0, 1], minlength=5)[1:]  # without the first slot
    rest = weights[1:] / weights[1:].sum()
    assert np.all(np.abs(after - after.sum() * rest) < 4.5 * np.sqrt(after.sum() * rest))


def test_generated_sequences_answer_themselves():
    rows = generate(np.random.default_rng(2), Segment(64, 16, 50), 256, True)
    for tokens, positions, targets in zip(*rows):
        known = dict(zip(tokens[:32:2], tokens[1:32:2], strict=True))
        assert [known[key] for key in tokens[positions]] == list(targets)
        assert len(set(positions)) == 16 and min(positions) >= 32
    with pytest.raises(ValueError, match="at least 4 pairs"):
        generate(np.random.default_rng(2), Segment(64, 17, 1), 256, True)


def test_segments_of_one_length_are_joined_in_order():
    mix = (Segment(16, 1, 3), Segment(16, 4, 2), Segment(32, 2, 1))
    short, long = draw(np.random.default_rng(0), mix, 64, False)
    assert short.tokens.shape == (5, 16) and long.tokens.shape == (1, 32)
    assert np.array_equal(np.sum(short.targets >= 0, axis=1), [1, 1, 1, 4, 4])
    data = place(Mix(mix[:2], mix[:2][:1] * 8), TRAINING, 0)
    assert data.train[0].tokens.shape == (2, 32, 16)  # a batch of each, at least


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("data", ["mix", "quick"])
def test_cells_have_equal_states(kernel, data):
    cell = make(kernel, data=data)
    if kernel != "softmax":
        features = FEATURE_MAPS[kernel](**cell.options())
        assert features.dim(cell.qk_dim()) == cell.m
        assert cell.m in (64, 73, 256, 273)
    assert cell.data in MIXES


def test_published_numbers_belong_to_cells():
    cells = {cell[:4] for group in groups(KERNELS, False).values() for cell in group}
    assert set(PUBLISHED) <= cells


@pytest.mark.parametrize("kernel, options", [("llops", {"num_features": 32}), ("elu", {})])
def test_all_scores_give_what_the_linear_layer_gives(kernel, options):
    model = RecallModel(64, 16, 8, kernel, options, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 20, 16))
    expected = model.attention(x)[0]
    error = jnp.max(jnp.abs(model.attend(x) - expected)) / jnp.max(jnp.abs(expected))
    assert error < FLOAT32_TOLERANCE


def fit(monkeypatch=None):
    if monkeypatch is not None:
        monkeypatch.setattr(RecallModel, "attend", lambda self, x: jnp.zeros_like(x))
    data = place(TINY, TRAINING, 0)
    options = {"num_factors": 2, "num_features": 32}
    programs = compile_cell(32, 32, "llops", options, TRAINING, 2, data)
    return list(train(programs, TRAINING, [Run(1e-2, 0), Run(1e-5, 0)], data))


@pytest.mark.slow
def test_llops_learns_to_recall_and_no_attention_does_not(monkeypatch):
    rows = fit()
    last = {row["learning_rate"]: row for row in rows}
    assert last[1e-2]["accuracy"] > 0.9 > 0.2 > last[1e-5]["accuracy"]
    assert last[1e-2]["rank"] > 2 and np.isfinite(last[1e-2]["loss"])
    assert last[1e-2]["epoch"] <= 6 and rows[0]["epoch"] == 0
    blind = {row["learning_rate"]: row for row in fit(monkeypatch)}
    assert blind[1e-2]["accuracy"] < 0.2  # a value of the sequence by chance is 1/3 at best


def fake(monkeypatch, fail_at=None):
    """The command without models; returns the list of what is trained."""
    trained = []

    def compiled(work, data, protocol):
        for cell, runs in work:
            yield cell, runs, Programs(None, None, None, None, 0.0)

    def rows_of(programs, protocol, runs, data):
        trained.append(list(runs))
        if len(trained) == fail_at:
            raise KeyboardInterrupt
        for epoch in range(2):
            for run in runs:
                yield run._asdict() | {
                    "epoch": epoch, "step": epoch, "loss": 1.0, "accuracy": run.learning_rate,
                    "accuracies": [0.5, 0.5], "rank": 3.0, "seconds": 0.1, "forward_ms": 1.0,
                }  # fmt: skip

    monkeypatch.setattr(recall, "compiled", compiled)
    monkeypatch.setattr(recall, "train", rows_of)
    return trained


def test_a_killed_command_keeps_its_cells_and_goes_on(tmp_path, monkeypatch):
    command = ["recall", "--quick", f"--out={tmp_path / 'out'}", "--learning_rates=0.1,0.2"]
    trained = fake(monkeypatch, fail_at=3)
    with pytest.raises(KeyboardInterrupt):
        recall.main(command)
    with open(tmp_path / "out.csv") as file:
        before = list(csv.DictReader(file))
    assert len(before) == 2 * 2 * 2 and len(trained) == 3
    trained = fake(monkeypatch)
    recall.main(command)
    assert len(trained) == 4  # six cells of the group `p`
    with open(tmp_path / "out.csv") as file:
        assert list(csv.DictReader(file))[: len(before)] == before
    trained = fake(monkeypatch)
    recall.main([*command, "--seeds=2"])
    assert trained == [[Run(0.1, 124), Run(0.2, 124)]] * 6
    table = (tmp_path / "out.md").read_text()
    assert "## p" in table and "| llops_paper | 6 | 64 | 32 | quick | 20.0 ± 0.0 |" in table
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "flag, named",
    [
        ("--kernels=llops,lops", "'lops' is unknown"),
        ("--kernels=linformer", "'linformer' is no kernel of this comparison"),
        ("--cells=q", "p, based, m, kernels, lengths"),
        ("--learning_rates=fast", "learning_rates"),
        ("--epochs=0", "epochs=0"),
        ("--dropout=1", "dropout=1"),
    ],
)
def test_wrong_settings_end_with_one_message(flag, named, capsys):
    with pytest.raises(SystemExit, match="2"):
        recall.main(["recall", flag])
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


def test_another_table_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "out.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="2"):
        recall.main(["recall", "--quick", f"--out={tmp_path / 'out'}"])
    assert "another file" in capsys.readouterr().err
    assert (tmp_path / "out.csv").read_text() == "a,b\n1,2\n"


@pytest.mark.slow
def test_the_quick_command_trains(tmp_path):
    command = ["recall", "--quick", f"--out={tmp_path / 'out'}", "--epochs=2", "--cells=kernels"]
    recall.main([*command, "--kernels=elu"])
    with open(tmp_path / "out.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert float(rows[2]["loss"]) < float(rows[1]["loss"])
    assert rows[2]["accuracy_64_8"] and not rows[2]["accuracy_256_64"]
