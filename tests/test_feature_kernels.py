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
from conftest import assert_close

from lowrank_attn.features.elu import elu
from lowrank_attn.features.taylor import taylor

GOLDEN = Path(__file__).parent / "golden"
T, D, H = 12, 16, 2


def head(params, h=0):
    return {key: leaf[h] for key, leaf in params.items()}


def rows(seed=1, shape=(T, D), dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def linear_attention(phi_q, phi_k, v, *, causal, delta):
    """The quadratic form of linear attention with a plain sum, [B, T, H, X] arrays."""
    scores = jnp.einsum("bthm,bshm->bhts", phi_q, phi_k)
    if causal:
        scores = jnp.tril(scores)
    y = jnp.einsum("bhts,bshp->bthp", scores, v)
    return y / (jnp.einsum("bhts->bth", scores)[..., None] + delta)


@pytest.mark.oracle("taylor", source="HazyResearch/based")
def test_golden_taylor():
    golden = np.load(GOLDEN / "taylor_attention.npz")
    phi = taylor().apply({}, jnp.asarray(golden["map.x"], jnp.float32), is_query=True)
    assert_close(phi, golden["map.phi"], 1e-6)
    check_golden(golden, taylor(), {}, causal=True, delta=1e-12)


@pytest.mark.oracle("elu", source="idiap/fast-transformers")
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
