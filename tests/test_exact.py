"""Exact attention against loops in float64, golden numbers, and who sees whom.

Tolerances. A float32 output is a ratio of sums of at most 10 positive terms, each a product of sums
of 6 terms, so a few units of 6e-8 add up to less than 1e-5 of the largest value; yat divides by
|q - k|^2 + epsilon, which loses another factor of a few to cancellation, covered by 1e-5 as well.
bfloat16 inputs are compared with the loop on the same rounded inputs: what is left is one rounding
of the probabilities (softmax) and one of the output, 2^-9 each.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from lowrank_attn.layers.exact import poly, softmax, yat, yat_spherical

GOLDEN = Path(__file__).parent / "golden"
B, T, H, G, D, P = 2, 10, 2, 2, 6, 5
RUNS = np.array([[0, 0, 0, 1, 1, 0, 0, 0, 2, 2], [3, 3, 3, 3, 3, 3, 4, 4, 4, 3]])
REAL = np.array([[0, 1, 1, 1, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 0, 0, 0]], bool)

METHODS = {
    "softmax": softmax(),
    "poly2": poly(),
    "poly3": poly(degree=3),
    "poly2_sum": poly(degree=2, normalize="sum"),
    "poly1_none": poly(degree=1, normalize="none"),
    "yat": yat(epsilon=0.1),
    "yat_spherical": yat_spherical(epsilon=0.1),
}
CASES = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "full_mask": {"causal": False, "mask": REAL},
    "causal_mask": {"causal": True, "mask": REAL},
    "full_segments": {"causal": False, "segment_ids": RUNS},
    "causal_segments_mask": {"causal": True, "mask": REAL, "segment_ids": RUNS},
}
methods = pytest.mark.parametrize("name", METHODS)


def inputs(dtype=jnp.float32, seed=0):
    """Draw q with G heads for each of the H heads of k and v."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((B, T, H * G, D), (B, T, H, D), (B, T, H, P))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


def run(name, q, k, v, **arguments):
    arguments = {key: jnp.asarray(value) for key, value in arguments.items() if key != "causal"} | {
        "causal": arguments["causal"]
    }
    return METHODS[name]({}, q, k, v, **arguments)


def sees(b, t, s, causal, mask=None, segment_ids=None):
    if causal and s > t or mask is not None and not mask[b, s]:
        return False
    between = slice(min(s, t), max(s, t) + 1)
    return segment_ids is None or len(set(segment_ids[b, between])) == 1


def score(name, q, k):
    dot = q @ k
    if name == "softmax":
        return np.exp(dot / np.sqrt(D))
    if name == "yat":
        return dot**2 / (np.sum((q - k) ** 2) + 0.1)
    if name == "yat_spherical":
        x = dot / np.sqrt((q @ q) * (k @ k))
        return x**2 / (2.1 - 2 * x)
    return dot ** int(name[4])


def loop(name, q, k, v, **visibility):
    """One query and one key at a time, in float64."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    y = np.zeros((B, T, H * G, P))
    for b, t, h in np.ndindex(B, T, H * G):
        seen = [s for s in range(T) if sees(b, t, s, **visibility)]
        if not seen:
            continue
        weights = np.array([score(name, q[b, t, h], k[b, s, h // G]) for s in seen])
        y[b, t, h] = weights @ v[b, seen, h // G]
        if name in ("poly2", "poly3"):
            y[b, t, h] /= np.sqrt(np.mean(y[b, t, h] ** 2) + 1e-6)
        elif name != "poly1_none":
            y[b, t, h] /= np.sum(weights) + (0 if name == "softmax" else 1e-6)
    return y


def oracle(name):
    return pytest.mark.oracle("poly" if "poly" in name else name, source="loop in float64")


@pytest.mark.parametrize("name", [pytest.param(name, marks=oracle(name)) for name in METHODS])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_loop(name, case):
    q, k, v = inputs()
    y = run(name, q, k, v, **CASES[case])
    expected = loop(name, q, k, v, **CASES[case])
    assert y.shape == (B, T, H * G, P) and y.dtype == jnp.float32
    assert_close(y, expected, 1e-5)


@methods
def test_bfloat16(name):
    q, k, v = inputs(jnp.bfloat16)
    y = run(name, q, k, v, **CASES["causal_mask"])
    assert y.dtype == jnp.bfloat16
    expected = loop(name, q, k, v, **CASES["causal_mask"])
    error = np.abs(np.asarray(y, np.float64) - expected)
    assert np.max(error) <= 2.0**-8 * np.max(np.abs(expected))


@methods
@pytest.mark.parametrize("case", CASES)
def test_influence_is_exactly_what_is_visible(name, case):
    """Gradients of one output reach the visible keys and values and are exactly 0 elsewhere."""
    q, k, v = inputs()
    visible = np.array(
        [[sees(b, t, s, **CASES[case]) for s in range(T)] for b, t in np.ndindex(B, T)]
    ).reshape(B, T, T)

    def output(q, k, v, t):
        return jnp.sum(run(name, q, k, v, **CASES[case])[:, t, :, 0])

    d_q, d_k, d_v = jax.jit(jax.vmap(jax.grad(output, (0, 1, 2)), (None, None, None, 0)))(
        q, k, v, jnp.arange(T)
    )
    for gradient in (d_q, d_k, d_v):
        assert np.all(np.isfinite(gradient))
    for gradient in (d_k, d_v):
        influence = np.any(np.asarray(gradient) != 0, axis=(3, 4))  # [t, B, s]
        influence = np.swapaxes(influence, 0, 1)
        if gradient is d_k and name == "softmax":
            # Alone in sight a key has probability 1, whatever it is.
            several = visible.sum(-1, keepdims=True) > 1
            np.testing.assert_array_equal(influence & several, visible & several)
            assert not np.any(influence & ~visible)
        else:
            np.testing.assert_array_equal(influence, visible)


@methods
def test_no_visible_key_gives_zero(name):
    q, k, v = inputs()
    mask = jnp.asarray([[False] * T, [False] * 4 + [True] * (T - 4)])

    def attention(q, k, v):
        return METHODS[name]({}, q, k, v, causal=True, mask=mask)

    y, vjp = jax.vjp(attention, q, k, v)
    blind = np.array([[True] * T, [True] * 4 + [False] * (T - 4)])
    assert not np.any(y[blind]) and np.all(np.any(y[~blind] != 0, axis=(-1, -2)))
    d_q, d_k, d_v = vjp(jnp.ones_like(y))
    for gradient in (d_q, d_k, d_v):
        assert np.all(np.isfinite(gradient)) and np.any(gradient[1]) and not np.any(gradient[0])


@methods
def test_zero_vectors_have_finite_gradients(name):
    q, k, v = inputs()
    q, k = q.at[:, 2].set(0.0), k.at[:, 1:4].set(0.0)
    gradients = jax.grad(lambda *qkv: jnp.sum(run(name, *qkv, causal=False)), (0, 1, 2))(q, k, v)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


@methods
def test_more_keys_than_queries(name):
    q, k, v = inputs()
    y = run(name, q[:, 6:8], k, v, causal=False, mask=REAL)
    assert_close(y, run(name, q, k, v, causal=False, mask=REAL)[:, 6:8], 1e-5)


def test_value_size_above_head_size():
    """Here softmax pads q and k to P then; the scale must stay that of D."""
    q, k, v = inputs()
    wide = jnp.concatenate([v, v], axis=-1)
    y = run("softmax", q, k, wide, causal=True)
    expected = loop("softmax", q, k, v, causal=True)
    assert y.shape == (B, T, H * G, 2 * P)
    assert np.max(np.abs(y - np.concatenate([expected, expected], -1))) <= 1e-5 * np.max(expected)


@pytest.mark.parametrize(
    "file,method",
    [
        pytest.param(
            f"slay_{file}", method, marks=pytest.mark.oracle(name, source="mlnomadpy/slay")
        )
        for file, name, method in (
            ("yat", "yat", yat),
            ("spherical_yat", "yat_spherical", yat_spherical),
        )
    ],
)
def test_golden_scores(file, method):
    """With the unit matrix as values and no normaliser the output is the matrix of scores."""
    golden = np.load(GOLDEN / f"{file}.npz")
    q, k = (jnp.asarray(golden[key], jnp.float32) for key in "qk")
    S = k.shape[1]
    v = jnp.broadcast_to(jnp.eye(S)[:, None], (*k.shape[:3], S))
    scores = method(epsilon=1e-3, normalize="none")({}, q, k, v, causal=True)
    expected = np.swapaxes(golden["scores"], 1, 2)
    assert_close(scores, expected, 1e-6)


@pytest.mark.oracle("yat_spherical", source="mlnomadpy/slay")
def test_golden_yat_spherical():
    golden = np.load(GOLDEN / "slay_spherical_yat.npz")
    q, k, v, w = (jnp.asarray(golden[key], jnp.float32) for key in "qkvw")

    def attention(q, k, v):
        return yat_spherical(epsilon=1e-3, delta=1e-6)({}, q, k, v, causal=True)

    y, vjp = jax.vjp(attention, q, k, v)
    assert_close(y, golden["y"], 1e-6)
    for key, gradient in zip("qkv", vjp(w), strict=True):
        assert_close(gradient, golden[f"d_{key}"], 3e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_yat_spherical_at_the_pole(dtype):
    """Where q = k the score is 1 / epsilon, and an error of 3e-7 in the cosine moves it by 6e-4.

    Cosines of vectors that were rounded to bfloat16 after the division would be off by 4e-3.
    """
    q = inputs(dtype)[1]
    eye = jnp.broadcast_to(jnp.eye(T)[:, None], (B, T, H, T))
    method = yat_spherical(epsilon=1e-3, normalize="none")
    scores = np.asarray(method({}, q, 4 * q, eye, causal=False))
    assert np.all(scores >= 0)
    np.testing.assert_allclose(np.einsum("bthT,tT->bth", scores, np.eye(T)), 1000.0, rtol=6e-4)


@methods
def test_shape_errors(name):
    q, k, v = inputs()

    def fails(message, q, k, v, **arguments):
        with pytest.raises(ValueError, match=message):
            METHODS[name]({}, q, k, v, **({"causal": True} | arguments))

    fails("q has 3 heads, expected a multiple of the 2 heads", q[:, :, :3], k, v)
    fails("k has shape", q, k[..., :-1], v)
    fails("v has shape", q, k, v[:, :-1])
    fails("causal=True with 4 queries and 10 keys", q[:, :4], k, v)
    fails("mask has shape", q, k, v, mask=jnp.ones((B, T - 1), bool))
    fails("segment_ids has shape", q, k, v, segment_ids=jnp.ones((B, T + 1), int))


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: poly(degree=0), "degree=0, expected an integer >= 1"),
        (lambda: poly(normalize="mean"), "normalize='mean' is unknown"),
        (lambda: poly(delta=0.0), r"delta=0\.0, expected a number > 0"),
        (lambda: yat(epsilon=0.0), r"epsilon=0\.0, expected a number > 0"),
        (lambda: yat_spherical(epsilon=-1.0), r"epsilon=-1\.0, expected a number > 0"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
