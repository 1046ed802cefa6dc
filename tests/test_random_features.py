"""FAVOR+, cosFormer and rectified features against golden numbers and the kernels they stand for.

Tolerances of golden numbers: 1e-6 of the largest output, 3e-6 of the largest gradient, see
golden/README.md.
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, normal

from lowrank_attn import ops
from lowrank_attn.features.cosformer import cosformer
from lowrank_attn.features.favor import favor, favor_relu
from lowrank_attn.features.relu import relu

GOLDEN = Path(__file__).parent / "golden"
causal_and_full = pytest.mark.parametrize("case", ["causal", "full"])


def check_golden(golden, prefix, features, params, **options):
    """Outputs and gradients of `ops` in float32 against the stored ones."""
    q, k, v, w = (jnp.asarray(golden[n], jnp.float32) for n in "qkvw")
    op = ops.causal if prefix.endswith("causal") else ops.bidirectional

    @jax.jit
    def attention(q, k, v):
        return op(q, k, v, features=features, params=params, normalize="sum", **options)[0]

    y, vjp = jax.vjp(attention, q, k, v)
    assert_close(y, golden[f"{prefix}.y"], 1e-6)
    for name, gradient in zip("qkv", vjp(w)):
        assert_close(gradient, golden[f"{prefix}.d_{name}"], 3e-6)


def projections(golden):
    """The golden projection, which is one for all heads."""
    W = jnp.asarray(golden["projection"], jnp.float32)
    return {"projection": jnp.broadcast_to(W, (2, *W.shape))}


def denominator(case, golden):
    """The public denominator: 1e-6 is added to each causal sum of key features, else nothing."""
    if case == "full":
        return {"epsilon": 1e-30}
    H, P, M = golden["v"].shape[2], golden["v"].shape[3], len(golden["projection"])
    state = ops.State(jnp.zeros((1, H, M, P)), jnp.full((1, H, M), 1e-6))
    return {"epsilon": 1e-30, "initial_state": state}


@pytest.mark.oracle("favor_relu", source="performer-pytorch 1.1.4")
@causal_and_full
def test_golden_favor_relu(case):
    golden = np.load(GOLDEN / "favor.npz")
    features, params = favor_relu(24), projections(golden)
    check_golden(golden, f"relu.{case}", features, params, **denominator(case, golden))


@pytest.mark.oracle("favor", source="performer-pytorch 1.1.4")
@causal_and_full
def test_golden_favor_given_the_maximum_of_the_sequence(case):
    """With the exponentials rescaled as in public code before epsilon is added.

    There keys are divided by a maximum over all tokens, and queries keep exp(-|q'|^2 / 2).
    """
    golden = np.load(GOLDEN / "favor.npz")
    epsilon, M, D = 1e-4, 24, 10
    feature_map, params = favor(M, epsilon), projections(golden)
    exponent = golden["k"] * D**-0.25 @ golden["projection"].T
    highest = jnp.asarray(np.max(exponent, axis=(1, 3), keepdims=True), jnp.float32)

    def features(params, x, *, is_query, positions):
        phi = feature_map(params, x, is_query=is_query, positions=positions)
        size = jnp.sum(x**2, axis=-1, keepdims=True) * D**-0.5
        rescale = jnp.exp(-size / 2 if is_query else -highest)
        return ((phi * M**0.5 - epsilon) * rescale + epsilon) * M**-0.5

    q = jnp.asarray(golden["q"], jnp.float32)
    phi_q = features(params, q, is_query=True, positions=None)
    assert_close(phi_q, golden["softmax.phi_q"], 1e-6)
    check_golden(golden, f"softmax.{case}", features, params, **denominator(case, golden))


def test_favor_estimates_the_softmax_kernel():
    """Mean over draws, within 5 standard errors of exp(q . k / sqrt(D)), up to a query's scale."""
    H, D, M = 2000, 8, 8
    feature_map = favor(M, epsilon=1e-30)
    _, params = feature_map.init(jax.random.key(0), D, H)
    x = normal(1, 1, 4, 1, D)
    rows = jnp.broadcast_to(x, (1, 4, H, D))
    # Without its maximum a query is mapped as a key; that is the kernel itself.
    phi = feature_map(params, rows, is_query=False)[0]
    scores = np.asarray(jnp.einsum("thm,shm->hts", phi, phi), np.float64)
    exact = np.exp(np.asarray(x[0, :, 0] @ x[0, :, 0].T, np.float64) / np.sqrt(D))
    error = np.std(scores, axis=0) / np.sqrt(H)
    off = ~np.eye(4, dtype=bool)
    assert np.all(np.abs(scores.mean(0) - exact)[off] <= 5 * error[off])
    ratio = feature_map(params, rows, is_query=True)[0] / phi
    assert_close(ratio, jnp.broadcast_to(ratio[..., :1], ratio.shape), 1e-5)


def test_favor_draws_orthogonal_rows_of_gaussian_length():
    D, M = 16, 40
    w = favor(M).init(jax.random.key(0), D, 50)[1]["projection"]
    square = np.asarray(jnp.sum(w**2, -1))
    for block in (w[:, :16], w[:, 16:32], w[:, 32:]):
        gram = np.asarray(jnp.einsum("hid,hjd->hij", block, block))
        diagonal = np.einsum("hii,ij->hij", gram, np.eye(block.shape[1]))
        assert np.max(np.abs(gram - diagonal)) < 1e-4
    # A chi-square mean of D with variance 2 D, over 2,000 lengths: 5 standard errors.
    assert abs(square.mean() - D) < 5 * np.sqrt(2 * D / square.size)
    assert abs(square.var() - 2 * D) < 0.2 * 2 * D


def test_large_heads_stay_finite():
    """At D = 256 the exponent of a key can reach 150; e^89 overflows."""
    feature_map = favor(64)
    _, params = feature_map.init(jax.random.key(0), 256, 1)
    w = params["projection"][0]
    k = (w * 256**0.25)[None, :, None]  # the worst keys
    y, _ = ops.causal(k, k, k, features=feature_map, params=params, normalize="sum")
    assert jnp.all(jnp.isfinite(y))


@pytest.mark.oracle("cosformer", source="OpenNLPLab/cosFormer")
@causal_and_full
def test_golden_cosformer(case):
    golden = np.load(GOLDEN / "cosformer.npz")
    check_golden(golden, case, cosformer(horizon=50), {}, epsilon=1e-12)


@pytest.mark.parametrize(
    "feature_map",
    [
        pytest.param(relu(), marks=pytest.mark.oracle("relu", source="loop in float64")),
        pytest.param(
            cosformer(horizon=12), marks=pytest.mark.oracle("cosformer", source="loop in float64")
        ),
    ],
)
def test_the_kernel_by_a_loop(feature_map):
    """Also beyond the horizon, where positions stand still."""
    x, y = (np.asarray(normal(i, 1, 20, 1, 6), np.float64) for i in (0, 1))
    phi_x, phi_y = (feature_map({}, jnp.asarray(a), is_query=True)[0, :, 0] for a in (x, y))
    expected = np.zeros((20, 20))
    for i, j in np.ndindex(20, 20):
        expected[i, j] = np.maximum(x[0, i, 0], 0) @ np.maximum(y[0, j, 0], 0)
        if feature_map.dim(6) == 12:
            expected[i, j] *= np.cos(np.pi / 2 * (min(i, 11) - min(j, 11)) / 12)
    assert_close(phi_x @ phi_y.T, expected, 1e-5)
    assert np.min(phi_x @ phi_y.T) >= 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cosformer(0), "horizon=0, expected at least 1"),
        (lambda: favor(0), "num_features=0, expected at least 1"),
        (lambda: favor(8, 0.0), r"epsilon=0\.0, expected a number > 0"),
        (lambda: favor_relu(8, -1.0), r"epsilon=-1\.0, expected a number > 0"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


TWO_DRAWS = """
import jax
from lowrank_attn.features.orthogonal import draw_orthogonal

draw = lambda key: [draw_orthogonal(k, (32, 1, 2048, 16)) for k in jax.random.split(key)]
jax.block_until_ready(jax.jit(draw)(jax.random.key(0)))
"""


def test_two_large_draws_in_one_program_end():
    """In a process of its own: with `jnp.linalg.qr` they waited for each other on two cores."""
    subprocess.run([sys.executable, "-c", TWO_DRAWS], check=True, timeout=120)
