"""Feature maps against golden numbers and against the kernels that they stand for.

Tolerances. Golden outputs are compared at 1e-6 of the largest value and their gradients at 3e-6,
see golden/README.md. Other float32 results are compared at 1e-5: a feature is a product of a few
sums of 16 terms, each off by a few units of 6e-8.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_attn.features.elu import elu
from lowrank_attn.features.slay import quadrature, slay, slay_paper, unit_rows
from lowrank_attn.features.taylor import taylor

GOLDEN = Path(__file__).parent / "golden"
T, D, H = 12, 16, 2


def head(params, h=0):
    return {key: leaf[h] for key, leaf in params.items()}


def rows(seed=1, shape=(T, D), dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def assert_close(got, expected, tolerance):
    """Compare at a tolerance relative to the largest expected value."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    assert np.max(np.abs(got - expected)) <= tolerance * np.max(np.abs(expected))


def linear_attention(phi_q, phi_k, v, *, causal, delta):
    """The quadratic form of linear attention with a plain sum, [B, T, H, X] arrays."""
    scores = jnp.einsum("bthm,bshm->bhts", phi_q, phi_k)
    if causal:
        scores = jnp.tril(scores)
    y = jnp.einsum("bhts,bshp->bthp", scores, v)
    return y / (jnp.einsum("bhts->bth", scores)[..., None] + delta)


def test_golden_slay():
    golden = np.load(GOLDEN / "slay_anchor.npz")
    s, w = quadrature(2, 1e-3)
    np.testing.assert_allclose(s, golden["s"], rtol=1e-13)
    np.testing.assert_allclose(w, golden["w_r"], rtol=1e-13)
    omega = np.swapaxes(golden["omega"], 0, 1)  # [R, H, D, F]
    params = {
        "anchors": jnp.asarray(np.broadcast_to(golden["anchors"], (2, 8, 16)), jnp.float32),
        "omega": jnp.asarray(np.swapaxes(omega, -1, -2), jnp.float32),
    }
    phi = slay_paper()(params, jnp.asarray(golden["q"][:1, :10], jnp.float32), is_query=True)
    assert_close(phi, golden["phi_q"], 1e-6)
    check_golden(golden, slay_paper(), params, causal=True, delta=1e-6)


def test_golden_taylor():
    golden = np.load(GOLDEN / "taylor_attention.npz")
    phi = taylor().apply({}, jnp.asarray(golden["map.x"], jnp.float32), is_query=True)
    assert_close(phi, golden["map.phi"], 1e-6)
    check_golden(golden, taylor(), {}, causal=True, delta=1e-12)


@pytest.mark.parametrize("case", ["causal", "full"])
def test_golden_elu(case):
    golden = np.load(GOLDEN / "elu_linear.npz")
    check_golden(golden, elu(), {}, causal=case == "causal", delta=1e-6, prefix=f"{case}.")


def check_golden(golden, feature_map, params, *, causal, delta, prefix=""):
    """Attention outputs and the gradients of q, k and v."""

    def attention(q, k, v):
        phi_q = feature_map(params, q, is_query=True)
        phi_k = feature_map(params, k, is_query=False)
        return linear_attention(phi_q, phi_k, v, causal=causal, delta=delta)

    q, k, v, w = (jnp.asarray(golden[key], jnp.float32) for key in "qkvw")
    y, vjp = jax.vjp(attention, q, k, v)
    assert_close(y, golden[f"{prefix}y"], 1e-6)
    for key, gradient in zip("qkv", vjp(w), strict=True):
        assert_close(gradient, golden[f"{prefix}d_{key}"], 3e-6)


def test_unit_rows_gradient():
    x = rows(shape=(T, D)).at[0].set(0.0)
    w = rows(6)
    u = unit_rows(x)
    np.testing.assert_allclose(np.linalg.norm(u[1:], axis=-1), 1.0, rtol=3e-7)
    gradient = jax.grad(lambda x: jnp.sum(unit_rows(x) * w))(x)
    assert not np.any(u[0]) and not np.any(gradient[0])
    norm = jnp.linalg.norm(x[1:], axis=-1, keepdims=True)
    along = jnp.sum(w[1:] * u[1:], axis=-1, keepdims=True)
    assert_close(gradient[1:], (w[1:] - along * u[1:]) / norm, 1e-5)


@pytest.mark.parametrize(
    "epsilon,num_nodes,bound", [(1.0, 3, 0.03), (1.0, 8, 5e-5), (0.3, 8, 0.03)]
)
def test_quadrature_converges(epsilon, num_nodes, bound):
    """The relative error at x = 1, the worst point, is about (1 + epsilon)^(-2R)."""
    s, w = quadrature(num_nodes, epsilon)
    x = np.linspace(-1, 1, 201)
    error = np.abs(np.exp(2 * np.outer(x, s)) @ w * (2 + epsilon - 2 * x) - 1)
    assert np.max(error) <= bound
    assert np.argmax(error) == 200


@pytest.mark.parametrize("orthogonal", [False, True])
def test_slay_mean_is_the_anchor_kernel(orthogonal):
    """Averaged over draws, a score is sum_r w_r (1 + 2x^2) exp(2 s_r x) ~ (1 + 2x^2) / (C - 2x).

    2,000 independent heads; a wrong mean shows against 5 standard errors, taken from their spread,
    because these stay below a tenth of the mean (beyond x = 0.5 random features have heavy tails
    and they do not). With 3 nodes and epsilon = 1 the quadrature itself is within 3 %.
    """
    heads, epsilon = 2000, 1.0
    feature_map = slay(3, 4, 4, epsilon=epsilon, orthogonal=orthogonal)
    _, params = feature_map.init(jax.random.key(7), 8, heads)
    x = np.array([-0.9, -0.3, 0.0, 0.3, 0.5])
    q = np.zeros((5, 8), np.float32)
    q[:, 0] = 3.0
    k = np.zeros((5, 8), np.float32)
    k[:, 0], k[:, 5] = x, np.sqrt(1 - x**2)
    phi_q, phi_k = (
        jax.vmap(lambda p, z=z: feature_map.apply(p, jnp.asarray(z), is_query=True))(params)
        for z in (q, k)
    )
    scores = np.asarray(jnp.sum(phi_q * phi_k, axis=-1), np.float64)
    mean, standard_error = scores.mean(0), scores.std(0) / np.sqrt(heads)
    s, w = quadrature(3, epsilon)
    expected = (1 + 2 * x**2) * (np.exp(2 * np.outer(x, s)) @ w)
    assert np.all(np.abs(mean - expected) <= 5 * standard_error)
    assert np.all(standard_error <= 0.1 * expected)
    limit = (1 + 2 * x**2) / (2 + epsilon - 2 * x)
    np.testing.assert_allclose(expected, limit, rtol=0.03)


def test_slay_scale_of_anchors():
    """The scale multiplies scores by D (D + 2) and nothing else."""
    scaled, plain = (slay(scale_anchors=flag) for flag in (True, False))
    params = head(scaled.init(jax.random.key(0), D, 1)[1])
    phi = [m.apply(params, rows(), is_query=True) for m in (scaled, plain)]
    assert_close(phi[0] @ phi[0].T, D * (D + 2) * (phi[1] @ phi[1].T), 1e-5)


def test_slay_orthogonal_draws():
    _, params = slay(num_nodes=2, num_anchors=D + 3, num_random=D).init(jax.random.key(0), D, H)
    anchors, omega = params["anchors"], params["omega"]
    gram = jnp.einsum("had,hbd->hab", anchors[:, :D], anchors[:, :D])
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(D), gram.shape), atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(anchors, axis=-1), 1.0, rtol=1e-5)
    gram = np.asarray(jnp.einsum("hrfd,hrgd->hrfg", omega, omega))
    length = np.einsum("hrff->hrf", gram)
    np.testing.assert_allclose(gram, length[..., None] * np.eye(D), atol=1e-4)
    # Squared lengths are chi^2 of D degrees: mean 16, and 64 of them give a standard error of 0.7.
    assert abs(length.mean() - D) < 3.5 and length.std() > 2


def test_slay_many_nodes_stay_finite():
    """At the most nodes the largest s is 354 and the smallest weight 5e-307."""
    feature_map = slay(num_nodes=185, num_anchors=1, num_random=2)
    params = head(feature_map.init(jax.random.key(0), D, 1)[1])
    phi = np.asarray(feature_map.apply(params, 10 * rows(), is_query=True))
    assert np.all(np.isfinite(phi)) and np.any(phi[:, 2 * 40 :])


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"num_nodes": 0}, r"num_nodes=0, expected 1\.\.185"),
        ({"num_nodes": 186}, r"num_nodes=186, expected 1\.\.185"),
        ({"epsilon": 0.0}, r"epsilon=0\.0, expected a finite number > 0"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"num_anchors": 0}, "num_anchors=0, expected at least 1"),
        ({"num_random": -1}, "num_random=-1, expected at least 1"),
    ],
)
def test_slay_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        slay(**arguments)


def test_taylor_kernel():
    q, k = rows(2), rows(3)
    phi_q, phi_k = (taylor().apply({}, x, is_query=True) for x in (q, k))
    s = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T / np.sqrt(D)
    assert phi_q.shape == (T, 273)
    assert_close(phi_q @ phi_k.T, 1 + s + s**2 / 2, 1e-5)


def test_elu_never_rounds_to_zero_in_bfloat16():
    x = jnp.linspace(-80, 8, 89, dtype=jnp.bfloat16)[:, None]
    phi = np.asarray(elu().apply({}, x, is_query=True), np.float64)
    x = np.asarray(x, np.float64)
    expected = np.where(x < 0, np.exp(x), x + 1)
    assert np.all(phi > 0)
    np.testing.assert_allclose(phi, expected, rtol=2.0**-8)
