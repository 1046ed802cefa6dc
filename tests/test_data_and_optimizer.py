"""Batches, schedules, weight decay and clipping."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_run import ToySource

from experiments.common import data, evaluate, optimizer
from experiments.tasks.base import Split


class FastSource(ToySource):
    def take(self, indices):
        return {"tokens": self.tokens[indices], "label": self.labels[indices]}

    def __getitem__(self, index):
        raise AssertionError("take is the faster way")


def test_every_epoch_is_a_new_permutation_and_nothing_is_left_out():
    source = FastSource(10, 0)
    source.labels = np.arange(10)
    batches = data.train_iterator(source, 3, 2, seed=5)  # 5 dispatches are 3 epochs
    seen = [next(batches) for _ in range(5)]
    assert all(batch["label"].shape == (2, 3) for batch in seen)
    assert all(batch["tokens"].shape == (2, 3, 12) for batch in seen)
    epochs = np.concatenate([batch["label"].ravel() for batch in seen]).reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = data.train_iterator(source, 3, 2, seed=5)
    np.testing.assert_array_equal(next(again)["label"], seen[0]["label"])
    other = data.train_iterator(source, 3, 2, seed=6)
    assert not np.array_equal(next(other)["label"], seen[0]["label"])


def test_iterator_continues_from_its_state():
    source = FastSource(10, 0)
    batches = data.train_iterator(source, 3, 2, seed=5)
    for _ in range(4):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    rest = [next(batches) for _ in range(6)]
    fresh = data.train_iterator(source, 3, 2, seed=5)
    next(fresh)
    fresh.set_state(state)
    for batch in rest:
        jax.tree.map(np.testing.assert_array_equal, next(fresh), batch)


def ragged(count=50, seed=0):
    """Examples of 1 to 32 tokens, in buckets; the label is the number of the example."""
    lengths = np.random.default_rng(seed).integers(1, 33, count).astype(np.int32)
    tokens = np.repeat(np.arange(count), lengths).astype(np.int16)
    return Split(tokens, lengths, np.arange(count, dtype=np.int32), 32, buckets=(8, 16))


def test_buckets_pad_less_and_leave_nothing_out():
    source = ragged()
    batches = data.train_iterator(source, 3, 2, seed=5)
    seen = [next(batches) for _ in range(25)]  # 3 epochs of 50
    labels = np.concatenate([batch["label"].ravel() for batch in seen])
    assert np.bincount(labels).min() >= 2 and len(labels) == 150
    assert {batch["tokens"].shape for batch in seen} == {(2, 3, size) for size in (8, 16, 32)}
    for batch in seen:
        real = np.arange(batch["tokens"].shape[-1]) < batch["length"][..., None]
        expected = np.where(real, batch["label"][..., None], 0)
        np.testing.assert_array_equal(batch["tokens"], expected)
    sizes = [batch["tokens"].shape[-1] for batch in seen]
    assert sizes != sorted(sizes)  # dispatches are shuffled
    again = data.train_iterator(source, 3, 2, seed=5)
    again.set_state(json.loads(json.dumps(again.get_state())))
    for batch in seen:
        jax.tree.map(np.testing.assert_array_equal, next(again), batch)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_evaluation_in_buckets_counts_every_example_once(batch_size):
    batches = list(data.eval_batches(ragged(), batch_size))
    counted = np.concatenate([b["label"][b["weight"] > 0] for b in batches])
    assert sorted(counted) == list(range(50))
    shapes = {b["tokens"].shape for b in batches}
    known = data.batch_of_each_shape(ragged(), (batch_size,))
    assert shapes <= {b["tokens"].shape for b in known}


@pytest.mark.parametrize("batch_size", [1, 3, 10, 16])
@pytest.mark.parametrize("source_type", [ToySource, FastSource])
def test_evaluation_counts_every_example_once(batch_size, source_type):
    source = source_type(10, 0)
    batches = list(data.eval_batches(source, batch_size))
    assert {batch["tokens"].shape for batch in batches} == {(batch_size, 12)}

    def eval_fn(params, batch, key):
        total = jnp.sum(batch["weight"] * batch["tokens"].sum(1))
        return {"tokens": (total, jnp.sum(batch["weight"])), "rows": (batch["weight"].sum(), 1.0)}

    metrics = evaluate.evaluate(jax.jit(eval_fn), {}, source, batch_size, jax.random.key(0))
    assert metrics["tokens"] == pytest.approx(source.tokens.sum() / 10, rel=1e-6)
    assert metrics["rows"] * len(batches) == pytest.approx(10)


def test_metric_without_weight_is_refused():
    source = ToySource(4, 0)
    with pytest.raises(ValueError, match="'loss' a weight of 0 over all 4 examples"):
        evaluate.evaluate(lambda *_: {"loss": (0.0, 0.0)}, {}, source, 2, jax.random.key(0))


def test_empty_source_is_refused():
    with pytest.raises(ValueError, match="no examples"):
        data.train_iterator(ToySource(0, 0), 1, 1, 0)
    with pytest.raises(ValueError, match="no examples"):
        next(data.eval_batches(ToySource(0, 0), 4))


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedules_end_at_the_last_rate(schedule):
    rate = optimizer.learning_rate_schedule(schedule, 0.3, 10, 50, last=0.03)
    found = [float(rate(step)) for step in (10, 30, 50, 60)]
    assert found == pytest.approx([0.3, 0.165, 0.03, 0.03])


@pytest.mark.parametrize("schedule", optimizer.SCHEDULES)
def test_schedules_have_their_closed_form(schedule):
    rate = optimizer.learning_rate_schedule(schedule, 0.3, 10, 50)
    steps = np.arange(61)
    part = np.clip((steps - 10) / 40, 0, 1)
    after = {
        "cosine": 0.5 * (1 + np.cos(np.pi * part)),
        "linear": 1 - part,
        "constant": 1,
        "rsqrt": np.sqrt(10 / np.maximum(steps, 10)),
    }
    expected = 0.3 * np.where(steps < 10, steps / 10, after[schedule])
    np.testing.assert_allclose([rate(step) for step in steps], expected, atol=1e-7)
    if schedule == "rsqrt":
        with pytest.raises(ValueError, match="warmup_steps=0 with schedule='rsqrt'"):
            optimizer.learning_rate_schedule(schedule, 0.3, 0, 50)
    else:
        assert optimizer.learning_rate_schedule(schedule, 0.3, 0, 50)(0) == pytest.approx(0.3)


def test_schedule_and_clipping_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="schedule='step' is unknown; known: cosine"):
        optimizer.learning_rate_schedule("step", 1.0, 0, 10)
    with pytest.raises(ValueError, match="warmup_steps=11 .* total_steps=10"):
        optimizer.learning_rate_schedule("linear", 1.0, 11, 10)
    with pytest.raises(ValueError, match="clip='l1' is unknown; known: norm, value, none"):
        optimizer.adamw(1.0, clip="l1")


def test_weight_decay_spares_vectors_and_named_parameters():
    params = {
        "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
        "norm": {"gain": jnp.ones(3)},
        "positions": jnp.ones((4, 3)),
        "anchors": jnp.ones((2, 2)),
    }
    decayed = optimizer.adamw(
        0.1,
        weight_decay=0.5,
        no_decay=lambda name: name == "positions",
        frozen=lambda name: name == "anchors",
    )
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = decayed.update(zeros, decayed.init(params), params)
    changed = {
        name: bool(jnp.any(leaf != 0))
        for name, leaf in zip(optimizer.leaf_names(updates), jax.tree.leaves(updates))
    }
    assert {name for name, is_changed in changed.items() if is_changed} == {"dense/kernel"}
    np.testing.assert_allclose(updates["dense"]["kernel"], -0.05, rtol=1e-6)


def test_clipping():
    params = {"a": jnp.zeros(2), "frozen": jnp.zeros(2)}
    grads = {"a": jnp.array([3.0, -4.0]), "frozen": jnp.array([1e6, 1e6])}
    for clip, expected in (("norm", [0.6, -0.8]), ("value", [1.0, -1.0]), ("none", [3.0, -4.0])):
        adam = optimizer.adamw(1.0, frozen=lambda name: name == "frozen", clip=clip)
        updates, state = adam.update(grads, adam.init(params), params)
        moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2,)]
        np.testing.assert_allclose(moments[0], 0.1 * np.array(expected), rtol=1e-6)
        assert len(moments) == 2 and not np.any(updates["frozen"])
