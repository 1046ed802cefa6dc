"""Pairs of documents in the data pipeline, the model, the objectives and evaluation."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx

from experiments import objectives
from experiments.common import data, phase_run
from experiments.common.evaluate import evaluate
from experiments.common.module import PureModule
from experiments.lra_settings import Config
from experiments.tasks import pairs
from lowrank_attn.models.encoder import Classifier, Encoder, TokenPredictor, pool
from lowrank_attn.models.heads import PAIR_HEADS, Head


def test_shared_words_are_a_reference_line():
    """Documents of a positive pair share their words here; all but one of the test rows too."""
    train, test = pairs.PairBuilder(), pairs.PairBuilder()
    for i in range(20):
        word = b"word" + bytes([97 + i])
        train.add(b"Some " + word, word.upper() + b" else", 1)
        train.add(b"some " + word, b"other text " + bytes([97 + i]) * 5, 0)
        test.add(word, word if i else b"else", 1)
    lines = pairs.reference_lines(train.split(), test.split())
    assert lines == {"majority class": 0.0, "shared words": 0.95}


def small_encoder(kernel="elu", vocabulary=258):
    return Encoder(
        vocabulary, 64, num_layers=1, width=16, num_heads=2, mlp_width=16, kernel=kernel,
        options={"num_features": 8, "num_factors": 2} if kernel == "llops" else {},
        rngs=nnx.Rngs(0),
    )  # fmt: skip


def some_pairs(count=13, seed=0, longest=32):
    builder, draw = pairs.PairBuilder(), np.random.default_rng(seed)
    for i in range(count):
        builder.add(*(draw.bytes(int(draw.integers(1, longest))) for _ in range(2)), i % 2)
    return builder.split()


@pytest.mark.parametrize(
    ("kernel", "pair_head"),
    [("llops", "products"), ("softmax", "products_gelu"), ("elu", "concatenation")],
)
def test_neither_padding_nor_the_other_document_changes_a_vector(kernel, pair_head):
    model = Classifier(
        small_encoder(kernel), 2, head_width=8, two_towers=True, pair_head=pair_head,
        rngs=nnx.Rngs(1),
    )  # fmt: skip
    apply = jax.jit(lambda batch: model(batch["tokens"], objectives.real_tokens(batch)))
    batch = some_pairs().take(np.arange(13))
    short, long = ({**batch, "tokens": batch["tokens"][..., :size]} for size in (32, 64))
    assert_close(apply(long), apply(short))
    vectors = []  # of each document without any padding, and without the other one
    for tokens, length in zip(batch["tokens"][4], batch["length"][4], strict=True):
        tokens, mask = tokens[None, :length], np.ones((1, length), bool)
        vectors.append(jax.jit(lambda t, m: pool(model.encoder(t, m), m, "mean"))(tokens, mask))
    assert_close(model.head(jax.numpy.concatenate(vectors)), apply(short)[4:5])


@pytest.mark.parametrize(("name", "pair"), PAIR_HEADS.items())
def test_heads_by_formula(name, pair):
    head = Head(3, 2, width=8, pair=name, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    a, b = x[[0, 2]], x[[1, 3]]
    y = np.concatenate([a, b, a * b, a - b] if name != "concatenation" else [a, b], axis=1)
    widths = [(y.shape[1], 8), *([(8, 4)] if name == "concatenation" else [])]
    assert [layer.kernel.shape for layer in head.hidden] == widths
    for layer in head.hidden:
        y = y @ layer.kernel[...] + layer.bias[...]
        y = jax.nn.gelu(y) if name == "products_gelu" else np.maximum(y, 0)
    assert_close(head(jax.numpy.asarray(x)), y @ head.logits.kernel[...] + head.logits.bias[...])
    assert Head(3, 2, width=None, pair=name, rngs=nnx.Rngs(0)).logits.kernel.shape[0] == (
        12 if pair.products else 6
    )
    with pytest.raises(ValueError, match="pair_head='cosine' is unknown; known: products"):
        Head(3, 2, width=None, pair="cosine", rngs=nnx.Rngs(0))


def test_evaluation_counts_every_pair_once():
    source = Cut(some_pairs())
    model = PureModule(lambda rngs: Classifier(small_encoder(), 2, two_towers=True, rngs=rngs))
    params = model.init(jax.random.key(0))
    classification = objectives.classification(model.module, log_features=True)
    batch = source.take(np.arange(13))
    logits = jax.jit(lambda b: model.module(params)(b["tokens"], objectives.real_tokens(b)))(batch)
    evaluation = jax.jit(classification.evaluate)
    found = [evaluate(evaluation, params, source, n, jax.random.key(0)) for n in (1, 4, 20)]
    expected = float(np.mean(np.argmax(logits, 1) == batch["label"]))
    assert found[0]["accuracy"] == pytest.approx(expected)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-4)
    assert 1 <= found[0]["effective_rank_0"] <= 8


class Cut:
    """Pairs padded to 64 tokens in place of 4,000."""

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return len(self.split)

    def take(self, indices):
        batch = self.split.take(indices)
        return batch | {"tokens": batch["tokens"][..., :64]}


@pytest.mark.parametrize("objective", objectives.OBJECTIVES)
def test_pretraining_takes_the_two_documents_as_two_examples(objective):
    model = PureModule(lambda rngs: TokenPredictor(small_encoder(), 258, rngs=rngs))
    params = model.init(jax.random.key(0))
    prediction = objectives.token_prediction(model.module, objective, 0.15, 257)
    loss, evaluation = jax.jit(prediction.loss), jax.jit(prediction.evaluate)
    batch = Cut(some_pairs()).take(np.arange(12)) | {"weight": np.ones(12, np.float32)}
    apart = {
        "tokens": batch["tokens"].reshape(24, 64), "length": batch["length"].reshape(24),
        "weight": np.ones(24, np.float32),
    }  # fmt: skip
    key = jax.random.key(1)
    jax.tree.map(np.testing.assert_allclose, loss(params, batch, key), loss(params, apart, key))
    counted = evaluation(params, batch, key)
    jax.tree.map(np.testing.assert_allclose, counted, evaluation(params, apart, key))
    batch["weight"][6:] = 0
    apart["weight"][12:] = 0
    half = evaluation(params, batch, key)
    jax.tree.map(np.testing.assert_allclose, half, evaluation(params, apart, key))
    assert 0 < half["loss"][1] < counted["loss"][1]
    batch["length"][:] = {"masked": 0, "next_token": 1}[objective]  # nothing can be predicted
    assert loss(params, batch, key)[0] == 0


def test_tokens_of_both_documents_are_counted():
    batches = next(data.train_iterator(some_pairs(), 4, 2, 0))
    assert batches["tokens"].shape[:3] == (2, 4, 2)
    assert phase_run._count_tokens(batches) == batches["length"].sum()


def test_buckets_go_by_the_longer_document():
    split = dataclasses.replace(some_pairs(50, longest=3000), buckets=pairs.BUCKETS)
    known = {b["tokens"].shape for b in data.batch_of_each_shape(split, (2, 4))}
    assert {shape[-1] for shape in known} == {1024, 2048, 4000}
    batches = data.train_iterator(split, 4, 2, 0)
    for batch in (next(batches) for _ in range(12)):
        size = batch["tokens"].shape[-1]
        assert batch["tokens"].shape in known and batch["length"].max() <= size
        smaller = max((bucket for bucket in pairs.BUCKETS if bucket < size), default=0)
        assert batch["length"].max() > smaller


def test_nothing_to_predict_is_refused():
    for options in ({"mask_ratio": 0.0}, {"mask_ratio": 1.0}):
        with pytest.raises(ValueError, match="nothing to learn"):
            Config(task="retrieval", pretrain_steps=5, **options)
