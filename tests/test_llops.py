"""LLoPS: the sketch it claims to be, its scale, and whether its features are alive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, normal

from lowrank_attn import ops
from lowrank_attn.features import active_features, effective_rank, llops

T, D, M = 64, 16, 256


def unit_params(feature_map, D=D, H=1, seed=0):
    return feature_map.init(jax.random.key(seed), D, H)[0]


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(
    ("constants", "tied"),
    [
        pytest.param(True, True, marks=pytest.mark.oracle("llops", source="loop in float64")),
        (True, False),
        (False, True),
        pytest.param(
            False, False, marks=pytest.mark.oracle("llops_paper", source="loop in float64")
        ),
    ],
)
def test_features_are_the_sum_of_products(constants, tied, rank, squared):
    """The formula of the docstring, by loops in float64."""
    p, m, scale = 3, 7, 0.7
    feature_map = llops(
        p, m, rank=rank, constants=constants, tied=tied, squared=squared, scale=scale
    )
    params = unit_params(feature_map)
    params = {n: x + 0.1 * normal(9, *x.shape) for n, x in params.items()}
    x = normal(1, 5, D)
    arrays = {n: np.asarray(a[0], np.float64) for n, a in params.items()}
    for is_query in (True, False):
        side = 0 if tied or is_query else 1
        rows = np.asarray(x, np.float64)
        rows = rows / np.sqrt(np.mean(rows**2, -1, keepdims=True) + 1e-6)
        rows = rows * arrays["gain"][0 if is_query else 1]
        total = np.zeros((5, m))
        for r in range(rank):
            product = np.ones((5, m)) * (arrays["lambda"][side, r] if rank > 1 else 1)
            for j in range(p):
                factor = scale / np.sqrt(D) * rows @ arrays["W"][side, j, r]
                product *= factor + (arrays["b"][side, j, r] if constants else 0)
            total += product
        expected = (total**2 if squared else total) / np.sqrt(m)
        head = {n: a[0] for n, a in params.items()}
        assert_close(feature_map.apply(head, x, is_query=is_query), expected)


def test_plain_product_sketches_the_polynomial():
    """E phi(q).phi(k) = c^p for tied Gaussian W: the mean over 2^17 columns, within 5 sigma."""
    p, columns = 2, 2**17
    feature_map = llops(p, columns, constants=False, scale=1.0)
    params = {n: x[0] for n, x in unit_params(feature_map).items()}
    q, k = normal(1, 1, D), normal(2, 1, D) + normal(1, 1, D)
    phi_q = feature_map.apply(params, q, is_query=True)[0].astype(jnp.float32)
    phi_k = feature_map.apply(params, k, is_query=False)[0]
    terms = np.asarray(phi_q * phi_k, np.float64) * columns
    c = float(jnp.sum(q * k) / jnp.linalg.norm(q) / jnp.linalg.norm(k))
    sigma = terms.std() / np.sqrt(columns)
    assert abs(terms.mean() - c**p) < 5 * sigma
    assert sigma < 0.05 * c**p  # sharp enough to tell c^p from its neighbours


def test_constants_make_the_kernel_start_linear():
    """E phi(q).phi(k) = (1 + scale^2 c)^p."""
    p, scale, columns = 4, 0.5, 2**16
    feature_map = llops(p, columns, scale=scale)
    params = {n: x[0] for n, x in unit_params(feature_map).items()}
    q, k = normal(1, 1, D), normal(2, 1, D)
    terms = np.asarray(
        feature_map.apply(params, q, is_query=True)
        * feature_map.apply(params, k, is_query=False),
        np.float64,
    )[0] * columns  # fmt: skip
    c = float(jnp.sum(q * k) / jnp.linalg.norm(q) / jnp.linalg.norm(k))
    sigma = terms.std() / np.sqrt(columns)
    assert abs(terms.mean() - (1 + scale**2 * c) ** p) < 5 * sigma


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("form", ["default", "paper", "squared"])
def test_scores_are_of_order_one_at_initialisation(form, p):
    """The rms score of tokens with themselves, over seeds, is between 0.1 and 30.

    One Gaussian factor has fourth moment 3, so the self score of the plain product with p factors
    has mean 1 and variance at most 3^p / M per token; squares double p.
    """
    options = {"default": {}, "squared": {"squared": True}}
    paper = {"constants": False, "tied": True}
    feature_map = llops(p, M, **options.get(form, paper))
    scores = []
    for seed in range(8):
        params = {n: x[0] for n, x in unit_params(feature_map, seed=seed).items()}
        x = 5 * normal(seed, T, D)  # the norm of q and k does not matter
        phi_q = feature_map.apply(params, x, is_query=True)
        phi_k = feature_map.apply(params, x, is_query=False)
        scores.append(jnp.sum(phi_q * phi_k, -1))
    rms = float(jnp.sqrt(jnp.mean(jnp.square(jnp.stack(scores)))))
    assert 0.1 < rms < 30


def test_defaults_are_those_that_train():
    feature_map = llops()
    params = unit_params(feature_map, H=3)
    assert feature_map.normalize == "rms" and not feature_map.non_negative
    assert params["W"].shape == (3, 1, 4, 1, D, M)
    assert jnp.all(params["b"] == 1) and jnp.all(params["gain"] == 1)
    assert llops(squared=True).normalize == "sum" and llops(squared=True).non_negative


def test_tied_map_has_non_negative_self_scores_untied_has_not():
    x = normal(1, 512, D)
    for tied in (True, False):
        feature_map = llops(4, M, constants=False, tied=tied)
        params = {n: a[0] for n, a in unit_params(feature_map).items()}
        score = jnp.sum(
            feature_map.apply(params, x, is_query=True)
            * feature_map.apply(params, x, is_query=False), -1,
        )  # fmt: skip
        assert jnp.all(score >= 0) == tied


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
def test_any_norm_is_finite_with_finite_gradients(size):
    feature_map = llops()
    params = {n: a[0] for n, a in unit_params(feature_map).items()}
    x = size * normal(1, T, D)
    phi, pull = jax.vjp(lambda x: feature_map.apply(params, x, is_query=True), x)
    assert jnp.all(jnp.isfinite(phi)) and jnp.all(jnp.isfinite(pull(phi)[0]))
    if size >= 1:  # the epsilon of the norm is negligible: direction alone counts
        assert_close(phi, feature_map.apply(params, normal(1, T, D), is_query=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_factors": 0}, "num_factors=0, expected 1 to 8"),
        ({"num_factors": 9}, "num_factors=9, expected 1 to 8"),
        ({"num_features": 0}, "num_features=0, expected at least 1"),
        ({"rank": 0}, "rank=0, expected at least 1"),
    ],
)
def test_sizes_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        llops(**arguments)


def test_statistics_of_known_features():
    assert_close(effective_rank(jnp.eye(8)[None]), jnp.array([8.0]))
    one_column = jnp.zeros((1, 8, 16)).at[:, :, 3].set(1e-20)
    assert_close(effective_rank(one_column), jnp.array([1.0]))
    assert_close(active_features(one_column), jnp.array([1.0]))
    assert_close(active_features(jnp.full((1, 8, 16), 1e20)), jnp.array([16.0]))
    assert_close(active_features(jnp.zeros((1, 8, 16))), jnp.array([0.0]))
    some = jnp.ones((1, 8, 16)).at[:, 3:, 1:].set(0)
    assert_close(active_features(some, jnp.arange(8) < 3), jnp.array([16.0]))


def test_plain_sum_of_signed_scores_is_unsafe_and_not_the_default():
    """Half of the denominators of untied signed features are negative: why the default is `rms`."""
    feature_map = llops(2, M, constants=False, tied=False)
    params = unit_params(feature_map)
    x = normal(1, 1, 512, 1, D)
    _, state = ops.bidirectional(x, x, x, features=feature_map, params=params, normalize="sum")
    d = jnp.einsum("btm,bm->bt", feature_map(params, x, is_query=True)[:, :, 0], state.z[:, 0])
    assert 0.2 < jnp.mean(d < 0) < 0.8
    assert feature_map.normalize == "rms"
