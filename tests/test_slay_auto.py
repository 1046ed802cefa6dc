"""The automatic choice of SLAY features: its moments, its predictions, and what it beats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, normal

from lowrank_attn.features import cosine_histogram, plan_slay, slay_auto, slay_paper
from lowrank_attn.features.slay_auto import block_features, draw_block
from lowrank_attn.features.slay_families import moments, quadratic_moments
from lowrank_attn.features.slay_plan import Block

T, D, DRAWS = 256, 32, 6


@pytest.mark.parametrize("family", ["prf", "pair", "pair4", "hadamard", "quadratic"])
def test_moments_are_those_of_the_features(family):
    """Means and second moments of one feature (or one rotation) over 4,000 draws, D = 8.

    Differences stay below 5 standard errors, which are below 0.4 of the largest value; s is small
    because fourth moments of exponentials are large.
    """
    s, rank = (0.0, 2) if family == "quadratic" else (0.06, 0)
    block = Block(family, s, 0.7, int(rank == 0), rank)
    params = draw_block(jax.random.key(1), block, 8, 4000)
    x = np.array([-0.6, 0.0, 0.5])
    q, k = np.zeros((3, 8), np.float32), np.zeros((3, 8), np.float32)
    q[:, 1], k[:, 1], k[:, 4] = 1.0, x, np.sqrt(1 - x**2)

    @jax.vmap
    def scores(params):
        return jnp.sum(block_features(params, block, q) * block_features(params, block, k), -1)

    expected = quadratic_moments(rank, x, 8) if rank else moments(family, s, x, 8)
    draws = np.asarray(scores(params), np.float64) / 0.7
    for power, value in zip((1, 2), expected):
        standard_error = (draws**power).std(0) / np.sqrt(len(draws))
        assert np.all(np.abs((draws**power).mean(0) - value) <= 5 * standard_error)
        assert np.all(standard_error <= 0.4 * np.max(value))


@pytest.mark.oracle("slay_auto", source="formula in float64")
@pytest.mark.parametrize("family", ["const", "prf", "pair", "pair4", "hadamard", "quadratic"])
def test_scores_are_the_formula_for_the_draws(family):
    """What each feature multiplies; the test above is for what is drawn."""
    weight, rank = 0.7, 2 if family == "quadratic" else 0
    s = 0.0 if family in ("const", "quadratic") else 0.3
    block = Block(family, s, weight, 5 if s else 0, rank)
    params = {n: x[0] for n, x in draw_block(jax.random.key(1), block, 8, 1).items()}
    rows = [unit(np.asarray(normal(seed, 6, 8))) for seed in (2, 3)]
    found = [np.asarray(block_features(params, block, x), np.float64) for x in rows]

    params = {n: np.asarray(x, np.float64) for n, x in params.items()}
    expected = np.full((6, 6), 0.0 if s else weight)
    for t, r in np.ndindex(6, 6):
        q, k = rows[0][t].astype(np.float64), rows[1][r].astype(np.float64)
        for i in range(block.num_random):
            exponents = [params["omega"][i] @ x for x in (q, k)]
            term = np.exp(sum(exponents) + 2 * params["offset"][i])
            if "pair" in family:
                cosines = [params["anchors"][i] @ x for x in (q, k)]
                term *= np.prod(cosines) ** (4 if family == "pair4" else 2)
            if family == "hadamard":
                term *= np.prod(exponents) ** 2
            expected[t, r] += term
        if rank:
            q, k = (params["rotation"] @ x for x in (q, k))
            expected[t, r] *= sum((q[i::4] @ k[i::4]) ** 2 for i in range(4))
    assert_close(found[0] @ found[1].T, expected, 2e-6)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def near_a_subspace(rng):
    """Rows near a subspace of 8 dimensions, with a tenth of the energy outside."""
    basis, _ = np.linalg.qr(rng.standard_normal((D, 8)))

    def draw():
        inside = rng.standard_normal((T, 8)) @ basis.T * np.sqrt(0.9 / 8)
        return unit(inside + rng.standard_normal((T, D)) * np.sqrt(0.1 / D))

    return draw(), draw(), rng.standard_normal((T, D))


def clustered(rng):
    """Rows around 24 centres that q and k share, of cosine 0.75 within a cluster."""
    centres = unit(rng.standard_normal((24, D)))

    def draw():
        noise = rng.standard_normal((T, D)) * np.sqrt(0.25 / D)
        return unit(centres[rng.integers(0, 24, T)] * np.sqrt(0.75) + noise)

    return draw(), draw(), rng.standard_normal((T, D))


DATA = {"subspace": (near_a_subspace, 1e-3), "clusters": (clustered, 0.1)}


def samples(name):
    """Triples q, k, v, the exact scores of each, and epsilon."""
    draw, epsilon = DATA[name]
    triples = [draw(np.random.default_rng(seed)) for seed in range(DRAWS)]
    cosines = [q @ k.T for q, k, _ in triples]
    return triples, [x**2 / (2 + epsilon - 2 * x) for x in cosines], epsilon


def histogram_of(triples):
    return tuple(np.mean([cosine_histogram(q, k) for q, k, _ in triples], axis=0).tolist())


def estimates(feature_map, triples):
    """Scores of each triple by a head of its own."""
    params = feature_map.init(jax.random.key(5), D, DRAWS)[1]
    q, k = (jnp.asarray(np.stack([t[i] for t in triples]), jnp.float32) for i in (0, 1))

    @jax.jit
    @jax.vmap
    def scores(params, q, k):
        phi_q, phi_k = (feature_map.apply(params, x, is_query=True) for x in (q, k))
        return phi_q @ phi_k.T

    return np.asarray(scores(params, q, k), np.float64)


def output_error(estimated, exact, triples):
    """Median over triples of the relative error of attention outputs."""
    errors = []
    for estimate, scores, (_, _, v) in zip(estimated, exact, triples):
        y, expected = (a @ v / a.sum(1, keepdims=True) for a in (estimate, scores))
        errors.append(np.linalg.norm(y - expected) / np.linalg.norm(expected))
    return np.median(errors)


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_prediction_and_gain(name):
    """With 128 and 256 features, on low-rank and on clustered rows.

    The predicted error is within 10 % of the error of all scores (6 draws of data and features at
    once, after the best common scale): orthogonal draws are a little better than the independent
    ones of the prediction. Outputs are closer to exact attention than those of uniform attention,
    and with half of its features closer than those of `slay_paper`.
    """
    triples, exact, epsilon = samples(name)
    uniform = output_error([np.ones((T, T))] * DRAWS, exact, triples)
    paper = output_error(estimates(slay_paper(), triples), exact, triples)
    for num_features, gain in ((128, 0.04), (256, 0.1)):
        options = {"epsilon": epsilon, "histogram": histogram_of(triples)}
        estimated = estimates(slay_auto(num_features, **options), triples)
        error = output_error(estimated, exact, triples)
        assert error < uniform - gain and error < paper - gain, (error, uniform, paper)
        scale = np.sum(estimated * exact) / np.sum(estimated**2)
        measured = np.linalg.norm(scale * estimated - exact) / np.linalg.norm(exact)
        plan = plan_slay(D, num_features, **options)
        assert abs(plan.error / measured - 1) <= 0.1, (plan.error, measured)
        assert plan.error < 0.95 * plan.uniform_error


@pytest.mark.parametrize("num_features", [1, 2, 3, 7, 64, 256, 1000])
@pytest.mark.parametrize("size", [2, 7, 16, 64])
@pytest.mark.filterwarnings("ignore:slay_auto")
def test_plans_fit(size, num_features):
    plan = plan_slay(size, num_features)
    assert 1 <= plan.num_features <= num_features
    assert plan.num_features == sum(block.size(size) for block in plan.blocks)
    assert all(block.weight > 0 for block in plan.blocks)
    assert 0 < plan.error <= plan.uniform_error + 1e-6
    assert plan.error <= plan_slay(size, max(num_features // 4, 1)).error + 1e-6


@pytest.mark.filterwarnings("ignore:slay_auto")
def test_all_monomials_are_taken_where_they_fit():
    ranks = {block.rank for block in plan_slay(16, 200).blocks}
    assert 16 in ranks
    assert any(0 < block.rank < 64 for block in plan_slay(64, 512).blocks)
    assert not any(block.rank for block in plan_slay(64, 64).blocks)


@pytest.mark.parametrize("num_features", [3, 100, 300])
@pytest.mark.filterwarnings("ignore:slay_auto")
def test_features_have_the_planned_size_and_non_negative_scores(num_features):
    feature_map = slay_auto(num_features)
    params = feature_map.init(jax.random.key(0), D, 1)[1]
    x = jax.random.normal(jax.random.key(1), (50, D))
    phi = np.asarray(
        feature_map.apply({n: p[0] for n, p in params.items()}, x, is_query=True), np.float64
    )
    assert phi.shape == (50, feature_map.dim(D))
    assert np.min(phi @ phi.T) >= -1e-6 * np.max(phi @ phi.T)


def test_target_error_takes_fewer_features():
    loose, tight = (plan_slay(16, 2048, target_error=e) for e in (0.8, 0.7))
    assert loose.error <= 0.8 and tight.error <= 0.7
    assert loose.num_features < tight.num_features < 512
    with pytest.raises(ValueError, match="target_error=0.1 is not reached with num_features=256"):
        slay_auto(target_error=0.1).dim(16)


def test_warning_when_uniform_attention_is_as_good():
    """Isotropic rows of D = 128: 8 features cannot tell cosines apart."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 300, 128))
    with pytest.warns(UserWarning, match="uniform attention has 0.8.*they do not beat it"):
        plan_slay(128, 8, histogram=cosine_histogram(q, k))


def test_histogram():
    q, k = np.array([[3.0, 0.0], [0.0, 0.0]]), np.array([[2.0, 0.0], [-1.0, 0.0], [0.0, 5.0]])
    shares = cosine_histogram(q, k, bins=4)  # one cosine is 1, one is -1, four are 0
    np.testing.assert_allclose(shares, [1 / 6, 0, 4 / 6, 1 / 6])


@pytest.mark.parametrize(
    "options,message",
    [
        ({"num_features": 0}, "num_features=0, expected at least 1"),
        ({"target_error": 1.5}, "target_error=1.5, expected between 0 and 1"),
        ({"epsilon": -1.0}, "epsilon=-1.0, expected a finite number > 0"),
        ({"histogram": (1.0, -1.0)}, "negative share"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        slay_auto(**options).dim(16)
    with pytest.raises(ValueError, match="D=1, expected at least 2"):
        slay_auto().dim(1)
