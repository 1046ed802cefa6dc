"""The theory's programs against the bounds and formulas that they claim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx

from lowrank_attn import LinearAttention
from lowrank_attn.features import elu, llops
from lowrank_attn.theory import (
    fit,
    llops_from_data,
    llops_params,
    optimal_sketch,
    rank_one,
    rmae,
    score_report,
)

N, D = 48, 5


def data(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def power(p):
    return lambda q, k: (q @ k.T) ** p


@pytest.mark.parametrize("num_features", [4, 12, 40])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_optimal_sketch_reaches_the_bound_of_eckart_and_young(p, num_features):
    q, k = data(p, N, D), data(9, N + 7, D)
    sketch = optimal_sketch(q, k, p, num_features)
    A = power(p)(q, k)
    sigma = np.linalg.svd(A, compute_uv=False)
    bound = np.sum(sigma[num_features:] ** 2)
    assert sketch.squared_norm == pytest.approx(np.sum(A**2))
    assert sketch.bound == pytest.approx(bound, rel=1e-9, abs=1e-9 * np.sum(A**2))
    assert sketch.error == pytest.approx(bound, rel=1e-5, abs=1e-10 * np.sum(A**2))


def test_sketch_is_linear_in_the_tensor_powers():
    """phi(x) = psi_p(x) W on rows that the sketch has not seen, with W written out."""
    sketch = optimal_sketch(data(0, N, D), data(1, N, D), 3, 6)
    x = data(2, 4, D)
    psi = np.einsum("ta,tb,tc->tabc", x, x, x)
    W = sketch.query.expand()
    np.testing.assert_allclose(sketch.query(x), np.einsum("tabc,abcm->tm", psi, W), rtol=1e-8)
    np.testing.assert_allclose(sketch.query.squared_norms(), np.sum(W**2, (0, 1, 2)), rtol=1e-8)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_rank_one_residual_is_what_the_theorem_says(p, rank):
    """|W - sum tau w ⊗ ... ⊗ w|^2 = |W|^2 - sum tau^2, with everything written out."""
    W = optimal_sketch(data(0, N, D), data(1, N, D), p, 6).query
    columns = rank_one(W, rank, restarts=3)
    np.testing.assert_allclose(np.linalg.norm(columns.vectors, axis=2), 1, rtol=1e-10)
    total = np.zeros((D,) * p + (6,))
    for r in range(rank):
        term = columns.tau[r]
        for j in reversed(range(p)):
            vector = columns.vectors[j, r]
            term = vector.reshape((D,) + (1,) * (p - 1 - j) + (6,)) * term[None]
        total += term
    left = np.sum((W.expand() - total) ** 2, axis=tuple(range(p)))
    scale = W.squared_norms()
    np.testing.assert_allclose(left / scale, columns.residual / scale, atol=1e-8)
    assert np.all(columns.residual < 0.999 * scale)


def test_rank_one_of_matrices_is_their_singular_value_decomposition():
    W = optimal_sketch(data(0, N, D), data(1, N, D), 2, 6).query
    sigma = np.linalg.svd(np.moveaxis(W.expand(), -1, 0), compute_uv=False)
    np.testing.assert_allclose(rank_one(W, 3).tau, sigma[:, :3].T, rtol=1e-9)
    np.testing.assert_allclose(rank_one(W, D).residual / W.squared_norms(), 0, atol=1e-10)


def test_alternating_least_squares_finds_planted_tensors():
    """Columns that are powers of one unit vector each are recovered whole."""
    w = data(3, D, 4)
    w /= np.linalg.norm(w, axis=0)
    W = optimal_sketch(w.T, w.T, 4, 4).query
    planted = W._replace(rows=w.T, coefficients=np.diag([3.0, 2.0, -1.0, 0.5]))
    columns = rank_one(planted)
    np.testing.assert_allclose(columns.tau[0], [3, 2, 1, 0.5], rtol=1e-6)
    np.testing.assert_allclose(columns.residual, 0, atol=1e-6)


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("rank", [1, 2])
def test_llops_parameters_give_the_features_of_their_columns(rank, constants):
    p, M, x = 3, 6, data(2, 4, D)
    rows = [data(s, N, D) for s in (0, 1)]
    ones = np.ones((4, 1))
    if constants:
        rows = [np.pad(r, ((0, 0), (1, 0)), constant_values=1) for r in rows]
    sketch = optimal_sketch(*rows, p, M)
    sides = [rank_one(side, rank, restarts=2) for side in (sketch.query, sketch.key)]
    params = llops_params(*sides, constants=constants)
    feature_map = llops(p, M, rank=rank, constants=constants, tied=False, scale=1.0, qk_norm=False)
    made = feature_map.init(jax.random.key(0), D, 1)[0]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, made)
    seen = np.concatenate([ones, x], axis=1) if constants else x
    for side, is_query in zip(sides, (True, False), strict=True):
        products = np.prod(np.einsum("nd,jrdm->jrnm", seen, side.vectors), axis=0)
        expected = np.einsum("rnm,rm->nm", products, side.tau)
        phi = feature_map.apply(
            {n: a[0] for n, a in params.items()}, jnp.asarray(x, jnp.float32), is_query=is_query
        )
        assert_close(phi, expected)


def test_a_layer_initialised_from_data_starts_at_the_exact_kernel():
    """At p = 2 and full rank, with more features than monomials, nothing is left of the error."""
    H, p, M = 2, 2, 24
    layer = LinearAttention(
        H * D, H, kernel="llops_paper", rngs=nnx.Rngs(0),
        options={"num_factors": p, "num_features": M, "rank": D, "qk_norm": False, "scale": 1.0},
    )  # fmt: skip
    x = jnp.asarray(data(0, 1, N, H * D), jnp.float32)
    q, k = (project(x)[0].reshape(N, H, D) for project in (layer.query, layer.key))
    q, k = jnp.moveaxis(q, 1, 0), jnp.moveaxis(k, 1, 0)
    exact = jnp.einsum("htd,hsd->hts", q, k, precision="highest") ** p

    def error():
        phi_q, phi_k = (
            layer.attend.kernel(layer.attend.params(), jnp.moveaxis(x, 0, 1)[None], is_query=side)
            for x, side in ((q, True), (k, False))
        )
        scores = jnp.einsum("thm,shm->hts", phi_q[0], phi_k[0], precision="highest")
        return rmae(scores, exact)

    random_error = error()
    for name, value in llops_from_data(q, k, p, M, rank=D).items():
        layer.attend.phi[name][...] = value
    assert jnp.all(error() < 1e-3)  # M exceeds the 15 monomials: exact up to float32
    assert jnp.all(random_error > 0.2)


def test_fit_improves_on_its_start_and_repeats_bit_for_bit():
    H, p, M = 2, 2, 8
    q, k = (jnp.asarray(data(s, H, N, D), jnp.float32) for s in (0, 1))
    feature_map = llops(p, M, constants=False, tied=False, scale=1.0, qk_norm=False)
    start = llops_from_data(q, k, p, M)

    def run(**options):
        return fit(
            feature_map, q, k, power(p), steps=200, key=jax.random.key(1), rows=32, **options
        )

    random, informed, again = run(), run(params=start), run(params=start)
    assert jnp.mean(informed.loss[:10]) < jnp.mean(random.loss[:10])
    assert jnp.mean(informed.loss[-20:]) < 0.9 * jnp.mean(informed.loss[:10])
    assert jnp.mean(random.loss[-20:]) < 0.9 * jnp.mean(random.loss[:10])
    jax.tree.map(np.testing.assert_array_equal, informed, again)


def test_rmae_and_score_report_by_hand():
    exact, approximation = (
        jnp.array([[1.0, -2.0], [0.0, 1.0]]),
        jnp.array([[2.0, -2.0], [0.0, 0.0]]),
    )
    assert rmae(approximation, exact) == pytest.approx(0.5)
    phi_q, phi_k = jnp.array([[1.0], [1.0], [2.0]]), jnp.array([[3.0], [-1.0], [-1.0]])
    causal = score_report(phi_q, phi_k, causal=True)  # sums 3, 2, 2
    np.testing.assert_allclose(causal, [3 / 6, 2, 1])
    full = score_report(phi_q, phi_k, causal=False)  # sums 1, 1, 2
    np.testing.assert_allclose(full, [6 / 9, 1, 1])


def test_score_report_of_a_positive_map_has_no_negative_scores():
    q, k = (jnp.asarray(data(s, 1, N, 2, D), jnp.float32) for s in (0, 1))
    phi = [jnp.moveaxis(elu()({}, x, is_query=True), 1, 2) for x in (q, k)]
    assert jnp.all(score_report(*phi, causal=True).negative_share == 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_sketch(np.ones((3, 2)), np.ones((3, 4)), 2, 2), "q and k have shapes"),
        (lambda: optimal_sketch(np.ones((3, 2)), np.ones((3, 2)), 0, 2), "p=0"),
        (lambda: rank_one(optimal_sketch(np.eye(3), np.eye(3), 2, 2).query, 0), "rank=0"),
        (lambda: llops_from_data(jnp.ones((1, 3, 2)), jnp.ones((2, 3, 2)), 2, 2), "shapes"),
        (lambda: score_report(jnp.ones((3, 1)), jnp.ones((4, 1)), causal=True), "3 queries and 4"),
        (lambda: optimal_sketch(np.eye(300), np.eye(300), 4, 2).query.expand(), "300^4 x 2"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message.replace("^", r"\^")):
        call()
