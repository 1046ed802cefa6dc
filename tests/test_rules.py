"""State-update rules against golden numbers, and where chunks could go wrong but must not.

The golden files hold float64 results of public code; see golden/README.md.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, normal

from lowrank_attn import ops
from lowrank_attn.layers import GATINGS
from lowrank_attn.ops.rules.halving import unit_lower_inverse

GOLDEN = Path(__file__).parent / "golden"
# Rounding of 50 tokens to float32, the stated bound of the comparison.
GOLDEN_TOLERANCE = 1e-5
FILES = {
    "linear": "additive",
    "simple_decay": "decay",
    "gla": "gla",
    "delta": "delta",
    "gated_delta": "gated_delta",
    "kda": "kda",
}


def load(name):
    return {k: x for k, x in np.load(GOLDEN / f"rule_{name}.npz").items() if k != "meta"}


def run(rule, implementation, x, S0=None, chunk_size=16):
    """(y, S) of a call with q scaled as in the golden files."""
    gates = {name: x[name] for name in ops.RULES[rule].gates}
    y, state = ops.causal(
        x["q"] * x["q"].shape[-1] ** -0.5, x["k"], x["v"], rule=rule, gates=gates,
        initial_state=None if S0 is None else ops.State(S0, None), chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    return y, state.S


def oracle(rule):
    return pytest.mark.oracle(rule, source="fla-core 0.6.0")


@pytest.mark.parametrize(
    "name", [pytest.param(file, marks=oracle(rule)) for file, rule in FILES.items()]
)
def test_golden(name):
    golden, rule = load(name), FILES[name]
    inputs = ("q", "k", "v", "S0", *ops.RULES[rule].gates)
    x = {key: jnp.asarray(golden[key], jnp.float32) for key in inputs}
    S0 = x.pop("S0")
    for started, S in (("init", S0), ("zero", None)):
        found = jax.jit(lambda x, S: run(rule, "reference", x, S))(x, S)
        assert_close(found, (golden[f"{started}.y"], golden[f"{started}.S"]), GOLDEN_TOLERANCE)

    def loss(x):
        y, S = run(rule, "xla", x, x["S0"])
        return jnp.sum(y * golden["w"]) + jnp.sum(S * golden["w_S"]), (y, S)

    grads, found = jax.jit(jax.grad(loss, has_aux=True))(x | {"S0": S0})
    assert_close(found, (golden["init.y"], golden["init.S"]), GOLDEN_TOLERANCE)
    expected = {key: golden[f"init.d_{key}"] for key in inputs}
    assert_close(grads, expected, GOLDEN_TOLERANCE)


@oracle("retention")
def test_golden_retention():
    """Its decays are those that a layer with rule='retention' has."""
    golden = load("retention")
    x = {key: jnp.asarray(golden[key], jnp.float32) for key in ("q", "k", "v")}
    B, T, H = x["q"].shape[:3]
    x |= GATINGS["retention"].apply({}, x["q"].reshape(B, T, -1), H)
    assert_close(x["log_decay"][0, 0], golden["log_decay"], 1e-6)

    def loss(x):
        y, _ = run("decay", "xla", x)
        return jnp.sum(y * golden["w"]), y

    grads, y = jax.jit(jax.grad(loss, has_aux=True))(x)
    assert_close(y, golden["y"], GOLDEN_TOLERANCE)
    for key in ("q", "k", "v"):
        assert_close(grads[key], golden[f"d_{key}"], GOLDEN_TOLERANCE)


@pytest.mark.parametrize("rule", [n for n, r in ops.RULES.items() if "log_decay" in r.gates])
def test_strong_decays_are_exact(rule):
    """Decays of e^-1000 between weak ones: nothing overflows, and what follows is not blurred."""
    B, T, H, M, P = 1, 24, 1, 5, 3
    x = {"q": normal(0, B, T, H, M), "k": normal(1, B, T, H, M), "v": normal(2, B, T, H, P)}
    x["k"] /= jnp.linalg.norm(x["k"], axis=-1, keepdims=True)
    decay = jnp.where(normal(3, B, T, H, M) > 0.5, -1000.0, -0.1 * jnp.abs(normal(4, B, T, H, M)))
    decay = decay.at[:, 8:16].set(-20.0)
    x["log_decay"] = decay if ops.RULES[rule].per_feature else decay[..., 0]
    if "beta" in ops.RULES[rule].gates:
        x["beta"] = jax.nn.sigmoid(normal(5, B, T, H))

    def loss(x, implementation):
        y, S = run(rule, implementation, x, chunk_size=T)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(S)), (y, S)

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    assert_close(grad(x, "xla"), grad(x, "reference"))


@pytest.mark.parametrize("C", [1, 2, 7, 64])
def test_inverse_of_equal_keys(C):
    """A of ones, the delta rule with one key: powers of A have 10^17, the inverse has 1 and -1."""
    A = jnp.tril(jnp.ones((C, C)), -1)
    expected = jnp.eye(C) - jnp.eye(C, k=-1)
    assert_close(unit_lower_inverse(A), expected, 1e-6)
    weights = normal(0, C, C)
    found = jax.grad(lambda A: jnp.sum(unit_lower_inverse(A) * weights))(A)
    with jax.default_matmul_precision("float32"):
        assert_close(found, -expected.T @ weights @ expected.T)


@pytest.mark.parametrize("rule", ["additive", "decay"])
def test_bfloat16_on_a_cpu(rule):
    """Decayed keys were a product that XLA's CPU backend cannot run at this shape."""
    q, k, v = (normal(i, 2, 300, 3, 16, dtype=jnp.bfloat16) for i in range(3))
    gates = {"log_decay": -jnp.abs(normal(3, 2, 300, 3))} if rule == "decay" else {}

    @functools.partial(jax.jit, static_argnums=3)
    def run_of(q, k, v, name):
        return ops.causal(q, k, v, rule=rule, gates=gates, normalize="rms", implementation=name)[0]

    wide = (x.astype(jnp.float32) for x in (q, k, v))
    found, expected = run_of(q, k, v, "xla"), run_of(*wide, "reference")
    assert_close(found.astype(jnp.float32), expected, 2e-2)
