"""SLAY's synthetic tasks: definitions, what can be reached, training, and the command."""

import collections
import csv
import dataclasses

import numpy as np
import pytest

from experiments import slay_tasks
from experiments.slay_tasks_run import VOCABULARY, Cell, Result, draw, run_cells
from experiments.slay_tasks_table import PUBLISHED, category_means
from experiments.synthetic import PUBLISHED_TASKS, REPAIRED_TASKS, VARIANTS, Task, baselines
from experiments.synthetic.published import bigram_table, run_stack
from experiments.synthetic.task import certain

EVERY = [(variant, name) for variant, tasks in VARIANTS.items() for name in tasks]


def sample(task, B=64, seed=0):
    return task.examples(np.random.default_rng(seed), B)


@pytest.mark.parametrize("variant, name", EVERY)
def test_examples_are_of_the_declared_sizes(variant, name):
    task = VARIANTS[variant][name]
    tokens, targets, asked = sample(task)
    assert tokens.shape == targets.shape == asked.shape == (64, task.length)
    assert tokens.min() >= 0 and tokens.max() < task.vocab_size <= VOCABULARY
    assert targets[asked].min() >= 0 and targets[asked].max() < task.vocab_size
    assert asked.any()
    again = sample(task)
    assert all(np.array_equal(*pair) for pair in zip((tokens, targets, asked), again))
    assert not np.array_equal(tokens, sample(task, seed=1).tokens)


def after_marker(x, marker):
    return [b for a, b in zip(x, x[1:]) if a == marker]


def runs_of(x):
    return [b for a, b in zip([None, *x], x) if a != b]


def popped(x, V):
    memory, found = [], []
    for token in x:
        if token == V - 1:
            found.append(memory.pop())
        else:
            memory.append(token)
    return found


# The answers to what is asked, in order, from the tokens alone.
SOLVED = {
    "copy": lambda x, V: x[: len(x) // 2],
    "sort": lambda x, V: sorted(x[: len(x) // 2]),
    "reverse": lambda x, V: x[len(x) // 2 - 1 :: -1],
    "retrieval": lambda x, V: after_marker(x, V - 1),
    "kv_recall": lambda x, V: [dict(zip(x[:-2:2], x[1:-2:2]))[x[-1]]],
    "first_token": lambda x, V: x[:1],
    "selective_copy": lambda x, V: after_marker(x, V - 2),
    "long_copy": lambda x, V: x[: len(x) // 2],
    "distant_match": lambda x, V: x[:1],
    "multihop": lambda x, V: [x[x[x[-1]]]],
    "stack": popped,
    "induction": lambda x, V: after_marker(x, x[-1]),
    "pattern": lambda x, V: [x[t % 4] for t in range(4, len(x) + 1)],
    "counting": lambda x, V: [x.count(0)],
    "parity": lambda x, V: [x.count(1) % 2],
    "addition": lambda x, V: [x.count(1)],
    "modular": lambda x, V: [sum(x) % 7],
    "bigram": lambda x, V: [bigram_table(V)[token] for token in x[:-1]],
    "majority": lambda x, V: [max(range(5), key=x.count)],
    "noisy_copy": lambda x, V: x[: len(x) // 2],
    "compression": lambda x, V: runs_of(x[: len(x) // 2]),
    "histogram": lambda x, V: [x[:-5].count(token) for token in range(5)],
}


@pytest.mark.parametrize("name", REPAIRED_TASKS)
def test_repaired_targets_follow_from_the_tokens(name):
    task = REPAIRED_TASKS[name]
    for tokens, targets, asked in zip(*sample(task)):
        assert targets[asked].tolist() == SOLVED[name](tokens.tolist(), task.vocab_size)
    ceiling, majority = baselines(task)
    assert ceiling == 1 and majority < 0.55


@pytest.mark.parametrize("name", PUBLISHED_TASKS)
def test_repaired_tasks_are_not_answered_by_the_token_itself(name):
    """No function of token and position alone answers a repaired task."""
    tokens, targets, asked = sample(REPAIRED_TASKS[name], 4096)
    position = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    seen = collections.defaultdict(collections.Counter)
    for key, target in zip(zip(position[asked], tokens[asked]), targets[asked]):
        seen[key][target] += 1
    right = sum(counter.most_common(1)[0][1] for counter in seen.values())
    assert right < 0.75 * asked.sum()


def test_published_definitions():
    draws = {name: sample(task, 256) for name, task in PUBLISHED_TASKS.items()}
    for name in ("copy", "long_copy"):
        np.testing.assert_array_equal(draws[name].tokens, draws[name].targets)
    tokens, targets, _ = draws["selective_copy"]
    marked = tokens == 31
    assert np.all(marked[:, :32].sum(axis=1) == 8)
    assert not targets[:, :32].any() and not targets[:, 40:].any()
    tokens, targets, asked = draws["stack"]
    assert not targets[tokens != 31].any() and asked.all()
    pops = tokens == 31
    assert np.all(np.cumsum(pops, axis=1) <= np.cumsum(tokens == 30, axis=1))
    tokens, targets, asked = draws["distant_match"]
    assert np.array_equal(asked.any(axis=1), tokens[:, 0] > 0)
    tokens, targets, _ = draws["multihop"]
    for x, y in zip(tokens.tolist(), targets[:, -1]):
        assert y == x[x.index(31) + 1] and x.index(30) < 21 <= x.index(31) < 42
    tokens, targets, _ = draws["compression"]
    for x, y in zip(tokens.tolist(), targets.tolist()):
        values = runs_of(x)
        assert y == values + [0] * (32 - len(values))
    lengths = np.bincount(np.diff(np.flatnonzero(np.diff(tokens.ravel()) != 0)))
    assert lengths[4:].sum() < 0.1 * lengths.sum()  # runs of 1 to 3, seldom side by side


def test_a_stack_gives_back_the_last_value_first():
    values, wishes = np.array([[5, 6, 7, 8]]), np.array([[True, False, True, True]])
    pop, push, found = run_stack(values, wishes, np.ones((1, 4), bool))
    assert pop.tolist() == [[False, False, True, True]]  # an empty stack is not popped
    assert push.tolist() == [[True, True, False, False]]
    assert found.tolist() == [[0, 0, 6, 5]]


SMALL = {
    "sort": (4, 3),
    "reverse": (4, 3),
    "selective_copy": (16, 3),
    "stack": (5, 4),
    "induction": (6, 3),
    "pattern": (5, 3),
    "compression": (6, 3),
    "histogram": (6, 5),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_ceiling_is_what_the_most_frequent_target_after_each_prefix_reaches(name):
    assert set(SMALL) == {n for n, t in PUBLISHED_TASKS.items() if t.chance is not certain}
    L, V = SMALL[name]
    task = dataclasses.replace(PUBLISHED_TASKS[name], length=L, vocab_size=V)
    if name == "selective_copy":  # its second half is of no use for its first targets
        draw_all = task.draw
        task = dataclasses.replace(
            task,
            draw=lambda rng, B, L, V: draw_all(rng, B, L, V)._replace(
                asked=np.broadcast_to(np.isin(np.arange(L), (8, 9)), (B, L))
            ),
        )
    N = 200_000
    tokens, targets, asked = sample(task, N)
    expected = np.mean(task.chance(tokens, V)[asked])
    learn, right = np.arange(N) % 2 == 0, []
    for t in np.flatnonzero(asked.any(axis=0)):
        known = tokens[:, : min(t + 1, 8)]
        prefix = np.unique(known, axis=0, return_inverse=True)[1].ravel()
        table = np.zeros((prefix.max() + 1, targets.max() + 1))
        np.add.at(table, (prefix[learn], targets[learn, t]), 1)
        right.append(np.mean(np.argmax(table, axis=1)[prefix[~learn]] == targets[~learn, t]))
    # the standard error of a mean of 100,000 is below 0.0016
    assert np.mean(right) == pytest.approx(expected, abs=0.006)


def test_baselines_of_published_tasks():
    found = {name: baselines(task) for name, task in PUBLISHED_TASKS.items()}
    assert found["retrieval"] == (1, 1)  # always the same token
    assert found["reverse"][0] == pytest.approx((16 + 16 / 32) / 32)
    assert found["stack"][0] == pytest.approx(found["stack"][1], abs=0.005)
    assert found["parity"][1] == pytest.approx(0.5, abs=0.02)
    for name, printed in PUBLISHED.items():  # 3 seeds of 128 sequences
        assert printed is None or max(printed) < found[name][0] + 0.03


def test_published_category_means():
    rows = [
        {"task": name, "category": task.category, "kernel": kernel}
        for name, task in PUBLISHED_TASKS.items()
        for kernel in ("softmax", "slay")
    ]
    means = category_means(rows)
    printed = {  # softmax, SLAY
        "basic": (0.60, 0.57), "arithmetic": (0.54, 0.57), "long_range": (0.68, 0.68),
        "memory": (0.73, 0.73), "pattern": (0.83, 0.86), "reasoning": (0.56, 0.57),
        "robustness": (0.80, 0.80),
    }  # fmt: skip
    for category, numbers in printed.items():
        for kernel, number in zip(("softmax", "slay"), numbers):
            assert means[category, kernel] == pytest.approx(number, abs=0.011)


def test_batches_are_padded_and_belong_to_their_cell():
    cells = [Cell(name, PUBLISHED_TASKS[name], 42) for name in ("sort", "copy")]
    tokens, targets, asked = draw(cells, 1, 3, 2, 64)
    assert tokens.shape == targets.shape == asked.shape == (2, 3, 2, 64)
    assert not asked[0, ..., 16:].any() and asked[0, ..., :16].all()
    np.testing.assert_array_equal(draw(cells[1:], 1, 3, 2, 64).tokens[0], tokens[1])
    assert not np.array_equal(draw(cells, 2, 3, 2, 64).tokens, tokens)


@pytest.mark.slow
def test_models_learn():
    small = {"copy": Task("basic", 8, 8, PUBLISHED_TASKS["copy"].draw)}
    small["first"] = Task("memory", 8, 4, PUBLISHED_TASKS["first_token"].draw)
    cells = [Cell(name, task, 42) for name, task in small.items()]
    results = run_cells(
        cells, 8, "favor_relu", {"num_features": 16}, steps=150, batch_size=16,
        learning_rate=3e-3, eval_rows=64,
    )  # fmt: skip
    assert [result.accuracy > 0.9 for result in results] == [True, True]


def test_the_command_trains_what_is_missing(tmp_path, monkeypatch, capsys):
    calls = []

    def train(cells, length, kernel, options, **settings):
        calls.append((kernel, length, [(cell.name, cell.seed) for cell in cells]))
        return [Result(0.5 + 0.1 * (cell.seed - 42), 1.0) for cell in cells]

    monkeypatch.setattr(slay_tasks, "run_cells", train)
    out, common = tmp_path / "folder" / "t", ["x", "--kernels=slay,softmax", "--jobs=1"]
    slay_tasks.main([*common, f"--out={out}", "--tasks=reverse,bigram,long_copy", "--seeds=2"])
    assert calls[0] == (
        "slay",
        64,
        [("reverse", 42), ("reverse", 43), ("bigram", 42), ("bigram", 43)],
    )
    assert [call[:2] for call in calls] == [
        (kernel, length) for kernel in ("slay", "softmax") for length in (64, 256)
    ]
    calls.clear()
    slay_tasks.main([*common, f"--out={out}", "--tasks=reverse,bigram,long_copy", "--seeds=3"])
    assert calls[0] == ("slay", 64, [("reverse", 44), ("bigram", 44)])
    with open(f"{out}_published.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18 and len({(r["task"], r["kernel"], r["seed"]) for r in rows}) == 18
    assert {row["features"] for row in rows} == {"1024", ""}
    text = (tmp_path / "folder" / "t_published.md").read_text()
    assert "| reverse | 0.0" in text and "0.60 ± 0.08 (0.42)" in text
    assert "Within 0.05 of the paper: 0 of 4 means" in text and "copy, softmax 0.60 (1.00)" in text
    assert (tmp_path / "folder" / "t_published.png").stat().st_size > 5_000
    with pytest.raises(SystemExit, match="2"):
        slay_tasks.main([*common, f"--out={out}", "--steps=7"])
    assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag, known",
    [("--tasks=copy,nothing", "kv_recall"), ("--kernels=linear", "slay_auto"),
     ("--kernels=", "elu"), ("--variant=new", "repaired"),
     ("--eval_rows=33", "multiple"), ("--seeds=0", "at least 1")],
)  # fmt: skip
def test_wrong_settings(flag, known, capsys):
    with pytest.raises(SystemExit, match="2"):
        slay_tasks.main(["x", flag])
    assert known in capsys.readouterr().err


@pytest.mark.slow
def test_quick_runs(tmp_path):
    slay_tasks.main(["x", "--quick", f"--out={tmp_path / 't'}", "--kernels=slay_auto", "--steps=2"])
    assert "slay_auto, M = " in (tmp_path / "t_published.md").read_text()
