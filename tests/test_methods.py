"""Attention methods that are no feature map: masks, documents, causality, groups, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, normal

from lowrank_attn.layers import ATTENTION
from lowrank_attn.layers.exact import softmax
from lowrank_attn.layers.linformer import linformer
from lowrank_attn.layers.mamba import mamba
from lowrank_attn.layers.nystromformer import nystromformer
from lowrank_attn.layers.reformer import reformer
from lowrank_attn.layers.skyformer import skyformer
from lowrank_attn.layers.sliding_window import sliding_window
from lowrank_attn.layers.window_linear import window_linear

B, T, H, D = 2, 70, 2, 6  # two blocks of a sliding window, nine chunks of Reformer, two of Mamba
METHODS = {
    "sliding_window": sliding_window(5),
    "window_linear": window_linear(5, features="elu"),
    "nystromformer": nystromformer(4, conv_size=3),
    "skyformer": skyformer(4),
    "linformer": linformer(max_length=80, rank=6),
    "reformer": reformer(2, num_buckets=4, chunk_size=8),
    "mamba": mamba(4, conv_size=3),
}
DIRECT = (
    "sliding_window",
    "window_linear",
    "mamba",
)  # causal, and nothing but visible keys matters
GROUPED = ("sliding_window", "window_linear", "nystromformer", "skyformer", "linformer")
every = pytest.mark.parametrize("name", METHODS)


def params_of(name):
    trainable, constant = METHODS[name].init(jax.random.key(0), D, H)
    if "gate" in trainable:
        trainable = {**trainable, "gate": jnp.array([-1.0, 2.0])}
    return {**trainable, **constant}


@functools.cache
def jitted(name):
    def call(params, q, k, v, causal, **seen):
        return METHODS[name](params, q, k, v, causal=causal, **seen)

    return jax.jit(call, static_argnames="causal")


def run(name, q, k, v, causal=False, mask=None, segment_ids=None):
    """Call with a mask and, where the method takes them, documents: always the same program."""
    mask = jnp.ones(k.shape[:2], bool) if mask is None else mask
    if segment_ids is None and METHODS[name].no_segments is None:
        segment_ids = jnp.zeros(k.shape[:2], int)
    seen = {"mask": mask, "segment_ids": segment_ids}
    return jitted(name)(params_of(name), q, k, v, causal=causal, **seen)


def inputs(seed=0, dtype=jnp.float32):
    return [normal(3 * seed + i, B, T, H, D, dtype=dtype) for i in range(3)]


@every
def test_padding_has_no_influence(name):
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (B, T))
    real = mask[:, :, None, None]
    ours = inputs()
    others = [jnp.where(real, x, 100 * z) for x, z in zip(ours, inputs(1))]
    y, same = (jnp.where(real, run(name, *qkv, mask=mask), 0) for qkv in (ours, others))
    assert_close(same, y, 1e-6)
    if name == "reformer":  # padding fills chunks of its own, which are neighbours too
        return
    prefix = jnp.broadcast_to(jnp.arange(T) < 35, (B, T))
    y = run(name, *ours, mask=prefix)[:, :35]
    assert_close(y, run(name, *(x[:, :35] for x in ours)))


@every
def test_without_a_visible_key_outputs_are_zero_and_gradients_finite(name):
    mask = jnp.zeros((B, T), bool).at[1].set(True)

    def total(params, q, k, v):
        y = METHODS[name](params, q, k, v, causal=False, mask=mask)
        return jnp.sum(y**2), y

    gradient = jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))
    grads, y = gradient(params_of(name), *inputs())
    assert not jnp.any(y[0]) and jnp.all(jnp.any(y[1] != 0, axis=(-1, -2)))
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_as_if_alone(name, causal):
    ids = jnp.broadcast_to(jnp.arange(T) // 35, (B, T))
    q, k, v = inputs()
    y = run(name, q, k, v, causal, segment_ids=ids)
    for document in (0, 1):
        alone = run(name, q, k, v, causal, mask=ids == document)
        assert_close(y[ids == document], alone[ids == document])


@pytest.mark.parametrize("name", DIRECT)
def test_the_future_has_no_influence(name):
    early, late = inputs(), inputs(1)
    changed = [jnp.concatenate([a[:, :40], b[:, 40:]], axis=1) for a, b in zip(early, late)]
    y, other = (run(name, *qkv, True) for qkv in (early, changed))
    assert_close(other[:, :40], y[:, :40], 1e-6)
    assert jnp.all(jnp.any(other[:, 40:] != y[:, 40:], axis=(-1, -2)))


def test_reformer_passes_no_gradient_across_documents_or_to_the_future():
    """Chunks depend on all tokens of a row, so other tokens can only be compared by gradient."""
    ids = jnp.broadcast_to(jnp.arange(T) >= 30, (B, T)).astype(int)
    q, _, v = inputs()

    def output(q, v):
        return jnp.sum(run("reformer", q, q, v, True, segment_ids=ids)[:, 50] ** 2)

    for gradient in jax.grad(output, (0, 1))(q, v):
        influence = jnp.any(gradient != 0, axis=(0, 2, 3))
        assert jnp.any(influence[30:50])
        assert not jnp.any(influence[:30]) and not jnp.any(influence[51:])


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads_share_keys_and_values(name):
    q, k, v = inputs()
    other = inputs(1)[0]
    # Heads 0 and 1 of these read key head 0, heads 2 and 3 read key head 1.
    four = jnp.stack([q, other], axis=3).reshape(B, T, 2 * H, D)
    y = run(name, four, k, v)
    assert_close(y[:, :, ::2], run(name, q, k, v))
    assert_close(y[:, :, 1::2], run(name, other, k, v))


@every
def test_bfloat16(name):
    """Rounded a few times to 8 bits: probabilities, values, the output."""
    low = inputs(dtype=jnp.bfloat16)
    y = run(name, *low)
    assert y.dtype == jnp.bfloat16
    exact = run(name, *(x.astype(jnp.float32) for x in low))
    assert_close(y, exact, 3 * 2.0**-8)


@pytest.mark.oracle("sliding_window", source="formula in float64")
@pytest.mark.parametrize(
    ("window", "length", "causal"),
    [(5, 150, False), (5, 150, True), (70, 150, False), (500, 3, True)],
)
def test_sliding_window_is_softmax_in_a_band(window, length, causal):
    q, k, v = (np.asarray(normal(i, B, length, H, D), np.float64) for i in range(3))
    mask = np.asarray(jax.random.bernoulli(jax.random.key(1), 0.8, (B, length)))
    segment = np.cumsum(np.asarray(jax.random.bernoulli(jax.random.key(2), 0.02, mask.shape)), 1)
    t, s = np.arange(length)[:, None], np.arange(length)
    visible = (abs(t - s) <= window) & ((s <= t) | (not causal)) & mask[:, None]
    visible = (visible & (segment[..., None] == segment[:, None]))[:, None]
    weights = np.exp(np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)) * visible
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    expected = np.einsum("bhts,bshp->bthp", weights, v)
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    attention = jax.jit(functools.partial(sliding_window(window), {}, causal=causal))
    y = attention(*arrays, mask=jnp.asarray(mask), segment_ids=jnp.asarray(segment))
    assert_close(y, expected, 1e-5)


def test_sliding_window_gradients_are_those_of_softmax():
    q, k, v = inputs()

    def gradients(method):
        def total(q, k, v):
            return jnp.sum(jnp.sin(method({}, q, k, v, causal=True)))

        return jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v)

    assert_close(gradients(sliding_window(T)), gradients(softmax("xla")))


@pytest.mark.oracle("window_linear", source="formula in float64")
@pytest.mark.parametrize("causal", [False, True])
def test_window_linear_is_softmax_in_a_band_and_all_of_elu(causal):
    """Mixed by the gate of each head."""
    q, k, v = (np.asarray(x, np.float64) for x in inputs())
    t, s = np.arange(T)[:, None], np.arange(T)
    visible = (s <= t) | (not causal)
    phi_q, phi_k = (np.where(x < 0, np.exp(np.minimum(x, 0)), x + 1) for x in (q, k))

    def attend(scores):
        return np.einsum("bhts,bshp->bthp", scores / scores.sum(-1, keepdims=True), v)

    near = np.exp(np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)) * (abs(t - s) <= 5) * visible
    linear = np.einsum("bthd,bshd->bhts", phi_q, phi_k) * visible
    gate = 1 / (1 + np.exp(-np.asarray(params_of("window_linear")["gate"], np.float64)))[:, None]
    expected = gate * attend(near) + (1 - gate) * attend(linear)
    assert_close(run("window_linear", *inputs(), causal), expected, 1e-5)


def test_window_linear_mixes_by_its_gate():
    q, k, v = inputs()
    params = params_of("window_linear")
    program = jax.jit(functools.partial(METHODS["window_linear"], causal=True))
    linear, near = (program({"gate": jnp.full(2, g)}, q, k, v) for g in (-100.0, 100.0))
    assert_close(near, run("sliding_window", q, k, v, True))
    g = jax.nn.sigmoid(params["gate"])[:, None]
    assert_close(program(params, q, k, v), g * near + (1 - g) * linear)


@pytest.mark.parametrize("name", ["nystromformer", "skyformer", "linformer"])
def test_what_has_no_form_is_refused_with_the_reason(name):
    q, k, v = inputs()
    with pytest.raises(ValueError, match="causal=True, but this kernel has no causal form: .*late"):
        run(name, q, k, v, True)
    with pytest.raises(
        NotImplementedError, match="segment_ids is given, but .*whole row.*one document"
    ):
        run(name, q, k, v, segment_ids=jnp.zeros((B, T), int))


@pytest.mark.parametrize("name", ["reformer", "mamba"])
def test_what_needs_equal_heads_or_sizes_is_refused(name):
    q, k, v = inputs()
    with pytest.raises(ValueError, match="q has 2 heads and k has 1|v has shape .*as q"):
        run(name, q, k[:, :, :1], v[:, :, :1])


@pytest.mark.parametrize("name", [name for name in METHODS if name != "linformer"])
def test_queries_and_keys_are_the_same_tokens(name):
    q, k, v = inputs()
    with pytest.raises(ValueError, match="q has 8 tokens and k has 70, expected the same tokens"):
        METHODS[name](params_of(name), q[:, :8], k, v, causal=False)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sliding_window", {"window": 0}, "window=0, expected at least 1"),
        ("window_linear", {"features": "exp"}, "features='exp' is unknown; known: llops"),
        ("nystromformer", {"num_landmarks": 0}, "num_landmarks=0, expected at least 1"),
        ("nystromformer", {"conv_size": 4}, "conv_size=4, expected an odd number"),
        ("nystromformer", {"num_iterations": 0}, "num_iterations=0, expected at least 1"),
        ("skyformer", {"num_samples": 3}, "num_samples=3, expected an even number"),
        ("skyformer", {"num_iterations": 0}, "num_iterations=0, expected at least 1"),
        ("linformer", {"max_length": 0}, "max_length=0, expected at least 1"),
        ("linformer", {"rank": 0}, "rank=0, expected at least 1"),
        ("reformer", {"num_buckets": 3}, "num_buckets=3, expected an even number"),
        ("reformer", {"num_hashes": 0}, "num_hashes=0, expected at least 1"),
        ("mamba", {"state_size": 0}, "state_size=0, expected at least 1"),
        ("mamba", {"dt_rank": 0}, "dt_rank=0, expected at least 1"),
    ],
)
def test_options_out_of_range(name, options, message):
    with pytest.raises(ValueError, match=message):
        ATTENTION[name](**options)


def test_linformer_has_a_longest_sequence():
    q, k, v = (normal(i, 1, 81, H, D) for i in range(3))
    with pytest.raises(ValueError, match="k has 81 tokens, expected at most max_length=80"):
        run("linformer", q, k, v)
