"""Losses of classification and self-pretraining, by hand, and what padding may change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close
from flax import nnx

from experiments import objectives, presets
from lowrank_attn.models.encoder import Classifier, Encoder, TokenPredictor, scale_levels

V = 257  # grey levels and the mask
KERNELS = ("llops", "softmax")


def spy(outputs, seen):
    """A module that notes its input and gives `outputs` [V or 1] at every position."""

    def call(tokens, real, rngs=None):
        seen.append(tokens)
        return jnp.broadcast_to(outputs, (*tokens.shape, len(outputs)))

    return lambda params: call


def batch_of(tokens, length=None, **more):
    tokens = np.asarray(tokens, np.uint8)
    length = np.full(tokens.shape[:-1], tokens.shape[-1]) if length is None else np.array(length)
    label = np.zeros(len(tokens), int)
    return {"tokens": tokens, "length": length, "label": label, **more}


def encoder(vocab_size=V, **options):
    sizes = {"num_layers": 1, "width": 8, "num_heads": 2, "mlp_width": 8}
    return Encoder(vocab_size, V, **(sizes | options), rngs=nnx.Rngs(0))


def test_masked_tokens_are_hidden_and_they_alone_count():
    """Bytes cannot hold the id 256; a sum over the masked positions by hand."""
    tokens = np.random.default_rng(0).integers(0, 256, (64, 50))
    length = np.random.default_rng(1).integers(1, 51, 64)
    logits, seen = jnp.arange(V) / V, []
    masked = objectives.token_prediction(spy(logits, seen), "masked", 0.15, 256)
    loss, metrics = masked.loss({}, batch_of(tokens, length), jax.random.key(0))
    hidden = np.array(seen[0]) == 256
    real = np.arange(50) < length[:, None]
    assert not hidden[~real].any()
    assert hidden.sum() == pytest.approx(0.15 * real.sum(), abs=4 * np.sqrt(0.1275 * real.sum()))
    np.testing.assert_array_equal(np.array(seen[0])[~hidden], tokens[~hidden])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        jnp.broadcast_to(logits, (64, 50, V)), tokens
    )
    assert loss == pytest.approx(np.array(losses)[hidden].mean(), rel=1e-5)
    assert metrics == {"accuracy": 0}
    masked.loss({}, batch_of(tokens, length), jax.random.key(1))
    assert (np.array(seen[1]) != np.array(seen[0])).any()  # drawn anew


def test_next_tokens_are_predicted_from_the_ones_before():
    tokens = [[7, 3, 5, 0], [7, 7, 9, 9]]
    following = objectives.token_prediction(spy(jnp.eye(V)[7] * 5, []), "next_token", 0.0, 256)
    loss, metrics = following.loss({}, batch_of(tokens, [3, 4]), jax.random.key(0))
    of_7, of_others = np.log(np.exp(5) + V - 1) - np.array([5, 0])
    assert loss == pytest.approx((4 * of_others + of_7) / 5, rel=1e-5)  # 3, 5 and 7, 9, 9
    assert metrics["accuracy"] == pytest.approx(1 / 5)


def test_levels_are_compared_as_numbers():
    tokens = [[9, 0, 255, 51]]  # -1, 1, -0.6
    following = objectives.token_prediction(spy(jnp.zeros(1), []), "next_token", 0, 256, "l1")
    loss, metrics = following.loss({}, batch_of(tokens), jax.random.key(0))
    assert loss == pytest.approx(2.6 / 3) and metrics["squared_error"] == pytest.approx(2.36 / 3)


@pytest.mark.parametrize("loss", objectives.LOSSES)
def test_without_a_token_to_predict_the_loss_is_0(loss):
    """A ratio that masks neither of the two real tokens; the gradient is 0 too."""
    params = jnp.ones(1 if loss == "l1" else V)
    masked = objectives.token_prediction(lambda p: spy(p, [])(p), "masked", 1e-9, 256, loss)
    batch, key = batch_of([[4, 5, 0]], [2]), jax.random.key(0)
    value, grads = jax.value_and_grad(lambda p: masked.loss(p, batch, key)[0])(params)
    assert value == 0 and not jnp.any(grads)


def test_evaluation_counts_pairs_as_two_and_leaves_out_what_fills_up():
    tokens = np.arange(24).reshape(2, 2, 6)
    following = objectives.token_prediction(spy(jnp.zeros(V), []), "next_token", 0, 256)
    batch = batch_of(tokens, [[6, 2], [6, 6]], weight=np.array([1.0, 0.0], np.float32))
    metrics = following.evaluate({}, batch, jax.random.key(0))
    assert metrics["loss"] == (pytest.approx(6 * np.log(V), rel=1e-5), 6)  # 5 of one, 1 of another


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1])
def test_ratios_that_leave_nothing_to_learn_are_refused(ratio):
    with pytest.raises(ValueError, match="mask_ratio=.* nothing to learn"):
        objectives.token_prediction(lambda p: None, "masked", ratio, 256)
    objectives.token_prediction(lambda p: None, "next_token", ratio, 256)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="objective='mask' is unknown; known: masked"):
        objectives.token_prediction(lambda p: None, "mask", 0.1, 256)
    with pytest.raises(ValueError, match="loss='l2' is unknown; known: cross_entropy, l1"):
        objectives.token_prediction(lambda p: None, "masked", 0.1, 256, "l2")


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_example_padded_more_gives_the_same_numbers(kernel):
    tokens = np.random.default_rng(0).integers(0, 256, (3, 20))
    length = np.array([20, 13, 2])
    classifier = Classifier(encoder(kernel=kernel), 3, rngs=nnx.Rngs(1))
    predictor = TokenPredictor(encoder(kernel=kernel, causal=True), V, rngs=nnx.Rngs(1))
    for objective in (
        objectives.classification(lambda params: classifier),
        objectives.token_prediction(lambda params: predictor, "next_token", 0, 256),
    ):
        found = [
            jax.jit(objective.evaluate)({}, batch_of(x, length, weight=np.ones(3)), None)
            for x in (tokens, np.pad(tokens, ((0, 0), (0, 17)), constant_values=9))
        ]
        for metric, (total, weight) in found[0].items():
            assert float(found[1][metric][0]) == pytest.approx(float(total), rel=1e-4)
            assert found[1][metric][1] == weight


@pytest.mark.parametrize("embed", ["table", "levels"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_all_black_picture_is_read_as_if_nothing_were_masked(kernel, embed):
    batch = batch_of(np.zeros((2, 64)))
    read = jax.jit(encoder(kernel=kernel, embed=embed).__call__)
    x = read(batch["tokens"], objectives.real_tokens(batch))
    assert jnp.all(jnp.isfinite(x)) and jnp.any(x != 0)
    assert_close(x, read(batch["tokens"], None))


def test_levels_are_embedded_by_a_line_and_the_mask_by_its_own_number():
    model = encoder(embed="levels", positions="none", num_layers=0)
    model.norm = lambda x: x
    ids = jnp.arange(V)[None]
    x = model(ids)[0]
    weights, bias = model.embedding.kernel[...], model.embedding.bias[...]
    levels = jnp.linspace(-1, 1, 256)[:, None]
    assert_close(x[:256], levels * weights[0] + bias)
    assert_close(x[256], weights[1] + bias)
    assert_close(scale_levels(ids[0, :256], 256), levels[:, 0])
    as_bytes = model(ids[:, :256].astype(jnp.uint8))[0]
    np.testing.assert_array_equal(as_bytes, x[:256])  # black is no mask in bytes either


def test_presets_have_the_published_protocol():
    """Rates on labels and of pretraining, ratio and pooling: table 4 of Amos et al. 2024."""
    masked = {
        "listops": (1e-4, 1e-3, 0.10, "mean"), "text": (1e-4, 5e-4, 0.15, "mean"),
        "retrieval": (5e-4, 5e-3, 0.15, "mean"), "image": (1e-3, 1e-3, 0.5, "max"),
        "pathfinder": (5e-4, 1e-3, 0.5, "mean"), "pathx": (5e-4, 5e-4, 0.5, "max"),
    }  # fmt: skip
    names = ("learning_rate", "pretrain_learning_rate", "mask_ratio", "pooling")
    for task, settings in presets.PRESETS["spt"].items():
        assert tuple(settings[name] for name in names) == masked[task], task
        pixels = task in ("image", "pathfinder", "pathx")
        assert (settings.get("embed") == "levels") == pixels
        assert (settings.get("pretrain_loss") == "l1") == (task == "image")
        causal = presets.PRESETS["spt-causal"][task]
        assert causal["causal"] and causal["objective"] == "next_token"


def test_the_small_protocol_is_there_for_every_task_of_skyformer():
    small, skyformer, full = (presets.PRESETS[n] for n in ("spt-small", "skyformer", "spt"))
    assert set(small) == set(skyformer) == set(full)
    for task, settings in small.items():
        for name in ("num_layers", "width", "num_heads", "mlp_width", "batch_size"):
            assert settings[name] == skyformer[task][name]
        for name in ("mask_ratio", "pretrain_steps", "pooling", "learning_rate", "dropout"):
            assert settings[name] == full[task][name]
        assert (settings["head_width"] is None) == (full[task]["head_width"] is None)
