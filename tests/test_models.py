"""The encoder and its heads."""

import jax
import jax.numpy as jnp
import pytest
from conftest import assert_close, normal
from flax import nnx

from lowrank_attn.models.encoder import (
    LARGEST_ONE_HOT,
    POOLINGS,
    POSITIONS,
    Classifier,
    Encoder,
    pool,
    sinusoids,
)

B, T, V = 3, 12, 7


def encoder(**options):
    sizes = {"num_layers": 2, "width": 16, "num_heads": 2, "mlp_width": 32}
    small = {"options": {"num_features": 16}} if "kernel" not in options else {}
    return Encoder(V, 20, **(sizes | small | options), rngs=nnx.Rngs(0))


def tokens(seed=0, shape=(B, T)):
    return jax.random.randint(jax.random.key(seed), shape, 1, V)


def real(*lengths):
    return jnp.arange(T)[None] < jnp.array(lengths)[:, None]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_has_no_influence(pooling, positions):
    model = Classifier(
        encoder(positions=positions, use_cls=pooling == "cls"), 5, pooling=pooling, rngs=nnx.Rngs(1)
    )
    ids, mask = tokens(), real(12, 7, 1)
    logits = model(ids, mask)
    other = jnp.where(mask, ids, V - ids)
    assert_close(model(other, mask), logits)
    shorter = model(ids[1:2, :7], jnp.ones((1, 7), bool))
    assert_close(logits[1:2], shorter)


def test_causal_encoder_hides_the_future():
    model = encoder(causal=True)
    ids = tokens()
    changed = ids.at[:, 8:].set(1)
    assert_close(model(changed)[:, :8], model(ids)[:, :8])
    assert not jnp.allclose(model(changed)[:, 8:], model(ids)[:, 8:])


def test_two_towers_read_pairs():
    model = Classifier(encoder(), 2, two_towers=True, head_width=8, rngs=nnx.Rngs(1))
    ids, mask = tokens(shape=(B, 2, T)), jnp.ones((B, 2, T), bool)
    logits = model(ids, mask)
    assert logits.shape == (B, 2)
    assert not jnp.allclose(logits, model(ids[:, ::-1], mask))
    assert not jnp.allclose(logits, model(ids.at[:, 1].set(1), mask))


def test_pooling_by_hand():
    x, mask = normal(0, 2, T, 4), real(5, 12)
    assert_close(pool(x, mask, "mean")[0], x[0, :5].mean(0))
    assert_close(pool(x, mask, "max")[0], x[0, :5].max(0))
    assert_close(pool(x, mask, "last"), jnp.stack([x[0, 4], x[1, 11]]))
    assert_close(pool(x, mask, "cls"), x[:, 0])
    nothing = jnp.zeros((2, T), bool)
    assert jnp.all(pool(x, nothing, "mean") == 0) and jnp.all(pool(x, nothing, "max") == 0)


def test_sinusoids():
    table = sinusoids(50, 6)
    assert table.shape == (50, 6)
    assert_close(table[7, 0], jnp.sin(7.0))
    assert_close(table[7, 3], jnp.cos(7.0))
    assert_close(table[7, 2], jnp.sin(7.0 * 10000 ** (-2 / 3)))


def test_dropout_needs_a_key_and_depends_on_it():
    model = encoder(dropout=0.5)
    ids = tokens()
    assert_close(model(ids), model(ids))
    a, b = (model(ids, rngs=nnx.Rngs(dropout=seed)) for seed in (0, 1))
    assert not jnp.allclose(a, b)
    assert_close(model(ids, rngs=nnx.Rngs(dropout=0)), a)


def test_bfloat16_keeps_float32_parameters_and_logits():
    model = Classifier(encoder(dtype="bfloat16"), 5, rngs=nnx.Rngs(1))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
    assert model(tokens(), real(12, 7, 1)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: encoder(positions="alibi"), "positions='alibi' is unknown; known: learned"),
        (lambda: encoder(causal=True, use_cls=True), "use_cls=True with causal=True"),
        (lambda: encoder(rule="delta"), "rule='delta' with causal=False"),
        (lambda: encoder()(tokens(shape=(1, 21))), "tokens has length 21, expected at most 20"),
        (lambda: Classifier(encoder(), 5, pooling="sum", rngs=nnx.Rngs(0)), "pooling='sum'"),
        (lambda: Classifier(encoder(), 5, pooling="cls", rngs=nnx.Rngs(0)), "if and only if"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_embedding_of_small_vocabularies_has_no_scatter():
    """Tens of thousands of additions into a few rows would dominate a step on accelerators."""

    def loss(model, ids):
        return jnp.sum(model(ids))

    def program(vocab_size):
        model = Encoder(
            vocab_size, 20, num_layers=1, width=16, num_heads=2, mlp_width=16, rngs=nnx.Rngs(0)
        )
        graph, state = nnx.split(model)
        grad = jax.grad(lambda state, ids: loss(nnx.merge(graph, state), ids))
        return str(jax.make_jaxpr(grad)(state, tokens()))

    assert "scatter" not in program(V)
    assert "scatter" in program(LARGEST_ONE_HOT + 1)


def test_small_and_large_vocabularies_embed_alike(monkeypatch):
    model = encoder()
    expected = model(tokens())
    monkeypatch.setattr("lowrank_attn.models.encoder.LARGEST_ONE_HOT", 0)
    assert_close(model(tokens()), expected)
