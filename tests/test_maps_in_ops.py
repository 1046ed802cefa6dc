"""Feature maps through the operations: parity, packing, padding, zero vectors, large norms.

The operations take a map as a function of rows, so the maps here are those that differ in what
an operation can see: signed and positive scores, trained and constant parameters, growth with the
norm. tests/test_registry.py goes through all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, normal

from lowrank_attn import ops
from lowrank_attn.features import FEATURE_MAPS

B, T, H, D, P = 2, 19, 2, 8, 5
SEGMENTS = jnp.array([[0] * 4 + [1] * 15, [0] * 13 + [2] * 6])
MASK = jax.random.bernoulli(jax.random.key(5), 0.8, (B, T)).at[:, 0].set(True)

maps = pytest.mark.parametrize(
    "name", ["llops", "llops_paper", "slay", "slay_paper", "taylor", "elu"]
)
both = pytest.mark.parametrize("op", ["causal", "bidirectional"])


def setting(name, dtype=jnp.float32, group=2):
    """The arrays to differentiate, and the call without them."""
    feature_map = FEATURE_MAPS[name]()
    trainable, constant = feature_map.init(jax.random.key(3), D, H)
    q, k, v = (normal(i, B, T, h, n, dtype=dtype)
               for i, (h, n) in enumerate([(group * H, D), (H, D), (H, P)]))  # fmt: skip
    # `rms` divides by outputs that signed scores can cancel to almost nothing, which amplifies
    # their rounding without bound; the normalisers themselves are tested with the operations.
    normalize = "sum" if feature_map.non_negative else "none"
    fixed = {"features": feature_map, "normalize": normalize, "chunk_size": 8}
    return {"q": q, "k": k, "v": v, "trainable": trainable}, constant, fixed


def value_and_grads(op, implementation, arrays, constant, **fixed):
    call = functools.partial(getattr(ops, op), implementation=implementation, **fixed)

    def scalar(arrays):
        y, state = call(
            arrays["q"], arrays["k"], arrays["v"], params=arrays["trainable"] | constant
        )
        parts = [jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves((y, state))]
        return sum(parts), (y, state)

    (_, outputs), grads = jax.jit(jax.value_and_grad(scalar, has_aux=True))(arrays)
    return outputs, grads


@maps
@both
def test_xla_matches_the_reference(name, op):
    arrays, constant, fixed = setting(name)
    fixed |= {"mask": MASK, "segment_ids": SEGMENTS}
    found, expected = (
        value_and_grads(op, i, arrays, constant, **fixed) for i in ("xla", "reference")
    )
    assert_close(found, expected)


@maps
@both
def test_bfloat16_error_is_that_of_the_reference(name, op):
    """At most 1.5 times the reference's own rounding error, for gradients twice.

    The chunked form rounds scores to bfloat16 once more than the reference, which forms none; a
    gradient passes two such roundings, of scores and of their cotangents.
    """
    arrays, constant, fixed = setting(name)
    low = arrays | {n: arrays[n].astype(jnp.bfloat16) for n in ("q", "k", "v")}
    rounded = arrays | {n: low[n].astype(jnp.float32) for n in ("q", "k", "v")}
    exact = value_and_grads(op, "reference", rounded, constant, **fixed)

    def errors(implementation):
        found = value_and_grads(op, implementation, low, constant, **fixed)
        return jax.tree.map(
            lambda f, e: np.sqrt(
                np.mean(np.square(np.asarray(f, np.float64) - np.asarray(e, np.float64)))
            ),
            found,
            exact,
        )

    for found, allowed, factor in zip(errors("xla"), errors("reference"), (1.5, 2.0)):
        for f, a in zip(jax.tree.leaves(found), jax.tree.leaves(allowed)):
            assert f <= factor * a + 1e-7


@maps
@both
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e3])
def test_zero_vectors_and_any_norm_are_finite(name, op, size):
    """Some tokens have q = k = 0 or a tiny or large norm: outputs and gradients stay finite."""
    arrays, constant, fixed = setting(name)
    for n in ("q", "k"):
        arrays[n] = arrays[n].at[:, ::3].multiply(size)
    for implementation in ("xla", "reference"):
        outputs, grads = value_and_grads(op, implementation, arrays, constant, **fixed)
        for leaf in jax.tree.leaves((outputs, grads)):
            assert np.all(np.isfinite(leaf))


@maps
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_documents_do_not_see_each_other(name, implementation):
    """By gradient: exactly no influence across a border, in both directions."""
    arrays, constant, fixed = setting(name)
    for op in (ops.causal, ops.bidirectional):

        def output(k, v, op=op):
            y, _ = op(
                arrays["q"], k, v, params=arrays["trainable"] | constant, segment_ids=SEGMENTS,
                implementation=implementation, **fixed,
            )  # fmt: skip
            return jnp.sum(y[0, 10] ** 2)

        for grad in jax.grad(output, (0, 1))(arrays["k"], arrays["v"]):
            influence = jnp.max(jnp.abs(grad[0]), axis=(1, 2))
            assert jnp.all(influence[:4] == 0) and jnp.any(influence[4:] > 0)
