"""Known maps as parameters of LLoPS: exact in float32 when the map starts, and able to change.

Tolerance. A feature is a product of at most four sums of a few exact terms, each scaled twice: some
ten roundings of 6e-8 at most, below 1e-6 of the largest score.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, normal

from lowrank_attn.features import llops, polysketch, taylor
from lowrank_attn.features.llops_embeddings import based, power, untied_ones
from lowrank_attn.features.polysketch import random_sketch

D, T = 16, 9
EXACT = 1e-6


def product(embedding, x):
    """The map of a `Product` in float64."""
    Theta, b = (np.asarray(leaf, np.float64) for leaf in embedding)
    return np.prod(np.asarray(x, np.float64) @ Theta + b[:, None], axis=0)


def scores(phi_q, phi_k):
    return np.asarray(phi_q, np.float64) @ np.asarray(phi_k, np.float64).T


def head(feature_map, size=D):
    """The parameters of one head, and both sides of its features as a function of rows."""
    params = {n: leaf[0] for n, leaf in feature_map.init(jax.random.key(0), size, 1)[0].items()}

    def features(x, params=params, is_query=True):
        return jax.jit(feature_map.apply, static_argnames="is_query")(params, x, is_query=is_query)

    return params, features


@pytest.mark.parametrize("n", range(1, 9))
def test_untied_ones_differ_and_multiply_to_one(n):
    ones = untied_ones(n)
    assert len(set(ones)) == len(ones) == n and np.prod(ones) == 1
    assert n != 2 or ones == [2, 0.5]


@pytest.mark.parametrize("num_factors", [2, 3, 4])
def test_all_columns_of_based(num_factors):
    x = normal(1, T, D)
    phi = taylor().apply({}, x, is_query=True)
    assert phi.shape[1] == 273
    assert_close(product(based(D, num_factors, symmetric=False), x), phi, EXACT)
    _, features = head(llops(num_factors, 273, init="based", qk_norm=False))
    assert_close(features(x), phi, EXACT)


@pytest.mark.parametrize("num_factors", [2, 4])
def test_symmetric_based_has_the_same_scores_in_153_columns(num_factors):
    q, k = normal(1, T, D), normal(2, T, D)
    expected = scores(*(taylor().apply({}, x, is_query=True) for x in (q, k)))
    feature_map = llops(num_factors, init="based", qk_norm=False)
    assert feature_map.dim(D) == 153
    _, features = head(feature_map)
    assert_close(scores(features(q), features(k)), expected, EXACT)


def test_spare_columns_of_untied_based_start_silent_and_learn():
    q, k = normal(1, T, D), normal(2, T, D)
    feature_map = llops(4, 160, init="based", tied=False, qk_norm=False)
    params, _ = head(feature_map)

    def score(params):
        phi_q, phi_k = (feature_map.apply(params, x, is_query=x is q) for x in (q, k))
        return phi_q @ phi_k.T

    value, grads = jax.jit(
        lambda params: (score(params), jax.grad(lambda p: jnp.sum(jnp.sin(score(p))))(params))
    )(params)
    expected = scores(*(taylor().apply({}, x, is_query=True) for x in (q, k)))
    assert_close(value, expected, 2e-6)  # float32 sums of 160 products on top
    assert all(jnp.all(grads["W"][0, 0, 0, :, m] != 0) for m in range(153, 160))


@pytest.mark.parametrize("seed", range(3))
def test_spare_columns_do_not_drown_based_in_the_first_steps(seed):
    """Columns of N(0, 1/D) would: 14 % and more, of raw queries and keys of rms 2."""
    feature_map = llops(4, 256, init="based", tied=False, qk_norm=False)
    params, _ = feature_map.init(jax.random.key(seed), 16, 1)
    optimizer = optax.adam(4e-4)

    def outputs(params, key):
        q, k, v, weight = jax.random.normal(key, (4, 64, 16))
        of_head = jax.tree.map(lambda leaf: leaf[0], params)
        phi_q, phi_k = (feature_map.apply(of_head, 2 * x, is_query=x is q) for x in (q, k))
        scores = jnp.tril(phi_q @ phi_k.T)
        return scores @ v / jnp.sum(scores, axis=1, keepdims=True), weight

    @jax.jit
    def step(params, state, key):
        gradients = jax.grad(lambda p: jnp.sum(jnp.multiply(*outputs(p, key))))(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    after, state = params, optimizer.init(params)
    for i in range(5):
        after, state = step(after, state, jax.random.key(100 + i))
    (before, _), (y, _) = (outputs(p, jax.random.key(99)) for p in (params, after))
    assert jnp.linalg.norm(y - before) < 0.02 * jnp.linalg.norm(before)


def test_adam_unties_the_padded_factors_of_based():
    """With constants 1 and 1 the padded factors would move together for ever; 2 and 1/2 do not."""
    x, w = normal(1, 32, 4), normal(2, 32)
    feature_map = llops(4, init="based", qk_norm=False)
    params, _ = head(feature_map, size=4)

    def distance(params):  # of the last two factors, both with columns of length one
        theta, b = feature_map.product.factors(params, is_query=True)
        a, c = (np.concatenate([theta[j], b[j][None]]) for j in (2, 3))
        a, c = (f / np.linalg.norm(f, axis=0) for f in (a, c))
        return np.linalg.norm(a - c)

    @jax.jit
    def train(params):
        optimizer = optax.adam(1e-2)

        def loss(params):
            phi = feature_map.apply(params, x, is_query=True)
            return jnp.mean((phi @ phi.T - jnp.outer(w, w)) ** 2)

        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), None, 20)[0][0]

    assert distance(params) < EXACT < 1e-2 < distance(train(params))


@pytest.mark.parametrize("num_factors", [2, 3, 4])
def test_power(num_factors):
    x = normal(1, T, D)
    W = normal(2, D, 20)
    expected = (np.asarray(x, np.float64) @ np.asarray(W, np.float64)) ** num_factors
    assert_close(product(power(W, num_factors), x), expected, EXACT)
    assert_close(product(power(jnp.eye(D), num_factors), x), x**num_factors, EXACT)
    params, features = head(llops(num_factors, 20, init="power", qk_norm=False))
    phi = np.asarray(features(x), np.float64)
    theta, b = llops(num_factors, 20, init="power", qk_norm=False).product.factors(
        params, is_query=True
    )
    assert not np.any(b)
    projection = np.asarray(x, np.float64) @ np.asarray(theta[0], np.float64)
    assert_close(phi, projection**num_factors / untied_ones(num_factors)[0] ** num_factors, EXACT)


def test_polysketch():
    """The parameters of `init` reproduce the random map with the draws that they hold."""
    x, r = normal(1, T, D), 5
    params, features = head(llops(4, r * r, init="polysketch", qk_norm=False))
    feature_map = polysketch(r, qk_norm=False)
    theta, _ = llops(4, r * r, init="polysketch", qk_norm=False).product.factors(
        params, is_query=True
    )
    G = theta[:2, :, ::r] * r**0.25 / 2.0  # column (i, 0) of the first half is 2 r^(-1/4) G_i
    phi = features(x)
    assert phi.shape == (T, feature_map.dim(D))
    assert_close(phi, feature_map.apply({"G1": G}, x, is_query=True), EXACT)
    sketch = random_sketch({"G1": G}, x)
    assert_close(scores(phi, phi), scores(sketch, sketch) ** 2, 2 * EXACT)


@pytest.mark.parametrize("init", ["based", "power", "polysketch"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_both_sides_are_the_map_of_normalised_rows(init, qk_norm):
    """With the norm, the map is that of x / rms(x)."""
    feature_map = llops(init=init, qk_norm=qk_norm)
    plain = llops(init=init, qk_norm=False)
    params, features = head(feature_map, size=6)
    x = 3 * normal(1, T, 6)
    rows = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) if qk_norm else x
    expected = jax.jit(plain.apply, static_argnames="is_query")(params, rows, is_query=True)
    for is_query in (True, False):
        assert_close(features(x, is_query=is_query), expected, 2 * EXACT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init": "taylor"}, "init='taylor' is unknown; known: random, based"),
        ({"init": "based", "squared": True}, "init='based' with squared=True: .*orthogonal"),
        ({"init": "based", "num_factors": 1}, "num_factors=1, constants=True: expected at least 2"),
        ({"init": "based", "constants": False}, "constants=False: expected at least 2 and True"),
        ({"init": "power", "rank": 2}, "rank=2 with init='power', expected 1"),
        ({"init": "polysketch", "num_factors": 2}, "expected 4 factors and a square number"),
        ({"init": "polysketch", "num_features": 60}, "num_features=60: expected 4 factors"),
    ],
)
def test_what_an_embedding_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        llops(**arguments)


@pytest.mark.parametrize("arguments", [{"num_features": 152}, {"num_features": 160}])
def test_sizes_that_do_not_hold_based_are_refused(arguments):
    with pytest.raises(ValueError, match="D=16: expected 153 .* or 273, or with tied=False"):
        llops(init="based", **arguments).init(jax.random.key(0), D, 1)
