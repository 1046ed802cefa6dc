"""Pallas TPU kernels against the reference, in the interpreter that checks memory and races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from jax.experimental.pallas import tpu as pltpu

from lowrank_attn import features, ops
from lowrank_attn.features import FeatureMap
from lowrank_attn.ops import block_sizes, pallas_tpu
from lowrank_attn.ops.rules import Rule, additive

D, M, P = 8, 16, 24
C = 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Two heads per step forward, one backward, and a kept state every two chunks of C."""
    blocks = block_sizes.TPU_FALLBACK._replace(heads=2, backward_heads=1)
    monkeypatch.setattr(block_sizes, "TPU_FALLBACK", blocks)
    monkeypatch.setattr(pallas_tpu, "TOKENS_PER_SAVED_STATE", 2 * C)


def interpret():
    return pltpu.force_tpu_interpret_mode(
        pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", random_seed=0)
    )


def _write(gates):
    return gates["write"].astype(jnp.float32)


# A rule with one gate per feature.
gated_write = Rule(
    gates=("write",),
    step=lambda S, q, k, v, gates: additive.step(S, q, k * _write(gates), v, {}),
    chunk=lambda S, q, k, v, gates, run: additive.chunk(
        S, q, (k * _write(gates)).astype(k.dtype), v, {}, run
    ),
    per_feature=("write",),
)

# A map with a scalar, a vector and an integer parameter per head, that reads positions.
odd_map = FeatureMap(
    dim=lambda D: D,
    init=lambda key, D, H: (
        {"scalar": jnp.linspace(0.5, 1.5, H), "vector": jax.random.normal(key, (H, D))},
        {"shift": jnp.arange(H * D, dtype=jnp.int32).reshape(H, D) % 3},
    ),
    apply=lambda params, x, *, is_query, positions: (
        x * params["scalar"]
        + params["vector"] * jnp.cos(0.1 * positions)[:, None]
        + params["shift"]
    ),
    non_negative=False,
    normalize="none",
)


def make_call(
    op="causal", rule="additive", normalize="none", map_="llops", B=1, T=90, S=None, H=2, G=1,
    map_heads=None, segments=False, mask=False, initial=False, dtype=jnp.float32,
):  # fmt: skip
    """The op as a function of (implementation, differentiable arguments), and those arguments."""
    S = S or T
    keys = iter(jax.random.split(jax.random.key(7), 12))

    def normal(*shape, dtype=dtype):
        return jax.random.normal(next(keys), shape, dtype)

    tokens, sources = ((), ()) if op == "decode_step" else ((T,), (S,))
    x = {
        "q": normal(B, *tokens, H * G, D),
        "k": normal(B, *sources, H, D),
        "v": normal(B, *sources, H, P),
    }
    sums = normalize.startswith("sum")
    feature_map = {
        "llops": features.llops(2, M, squared=sums),
        "odd": odd_map,
        "slay": features.slay(),
        None: None,
    }[map_]
    constant, width = {}, D
    if feature_map is not None:
        x["params"], constant = feature_map.init(next(keys), D, map_heads or H)
        width = feature_map.dim(D)
    if sums and feature_map is None:
        x["q"], x["k"] = jnp.abs(x["q"]), jnp.abs(x["k"])
    rule = ops.RULES[rule] if isinstance(rule, str) else rule
    if rule.unit_keys:
        x["k"] /= jnp.linalg.norm(x["k"], axis=-1, keepdims=True)
    make_gate = {
        "log_decay": lambda *shape: -0.2 * jnp.abs(normal(*shape, dtype=jnp.float32)),
        "beta": lambda *shape: jax.nn.sigmoid(normal(*shape, dtype=jnp.float32)),
        "write": lambda *shape: normal(*shape, dtype=jnp.float32),
    }
    x["gates"] = {
        name: make_gate[name](B, *sources, H, *[width] * (name in rule.per_feature))
        for name in rule.gates
    }
    x["state"] = None
    if initial or op == "decode_step":
        z = jnp.abs(normal(B, H, width, dtype=jnp.float32)) if sums else None
        x["state"] = ops.State(normal(B, H, width, P, dtype=jnp.float32), z)
    # The normaliser's epsilon is large, so that outputs near zero do not amplify rounding.
    static = {"features": feature_map, "normalize": normalize, "epsilon": 0.1}
    if segments:
        starts = jnp.isin(jnp.arange(T), jnp.array([1, 15, 16, 40, 63, 80]))
        static["segment_ids"] = jnp.broadcast_to(jnp.cumsum(starts), (B, T))
    real = jnp.ones((B, *sources), bool)
    if mask:
        lengths = 1 + (jnp.arange(B) * 17 + S - 9) % S
        real = jnp.arange(S) < lengths[:, None] if sources else jnp.arange(B) % 3 > 0
        static["mask"] = real

    def call(implementation, x):
        static_of_op = static if op == "bidirectional" else static | {"rule": rule}
        if op != "bidirectional":
            static_of_op["gates"] = x["gates"]
        if op == "decode_step":
            static_of_op["state"] = x["state"]
        else:
            static_of_op |= {"initial_state": x["state"], "chunk_size": C}
        params = x["params"] | constant if "params" in x else None
        y, state = getattr(ops, op)(
            x["q"], x["k"], x["v"], params=params, implementation=implementation, **static_of_op
        )
        if mask and op == "causal":
            y = jnp.where(real[:, :, None, None], y, 0)
        return y, state

    return call, x


def with_gradients(call, implementation):
    """A function of x: (y, state) and the gradients of x; the output is weighted unevenly."""

    def loss(x):
        out = call(implementation, x)
        leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(out)]
        weights = [jnp.cos(1.7 * jnp.arange(leaf.size)).reshape(leaf.shape) for leaf in leaves]
        return sum(jnp.sum(w * leaf) for w, leaf in zip(weights, leaves)), out

    def run(x):
        (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(x)
        return out, gradients

    return run


def run(call, implementation, x):
    """(y, state) and the gradients of x, as float32 numpy arrays."""
    results = jax.jit(with_gradients(call, implementation))(x)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), results)


def distance(got, exact):
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)


FLOAT32 = {
    "blocks": {"B": 3, "H": 6},
    "grouped": {
        "normalize": "rms",
        "G": 2,
        "segments": True,
        "mask": True,
        "initial": True,
        "T": 50,
    },
    "sum": {"normalize": "sum", "segments": True, "initial": True},
    "mapped": {"normalize": "sum_plus_one", "mask": True, "B": 2, "map_": None},
    "shared_map": {"H": 4, "map_heads": 2, "T": 20},
    "map_with_constants": {"map_": "slay", "normalize": "sum", "T": 20},
    "odd_map": {"map_": "odd", "segments": True, "H": 3},
    "decay": {"rule": "decay", "segments": True, "initial": True},
    "decay_grouped": {"rule": "decay", "normalize": "rms", "mask": True, "G": 2, "H": 1, "T": 50},
    "decay_sum": {"rule": "decay", "normalize": "sum", "initial": True, "T": 50},
    "decay_sum_plus_one": {"rule": "decay", "normalize": "sum_plus_one", "segments": True, "T": 50},
    "gates_per_feature": {"rule": gated_write, "mask": True, "T": 50},
    "gla_sum": {"rule": "gla", "normalize": "sum", "mask": True, "G": 2, "H": 1, "T": 50},
    "delta": {"rule": "delta", "map_": None, "mask": True, "H": 1, "T": 20},
    "gated_delta": {"rule": "gated_delta", "map_": None, "segments": True, "H": 1, "T": 20},
    "kda": {"rule": "kda", "map_": None, "segments": True, "initial": True, "H": 1, "T": 50},
    "one_token": {"T": 1, "initial": True},
    "both": {
        "op": "bidirectional",
        "normalize": "sum",
        "mask": True,
        "initial": True,
        "G": 2,
        "H": 1,
        "T": 40,
        "S": 50,
    },
    "both_rms": {"op": "bidirectional", "normalize": "rms", "map_": "odd", "H": 1},
}


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_parity(name):
    call, x = make_call(**FLOAT32[name])
    with interpret():
        got = run(call, "pallas_tpu", x)
    assert_close(got, run(call, "reference", x))


@pytest.mark.slow
def test_packed_documents_read_both_ways():
    call, x = make_call(op="bidirectional", normalize="sum", segments=True, initial=True)
    with interpret():
        got = run(call, "pallas_tpu", x)
    assert_close(got, run(call, "reference", x))


@pytest.mark.parametrize(
    "settings",
    [
        {"normalize": "rms"},
        {"rule": "decay", "segments": True, "initial": True},
        {"op": "bidirectional", "normalize": "sum", "H": 1},
    ],
    ids=["additive", "decay", "bidirectional"],
)
def test_bfloat16_parity(settings):
    """Errors (of whole tensors) against float32 stay near the reference's own in bfloat16."""
    call, x = make_call(dtype=jnp.bfloat16, T=50, **settings)
    exact = run(call, "reference", jax.tree.map(lambda leaf: leaf.astype(jnp.float32), x))
    own = jax.tree.map(distance, run(call, "reference", x), exact)
    with interpret():
        errors = jax.tree.map(distance, run(call, "pallas_tpu", x), exact)
    ratios = jax.tree.map(lambda error, own: error / own, errors, own)
    assert max(jax.tree.leaves(ratios)) <= 1.5, ratios


@pytest.mark.parametrize(
    "settings",
    [
        {"B": 3, "H": 3},
        {"B": 20, "rule": "decay", "normalize": "sum", "mask": True, "G": 2, "H": 1},
        {"B": 1, "map_": "odd", "H": 3, "normalize": "rms"},
    ],
    ids=["additive", "decay_sum", "odd_map"],
)
def test_decode_step_parity(settings):
    call, x = make_call(op="decode_step", **settings)
    with interpret():
        got = jax.tree.map(np.asarray, call("pallas_tpu", x))
    assert_close(got, call("reference", x))


def test_decode_step_has_gradients():
    call, x = make_call(op="decode_step", mask=True)
    with interpret():
        got = run(call, "pallas_tpu", x)
    assert_close(got, run(call, "reference", x))


@pytest.mark.parametrize("op", ["causal", "bidirectional", "decode_step"])
def test_float16_is_refused(op):
    call, x = make_call(op=op, dtype=jnp.float16)
    with pytest.raises(NotImplementedError, match="q has dtype float16"):
        call("pallas_tpu", x)


@pytest.mark.parametrize("op", ["causal", "bidirectional", "decode_step"])
def test_what_does_not_fit_into_memory_is_refused(op, monkeypatch):
    blocks = block_sizes.TPU_FALLBACK._replace(vmem_bytes=2**14)
    monkeypatch.setattr(block_sizes, "TPU_FALLBACK", blocks)
    call, x = make_call(op=op)
    with pytest.raises(NotImplementedError, match="vector memory.*lower the number of features"):
        call("pallas_tpu", x)


@pytest.mark.parametrize("T", [1, 16, 100, 300, 1024, 1025, 5000])
def test_tokens_are_padded_to_whole_spans(T):
    for row in block_sizes.TPU.values():
        blocks = pallas_tpu.plan_chunks(row, T, 128)
        assert blocks.padded >= T
        assert blocks.padded % blocks.span == 0
        assert blocks.span % blocks.chunk == blocks.span % blocks.backward_chunk == 0
