"""SLAY against golden numbers and against the kernels that its options stand for.

Tolerances. Golden outputs are compared at 1e-6 of the largest value and their gradients at 3e-6,
other tolerances are those of golden/README.md. Other float32 results are compared at 1e-5: a
feature is a product of a few sums of 16 terms, each off by a few units of 6e-8.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from lowrank_attn.features.slay import slay, slay_paper
from lowrank_attn.features.slay_draws import FREQUENCIES, draw_frequencies
from lowrank_attn.features.slay_polynomials import POLYNOMIALS, quadratic, spectrum, whiten
from lowrank_attn.features.slay_quadrature import quadrature_nodes
from lowrank_attn.features.unit_rows import unit_rows

GOLDEN = Path(__file__).parent / "golden"
T, D, H = 12, 16, 2
PAPER = {"frequencies": "iid", "scaled": False}
# Options, and the tolerances of outputs and gradients where they differ from 1e-6 and 3e-6: small
# or signed denominators amplify the rounding of the features, for `nystrom` (down to 2e-4) also
# that of the whitening, which is ours, in float32.
FILES = {
    "anchor": ({}, 1e-6, 3e-6),  # `slay_paper`
    "exact_poly": ({"polynomial": "exact", "num_random": 3}, 1e-5, 2e-5),
    "nystrom": ({"polynomial": "nystrom", "num_anchors": 6, "num_random": 8}, 5e-6, 1e-5),
    "tensorsketch": ({"polynomial": "tensorsketch", "num_anchors": 6, "num_random": 8}, 1e-6, 3e-6),
    "rm": ({"polynomial": "random_maclaurin", "num_anchors": 6, "num_random": 8}, 5e-5, 1e-4),
    "laplace": ({"laplace_only": True, "num_random": 32}, 1e-6, 3e-6),
    "hadamard": ({"fusion": "hadamard", "num_random": 32}, 1e-6, 3e-6),
}
# Denominators of these are max(sum, 1e-6), of the others sum + 1e-6.
CLAMPED = {"tensorsketch", "laplace", "hadamard"}


def head(params, h=0):
    return {key: leaf[h] for key, leaf in params.items()}


def draw(feature_map, seed=0, D=D, H=H):
    """The constants of H heads."""
    return feature_map.init(jax.random.key(seed), D, H)[1]


def rows(seed=1, shape=(T, D), dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def golden_constants(golden, feature_map):
    """The constants of our map, in which the golden draws replace the random ones."""
    constant = dict(draw(feature_map, D=golden["q"].shape[-1]))
    slope = np.sqrt(2 * golden["s"])[:, None, None, None]
    omega = slope * np.swapaxes(golden["omega"], -1, -2)  # [R, H, F, D]
    constant["omega"] = jnp.asarray(np.concatenate(omega, axis=1), jnp.float32)
    for ours, theirs in (("anchors", "anchors"), ("left", "rm_r1"), ("right", "rm_r2")):
        if theirs in golden:
            scale = np.sqrt(golden["q"].shape[-1]) if ours != "anchors" else 1.0
            draws = np.broadcast_to(scale * golden[theirs], (H, *golden[theirs].shape))
            constant[ours] = jnp.asarray(draws, jnp.float32)
    if "whitening" in constant:
        constant["whitening"] = whiten(constant["anchors"])
    for i in "12":
        if f"ts_hash{i}" in golden:
            waves = spectrum(golden[f"ts_hash{i}"], jnp.asarray(golden[f"ts_sign{i}"]), 6)
            constant[f"sketch_{i}"] = jnp.broadcast_to(waves, (H, *waves.shape))
    return constant


def oracle(file):
    name = "slay_paper" if file == "anchor" else "slay"
    return pytest.mark.oracle(name, source="mlnomadpy/slay")


@pytest.mark.parametrize("name", [pytest.param(file, marks=oracle(file)) for file in FILES])
def test_golden(name, monkeypatch):
    """Products of features, causal outputs, and gradients of q, k and v."""
    # All draws are replaced, so they need not be drawn, which saves their compilation.
    monkeypatch.setattr(jax.random, "normal", lambda key, shape: np.ones(shape, np.float32))
    golden = np.load(GOLDEN / f"slay_{name}.npz")
    options, output_tolerance, gradient_tolerance = FILES[name]
    feature_map = slay_paper() if name == "anchor" else slay(2, **PAPER, **options)
    constant = golden_constants(golden, feature_map)
    q, k, v, w = (jnp.asarray(golden[key], jnp.float32) for key in "qkvw")

    def attention(q, k, v):
        phi_q, phi_k = (feature_map(constant, x, is_query=True) for x in (q, k))
        scores = jnp.tril(jnp.einsum("bthm,bshm->bhts", phi_q, phi_k))
        total = jnp.einsum("bhts->bth", scores)[..., None]
        total = jnp.maximum(total, 1e-6) if name in CLAMPED else total + 1e-6
        return jnp.einsum("bhts,bshp->bthp", scores, v) / total

    @jax.jit
    def with_gradients(q, k, v, w):
        y, pull = jax.vjp(attention, q, k, v)
        return y, pull(w), feature_map(constant, q[:1, :10], is_query=True)

    y, gradients, phi = with_gradients(q, k, v, w)
    if name not in ("exact_poly", "tensorsketch"):  # these have another basis
        assert_close(phi, golden["phi_q"], 1e-6)
    scores, expected = (
        np.einsum("bthm,bshm->bhts", x, x, dtype=np.float64) for x in (phi, golden["phi_q"])
    )
    assert_close(scores, expected, 2e-6)
    assert_close(y, golden["y"], output_tolerance)
    for key, gradient in zip("qkv", gradients, strict=True):
        assert_close(gradient, golden[f"d_{key}"], gradient_tolerance)


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


def quadrature_error(x, num_nodes, epsilon, kind="laguerre"):
    s, log_w = quadrature_nodes(num_nodes, epsilon, kind)
    return np.abs(np.exp(2 * np.outer(x, s) + log_w).sum(1) * (2 + epsilon - 2 * x) - 1)


@pytest.mark.parametrize(
    "epsilon,num_nodes,bound", [(1.0, 3, 0.03), (1.0, 8, 5e-5), (0.3, 8, 0.03)]
)
def test_quadrature_converges(epsilon, num_nodes, bound):
    """The relative error at x = 1, the worst point, is about (1 + epsilon)^(-2R)."""
    error = quadrature_error(np.linspace(-1, 1, 201), num_nodes, epsilon)
    assert np.max(error) <= bound
    assert np.argmax(error) == 200


@pytest.mark.parametrize(
    "epsilon,num_nodes,rescaled,minimax",
    [(1e-3, 4, 0.945, 0.1152), (0.1, 3, 0.311, 0.02034), (1.0, 5, 3e-4, 2.4e-6)],
)
def test_other_quadratures_have_smaller_largest_errors(epsilon, num_nodes, rescaled, minimax):
    x = np.concatenate([np.cos(np.linspace(0, np.pi, 999)), 1 - np.geomspace(1e-7, 1, 999)])
    assert np.max(quadrature_error(x, num_nodes, epsilon)) > 1.02 * rescaled
    assert np.max(quadrature_error(x, num_nodes, epsilon, "rescaled")) <= 1.01 * rescaled
    assert np.max(quadrature_error(x, num_nodes, epsilon, "minimax")) <= 1.01 * minimax


def cosines():
    """Pairs of unit rows of D = 8 with given cosines, and the cosines."""
    x = np.array([-0.9, -0.3, 0.0, 0.3, 0.5])
    q = np.zeros((5, 8), np.float32)
    q[:, 0] = 3.0
    k = np.zeros((5, 8), np.float32)
    k[:, 0], k[:, 5] = x, np.sqrt(1 - x**2)
    return jnp.asarray(q), jnp.asarray(k), x


def mean_scores(feature_map, heads):
    """Scores at `cosines`, averaged over heads, and the standard errors of the means."""
    q, k, _ = cosines()
    params = draw(feature_map, 7, 8, heads)

    @jax.jit
    def scores(params):
        phi_q, phi_k = (feature_map.apply(params, x, is_query=True) for x in (q, k))
        return jnp.sum(phi_q * phi_k, axis=-1)

    scores = np.asarray(jax.vmap(scores)(params), np.float64)
    return scores.mean(0), scores.std(0) / np.sqrt(heads)


MEANS = {
    "kronecker": ({"num_anchors": 4}, "anchor"),
    "pairs": ({"fusion": "pairs"}, "anchor"),
    "hadamard": ({"fusion": "hadamard"}, "hadamard"),
    "laplace": ({"laplace_only": True}, "laplace"),
    "random_maclaurin": ({"polynomial": "random_maclaurin"}, "square"),
    "tensorsketch": ({"polynomial": "tensorsketch"}, "square"),
    "sketch": ({"fusion": "sketch", "num_anchors": 4, "sketch_size": 32}, "anchor"),
    "odd_sketch": ({"fusion": "sketch", "polynomial": "exact", "sketch_size": 31}, "square"),
}


@pytest.mark.parametrize("name", MEANS)
def test_mean_is_the_kernel(name):
    """Averaged over draws, a score is the kernel that the docstring states.

    1,000 independent heads; a wrong mean shows against 5 standard errors, taken from their spread,
    because these stay below a quarter of the largest mean up to x = 0.3 (beyond 0.5 random features
    have heavy tails and they do not).
    """
    options, kind = MEANS[name]
    mean, standard_error = mean_scores(slay(2, num_random=8, epsilon=2.0, **options), 1000)
    x = cosines()[2]
    s, log_w = quadrature_nodes(2, 2.0)
    terms = np.exp(2 * np.outer(x, s) + log_w)
    m = np.sqrt(2 * s) * (1 + x[:, None])
    factor = {
        "anchor": 1 + 2 * x[:, None] ** 2,
        "square": x[:, None] ** 2,
        "laplace": 4.0,
        "hadamard": m**4 + 2 * m**2 * (1 + 2 * x[:, None]) + 1 + 2 * x[:, None] ** 2,
    }[kind]
    expected = (factor * terms).sum(1)
    assert np.all(np.abs(mean - expected) <= 5 * standard_error + 1e-6)
    assert np.all(standard_error[:4] <= 0.25 * np.max(expected))


def test_nystrom_is_exact_with_enough_anchors():
    """D (D + 1) / 2 anchors span the squares; the ridge of 1e-3 is what is left."""
    u = unit_rows(rows(shape=(T, 4)))
    params = head(POLYNOMIALS["nystrom"].init(jax.random.key(0), 4, 40, 1, True))
    g = POLYNOMIALS["nystrom"].apply(params, u, 40)
    assert_close(g @ g.T, jnp.square(u @ u.T), 1e-2)


@pytest.mark.parametrize("size,rank", [(7, 7), (8, 8), (12, 4), (12, 3), (6, 1)])
def test_quadratic_is_a_sum_of_squares(size, rank):
    q, k = rows(2, (5, size)), rows(3, (6, size))
    phi_q, phi_k = quadratic(q, rank), quadratic(k, rank)
    assert phi_q.shape == (5, size * (rank + 1) // 2)
    blocks = (np.asarray(x, np.float64).reshape(-1, rank, size // rank) for x in (q, k))
    assert_close(phi_q @ phi_k.T, (np.einsum("trb,srb->tsb", *blocks) ** 2).sum(-1), 1e-6)


def test_variance_falls_with_each_kind_of_frequencies():
    """Means at x = 0.3, variances at x = 0; s = 0.25, D = 8, 5,000 draws of 8 features."""
    u = jnp.zeros((3, 8)).at[0, 0].set(1).at[1, 1].set(1).at[2, :2].set([0.3, np.sqrt(0.91)])
    variance = {}
    for kind in FREQUENCIES:
        omega, offset = draw_frequencies(jax.random.key(3), 5000, 8, 8, np.array([0.25]), kind)
        e = jnp.exp(jnp.einsum("td,nfd->ntf", u, omega[:, 0]) + offset)
        mean = jnp.mean(e[:, 0] * e[:, 2], axis=-1)
        assert abs(jnp.mean(mean) - np.exp(0.15)) <= 5 * jnp.std(mean) / np.sqrt(5000)
        variance[kind] = float(jnp.var(jnp.mean(e[:, 0] * e[:, 1], axis=-1)))
    assert abs(variance["iid"] / ((np.exp(1.0) - 1) / 8) - 1) < 0.1
    assert variance["orthogonal"] < 0.9 * variance["iid"]
    assert variance["antithetic"] < 0.8 * variance["orthogonal"]
    assert variance["oprf"] < 0.7 * variance["orthogonal"]


def test_orthogonal_draws():
    params = draw(slay(2, D + 3, D))
    anchors = params["anchors"]
    gram = jnp.einsum("had,hbd->hab", anchors[:, :D], anchors[:, :D])
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(D), gram.shape), atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(anchors, axis=-1), 1.0, rtol=1e-5)
    s, _ = quadrature_nodes(2, 1e-3)
    omega = params["omega"].reshape(H, 2, D, D) / np.sqrt(2 * s)[:, None, None]
    gram = np.asarray(jnp.einsum("hrfd,hrgd->hrfg", omega, omega))
    length = np.einsum("hrff->hrf", gram)
    np.testing.assert_allclose(gram, length[..., None] * np.eye(D), atol=1e-4)
    # Squared lengths are chi^2 of D degrees: mean 16, and 64 of them give a standard error of 0.7.
    assert abs(length.mean() - D) < 3.5 and length.std() > 2


def test_many_nodes_stay_finite():
    """At the most nodes the largest s is 354 and the smallest weight 5e-307."""
    feature_map = slay(185, num_random=2, fusion="pairs", frequencies="iid")
    params = head(draw(feature_map))
    phi = np.asarray(feature_map.apply(params, 10 * rows(), is_query=True))
    assert np.all(np.isfinite(phi)) and np.any(phi[:, 2 * 40 :])


@pytest.mark.parametrize(
    "options,non_negative",
    [
        ({}, True),
        ({"polynomial": "exact"}, True),
        ({"fusion": "hadamard"}, True),
        ({"fusion": "pairs"}, True),
        ({"laplace_only": True}, True),
        ({"fusion": "sketch"}, False),
        ({"polynomial": "nystrom", "num_anchors": 6}, False),
        ({"polynomial": "tensorsketch"}, False),
        ({"polynomial": "random_maclaurin", "fusion": "pairs"}, False),
    ],
)
def test_maps_know_their_size_and_whether_scores_can_be_negative(options, non_negative):
    feature_map = slay(2, num_random=8, **options)
    params = head(draw(feature_map))
    phi = feature_map.apply(params, rows(2, (99, D)), is_query=True)
    assert phi.shape == (99, feature_map.dim(D))
    assert feature_map.non_negative == non_negative
    assert feature_map.normalize == ("sum" if non_negative else "rms")
    scores = np.asarray(phi, np.float64) @ np.asarray(phi, np.float64).T
    # Rounding of the exact polynomial leaves about 1e-7 of the largest score.
    assert (np.min(scores) < -1e-3 * np.max(scores)) == (not non_negative)
    assert np.min(scores) >= -1e-6 * np.max(scores) or not non_negative


@pytest.mark.parametrize(
    "options,message",
    [
        ({"num_nodes": 0}, r"num_nodes=0, expected 1\.\.185"),
        ({"num_nodes": 186}, r"num_nodes=186, expected 1\.\.185"),
        ({"epsilon": 0.0}, r"epsilon=0\.0, expected a finite number > 0"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"num_anchors": 0}, "num_anchors=0, expected at least 1"),
        ({"num_random": -1}, "num_random=-1, expected at least 1"),
        ({"quadrature": "gauss"}, "quadrature='gauss' is unknown; known: laguerre"),
        ({"quadrature": "minimax", "epsilon": 0.2}, "not in the table.*epsilon: nodes.*0.3: 1, 2"),
        ({"polynomial": "cubic"}, "polynomial='cubic' is unknown; known: anchor"),
        ({"fusion": "none"}, "fusion='none' is unknown"),
        ({"frequencies": "qmc"}, "frequencies='qmc' is unknown"),
        ({"fusion": "pairs", "num_anchors": 8}, "num_anchors=8 has no effect"),
        ({"polynomial": "exact", "num_anchors": 8}, "num_anchors=8 has no effect"),
        ({"sketch_size": 8}, "sketch_size=8 has no effect"),
        ({"fusion": "pairs", "polynomial": "nystrom"}, "no estimates of x.2.*anchor, random_mac"),
        ({"fusion": "hadamard", "frequencies": "oprf"}, "other than 'oprf'"),
        ({"fusion": "hadamard", "polynomial": "exact"}, "leave polynomial out"),
        ({"laplace_only": True, "fusion": "pairs"}, "leave both out"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        slay(**options)
