"""Properties that every feature map has.

Tolerances. float32 results are compared at 1e-5 of the largest value: a feature is a product of a
few sums of 16 terms, each off by a few units of 6e-8. Rounding once to bfloat16 costs at most 2^-8
relative.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_attn.features import FEATURE_MAPS

# Maps that see the direction of x only; the others may depend on its norm.
DIRECTIONAL = {"slay", "slay_paper", "slay_auto"}
# Maps under which zero vectors vanish.
VANISHING = {"slay", "slay_paper"}
# Maps whose features grow with x without bound are tried up to 1e4 only.
GROWING = {"taylor", "elu", "relu", "cosformer", "favor_relu"}
# Factors of the product whose matrix products take bfloat16 operands.
FACTORS = {"llops": 4, "llops_paper": 4}
# Maps of signed features whose scores are squares, of which rounding the features leaves a little.
SQUARES = {"polysketch", "polysketch_learned"}
# Maps whose parameters begin with fixed numbers.
NOT_DRAWN = {"hedgehog", "focused"}
T, D, H = 12, 16, 2

maps = pytest.mark.parametrize("name", FEATURE_MAPS)


def make(name, seed=0):
    """The map and its parameters for H heads."""
    feature_map = FEATURE_MAPS[name]()
    trainable, constant = feature_map.init(jax.random.key(seed), D, H)
    assert not set(trainable) & set(constant)
    return feature_map, trainable | constant


def head(params, h=0):
    return {key: leaf[h] for key, leaf in params.items()}


def rows(seed=1, shape=(T, D), dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def assert_close(got, expected, tolerance):
    """Compare at a tolerance relative to the largest expected value."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    assert np.max(np.abs(got - expected)) <= tolerance * np.max(np.abs(expected))


@maps
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shape_and_dtype(name, dtype):
    feature_map, params = make(name)
    for key, leaf in params.items():
        assert leaf.shape[0] == H and leaf.dtype == jnp.float32, key
    for is_query in (True, False):
        phi = feature_map.apply(head(params), rows(dtype=dtype), is_query=is_query)
        assert phi.shape == (T, feature_map.dim(D))
        assert phi.dtype == dtype


@maps
def test_bfloat16_is_rounded_only_at_the_end(name):
    feature_map, params = make(name)
    x = rows(dtype=jnp.bfloat16)
    phi = feature_map.apply(head(params), x, is_query=True)
    exact = feature_map.apply(head(params), x.astype(jnp.float32), is_query=True)
    error = np.abs(np.asarray(phi, np.float32) - np.asarray(exact))
    if name in FACTORS:  # both operands of each factor's product are rounded, 2^-9 relative each
        rms_error, rms = (np.sqrt(np.mean(np.square(a))) for a in (error, exact))
        assert rms_error <= FACTORS[name] * 2.0**-8 * rms
    else:
        assert np.all(error <= 2.0**-8 * np.abs(exact))


@maps
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_non_negative_maps_have_non_negative_scores(name, dtype):
    feature_map, params = make(name)
    if not feature_map.non_negative:
        assert feature_map.normalize not in ("sum", "sum_plus_one")
        return
    q, k = (rows(seed, (64, D), dtype) for seed in (2, 3))
    phi_q = np.asarray(feature_map.apply(head(params), q, is_query=True), np.float64)
    phi_k = np.asarray(feature_map.apply(head(params), k, is_query=False), np.float64)
    bound = 0.0
    if name in SQUARES:  # both factors of each term are rounded, by half an epsilon
        norms = np.linalg.norm(phi_q, axis=-1)[:, None] * np.linalg.norm(phi_k, axis=-1)
        bound = -1.01 * float(jnp.finfo(dtype).eps) * norms
    assert np.all(phi_q @ phi_k.T >= bound)


@maps
def test_zero_vectors(name):
    feature_map, params = make(name)

    def loss(x):
        return jnp.sum(feature_map.apply(head(params), x, is_query=True) ** 2)

    x = rows().at[3].set(0.0)
    phi = feature_map.apply(head(params), x, is_query=True)
    gradient = jax.grad(loss)(x)
    assert np.all(np.isfinite(phi)) and np.all(np.isfinite(gradient))
    if name in VANISHING:
        assert not np.any(phi[3]) and not np.any(gradient[3])
        assert np.any(phi[2]) and np.any(gradient[2])


@maps
@pytest.mark.parametrize("exponent", [-30, -10, 4, 30])
def test_any_norm_is_finite(name, exponent):
    feature_map, params = make(name)
    if name in GROWING and exponent == 30:
        pytest.skip("the features grow with the norm")

    def loss(x):
        return jnp.sum(feature_map.apply(head(params), x, is_query=True))

    x = rows() * 10.0**exponent
    phi = feature_map.apply(head(params), x, is_query=True)
    gradient = jax.grad(loss)(x)
    assert np.all(np.isfinite(phi)) and np.all(np.isfinite(gradient))
    if name in DIRECTIONAL:
        assert_close(phi, feature_map.apply(head(params), rows(), is_query=True), 1e-5)
        assert np.any(gradient)


@maps
def test_rows_are_independent(name):
    feature_map, params = make(name)
    weights = rows(4, (feature_map.dim(D),))

    def row(x, t):
        return feature_map.apply(head(params), x, is_query=True)[t] @ weights

    gradient = jax.vmap(jax.grad(row), (None, 0))(rows(), jnp.arange(T))
    influence = np.any(np.asarray(gradient) != 0, axis=-1)
    np.testing.assert_array_equal(influence, np.eye(T, dtype=bool))


@maps
def test_heads_and_jit(name):
    feature_map, params = make(name)
    x = rows(5, (2, T, 2 * H, D))
    phi = jax.jit(lambda p, x: feature_map(p, x, is_query=False))(params, x)
    for b in range(2):
        for h in range(2 * H):
            one = feature_map.apply(head(params, h // 2), x[b, :, h], is_query=False)
            assert_close(phi[b, :, h], one, 1e-5)


@maps
def test_constants_get_no_gradient(name):
    feature_map = FEATURE_MAPS[name]()
    trainable, constant = feature_map.init(jax.random.key(0), D, H)
    if not trainable and not constant:
        pytest.skip("no parameters")

    def loss(trainable, constant):
        params = head(trainable) | head(constant)
        return jnp.sum(feature_map.apply(params, rows(), is_query=True) ** 2)

    d_trainable, d_constant = jax.grad(loss, (0, 1))(trainable, constant)
    assert all(np.any(leaf) for leaf in d_trainable.values())
    assert not any(np.any(leaf) for leaf in d_constant.values())


@maps
def test_draws_follow_the_key(name):
    params, again, other = (make(name, seed)[1] for seed in (0, 0, 1))
    if not params:
        pytest.skip("no parameters")
    for key, leaf in params.items():
        np.testing.assert_array_equal(leaf, again[key])
    drawn = [leaf for key, leaf in params.items() if np.any(leaf != other[key])]
    assert bool(drawn) == (name not in NOT_DRAWN)
    for leaf in drawn:
        assert np.any(leaf[0] != leaf[1])
