"""Every implementation against the reference, and the reference against the quadratic form."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, normal

from lowrank_attn import ops
from lowrank_attn.features import llops, unit_length

B, T, H, D, P, M = 2, 37, 2, 6, 5, 24
MAP = llops(3, M)
# The implementations that run on every platform; Pallas kernels have tests of their own.
PORTABLE = [name for name in ops.IMPLEMENTATIONS if not name.startswith("pallas")]
FAST = [name for name in PORTABLE if name != "reference"]
# Rules whose values are weighted by scores and decays alone.
SUMS = [name for name, rule in ops.RULES.items() if rule.sums]
SEGMENTS = jnp.array([[3] * 5 + [1] * 20 + [2] * 12, [0] * 16 + [3] * 16 + [0] * 5])
MASK = jax.random.bernoulli(jax.random.key(5), 0.8, (B, T)).at[:, 0].set(True)

# Each case: normaliser, query heads per key head, packed, padded, initial state, chunk size.
CASES = {
    "plain": ("none", 1, False, False, False, 8),
    "one_chunk": ("none", 1, False, False, True, 64),
    "packed": ("none", 1, True, False, True, 8),
    "sum": ("sum", 1, False, False, True, 8),
    "sum_packed_padded_grouped": ("sum", 2, True, True, True, 8),
    "plus_one_padded": ("sum_plus_one", 1, False, True, False, 16),
    "rms_grouped": ("rms", 3, False, False, True, 5),
    "rms_packed_padded": ("rms", 1, True, True, False, 1),
    "rms_everything": ("rms", 2, True, True, True, 8),
}
# Every case of two rules; of the others, whose compilation takes longer, what has everything.
RULE_CASES = [
    (rule, case)
    for rule in ops.RULES
    for case in CASES
    if rule in ("additive", "decay")
    or case == "rms_everything"
    or (rule in SUMS and case == "sum_packed_padded_grouped")
]


def gates_of(rule: str):
    """Gates of a rule by name."""
    uniform = jax.random.uniform(jax.random.key(9), (B, T, H, M))
    gates = {"log_decay": -uniform, "beta": uniform}
    per_feature = ops.RULES[rule].per_feature
    return {n: gates[n] if n in per_feature else gates[n][..., 0] for n in ops.RULES[rule].gates}


def inputs(case: str, dtype=jnp.float32):
    """Arguments of one case: those to differentiate, and keywords."""
    normalize, group, packed, padded, started, chunk_size = CASES[case]
    with_z = normalize in ("sum", "sum_plus_one")
    state = None
    if started:
        z = jax.random.uniform(jax.random.key(8), (B, H, M)) + 1 if with_z else None
        state = ops.State(normal(7, B, H, M, P), z)
    trained = {
        "q": normal(0, B, T, group * H, D, dtype=dtype),
        "k": normal(1, B, T, H, D, dtype=dtype),
        "v": normal(2, B, T, H, P, dtype=dtype),
        "params": MAP.init(jax.random.key(3), D, H)[0],
    }
    if started:
        trained["initial_state"] = state
    fixed = {
        "features": MAP,
        "normalize": normalize,
        "mask": MASK if padded else None,
        "segment_ids": SEGMENTS if packed else None,
        "chunk_size": chunk_size,
    }
    return trained, fixed


def value_and_grads(op, trained, **fixed):
    """(y, state) and the gradients of a scalar that depends on all of both."""

    def scalar(trained):
        y, state = op(**trained, **fixed)
        seen = y if fixed.get("mask") is None else y * fixed["mask"][:, :, None, None]
        parts = [jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves((seen, state))]
        return sum(parts), (seen, state)

    (_, outputs), grads = jax.jit(jax.value_and_grad(scalar, has_aux=True))(trained)
    return outputs, grads


def quadratic(case: str, gates=None, causal: bool = True):
    """(y, S) by a loop over all pairs in float64."""
    trained, fixed = inputs(case)
    normalize, group, *_ = CASES[case]
    phi_q = np.asarray(MAP(trained["params"], trained["q"], is_query=True), np.float64)
    phi_k = np.asarray(MAP(trained["params"], trained["k"], is_query=False), np.float64)
    v = np.asarray(trained["v"], np.float64)
    state = trained.get("initial_state")
    decay = np.zeros((B, T, H))
    if gates:
        decay = np.asarray(gates["log_decay"], np.float64)
    decay = np.broadcast_to(decay.reshape(B, T, H, -1), (B, T, H, M))
    mask = np.ones((B, T), bool) if fixed["mask"] is None else np.asarray(fixed["mask"])
    ids = np.zeros((B, T)) if fixed["segment_ids"] is None else np.asarray(fixed["segment_ids"])
    run = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
    y = np.zeros((B, T, group * H, P))
    S = np.zeros((B, H, M, P))
    for b in range(B):
        for h in range(H):
            total = np.cumsum(np.where(mask[b][:, None], decay[b, :, h], 0), axis=0)  # [T, M]
            S0 = np.zeros((M, P)) if state is None else np.asarray(state.S[b, h], np.float64)
            z0 = 0 if state is None or state.z is None else np.asarray(state.z[b, h], np.float64)
            for t in range(T):
                seen = [s for s in range(t + 1 if causal else T)
                        if mask[b, s] and run[b, s] == run[b, t]]  # fmt: skip
                for head in range(h * group, (h + 1) * group):
                    q = phi_q[b, t, head]
                    weight = {s: q @ (phi_k[b, s, h] * np.exp(total[t] - total[s] if causal else 0))
                              for s in seen}  # fmt: skip
                    n = sum((w * v[b, s, h] for s, w in weight.items()), np.zeros(P))
                    d = sum(weight.values())
                    if run[b, t] == 0:
                        n = n + (q * np.exp(total[t])) @ S0
                        d = d + (q * np.exp(total[t])) @ (z0 if np.ndim(z0) else np.zeros(M))
                    d = d + (normalize == "sum_plus_one")
                    divisor = {
                        "none": 1.0,
                        "rms": np.sqrt(np.mean(n**2) + 1e-6),
                        "sum": d + np.copysign(1e-6, d),
                        "sum_plus_one": d + np.copysign(1e-6, d),
                    }[normalize]
                    y[b, t, head] = n / divisor
            end = run[b, -1]
            for s in range(T):
                if mask[b, s] and run[b, s] == end:
                    left = np.exp(total[-1] - total[s]) * phi_k[b, s, h]
                    S[b, h] += np.outer(left, v[b, s, h])
            if end == 0:
                S[b, h] += np.exp(total[-1])[:, None] * S0
    return y if fixed["mask"] is None else y * mask[:, :, None, None], S


@pytest.mark.parametrize("rule", SUMS)
@pytest.mark.parametrize("case", ["plain", "sum_packed_padded_grouped", "plus_one_padded"])
def test_reference_is_the_quadratic_form(case, rule):
    trained, fixed = inputs(case)
    (y, state), _ = value_and_grads(
        functools.partial(ops.causal, implementation="reference"),
        trained, rule=rule, gates=gates_of(rule), **fixed,
    )  # fmt: skip
    assert_close((y, state.S), quadratic(case, gates_of(rule)))


@pytest.mark.parametrize("case", ["packed", "sum", "sum_packed_padded_grouped"])
def test_bidirectional_reference_is_the_quadratic_form(case):
    trained, fixed = inputs(case)
    (y, state), _ = value_and_grads(
        functools.partial(ops.bidirectional, implementation="reference"), trained, **fixed
    )
    assert_close((y, state.S), quadratic(case, causal=False))


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(("rule", "case"), RULE_CASES)
def test_causal_matches_the_reference(rule, case, implementation):
    trained, fixed = inputs(case)
    trained["gates"] = gates_of(rule)
    if ops.RULES[rule].unit_keys:
        fixed["features"] = unit_length(MAP)
    found, expected = (
        value_and_grads(
            functools.partial(ops.causal, implementation=i), trained, rule=rule, **fixed
        )
        for i in (implementation, "reference")
    )
    assert_close(found, expected)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("case", CASES)
def test_bidirectional_matches_the_reference(case, implementation):
    trained, fixed = inputs(case)
    found, expected = (
        value_and_grads(functools.partial(ops.bidirectional, implementation=i), trained, **fixed)
        for i in (implementation, "reference")
    )
    assert_close(found, expected)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("op", ["causal", "bidirectional"])
@pytest.mark.parametrize("case", ["plain", "sum", "rms_packed_padded"])
def test_bfloat16_error_is_that_of_the_reference(case, op, implementation):
    """At most 1.5 times the reference's own rounding error, both against float32 inputs."""
    trained, fixed = inputs(case)
    low = jax.tree.map(lambda x: x, trained)
    for name in ("q", "k", "v"):
        low[name] = trained[name].astype(jnp.bfloat16)
    exact, _ = value_and_grads(
        functools.partial(getattr(ops, op), implementation="reference"), trained, **fixed
    )

    def error(name):
        found, _ = value_and_grads(
            functools.partial(getattr(ops, op), implementation=name), low, **fixed
        )
        assert found[0].dtype == jnp.bfloat16 and found[1].S.dtype == jnp.float32
        return [
            np.sqrt(np.mean(np.square(np.asarray(f, np.float64) - np.asarray(e, np.float64))))
            for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(exact))
        ]

    for found, allowed in zip(error(implementation), error("reference")):
        assert found <= 1.5 * allowed


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("normalize", ops.NORMALIZERS)
def test_whole_is_parts_is_single_steps(normalize, implementation):
    trained, fixed = inputs("plain")
    q, k, v, params = (trained[n] for n in ("q", "k", "v", "params"))
    call = {
        "features": MAP,
        "params": params,
        "normalize": normalize,
        "implementation": implementation,
    }
    gates = gates_of("decay")["log_decay"]
    whole = ops.causal(q, k, v, rule="decay", gates={"log_decay": gates}, chunk_size=8, **call)
    outputs, state = [], None
    for start, stop in ((0, 1), (1, 12), (12, 13), (13, T)):
        part = slice(start, stop)
        y, state = ops.causal(
            q[:, part], k[:, part], v[:, part], rule="decay",
            gates={"log_decay": gates[:, part]}, chunk_size=8, initial_state=state, **call,
        )  # fmt: skip
        outputs.append(y)
    assert_close((jnp.concatenate(outputs, 1), state), whole)

    step = jax.jit(functools.partial(ops.decode_step, rule="decay", **call))
    z = jnp.zeros((B, H, M)) if whole[1].z is not None else None
    outputs, state = [], ops.State(jnp.zeros((B, H, M, P)), z)
    for t in range(T):
        y, state = step(q[:, t], k[:, t], v[:, t], state, gates={"log_decay": gates[:, t]})
        outputs.append(y)
    assert_close((jnp.stack(outputs, 1), state), whole)


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_reaches_back_or_across_documents(packed, implementation):
    """Influence of every input token on one output, by gradient: exactly zero where hidden."""
    trained, fixed = inputs("packed" if packed else "sum")
    trained.pop("initial_state")
    at = 20

    def output(k, v):
        y, _ = ops.causal(
            trained["q"], k, v, params=trained["params"], implementation=implementation, **fixed
        )
        return jnp.sum(y[:, at] ** 2)

    grads = jax.grad(output, (0, 1))(trained["k"], trained["v"])
    ids = SEGMENTS if packed else jnp.zeros((B, T), int)
    visible = (jnp.arange(T)[None] <= at) & (ids == ids[:, at : at + 1])
    for grad in grads:
        influence = jnp.max(jnp.abs(grad), axis=(2, 3))
        assert jnp.all(influence[~visible] == 0)
        assert jnp.all(influence[visible] > 0)


@pytest.mark.parametrize("op", ["causal", "bidirectional"])
@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("normalize", ["none", "sum"])
def test_more_padding_changes_nothing(normalize, implementation, op):
    """Whatever stands in padded keys and values, the real outputs and the state stay the same."""
    trained, fixed = inputs("plain")
    q, k, v, params = (trained[n] for n in ("q", "k", "v", "params"))
    call = functools.partial(
        getattr(ops, op), features=MAP, params=params, normalize=normalize,
        implementation=implementation, chunk_size=8,
    )  # fmt: skip
    y, state = call(q, k, v)
    more = [jnp.concatenate([x, 50 * normal(11, *x.shape)], 1) for x in (q, k, v)]
    mask = jnp.arange(2 * T)[None] < jnp.full((B, 1), T)
    padded_y, padded_state = call(*more, mask=mask)
    assert_close((padded_y[:, :T], padded_state), (y, state))


def test_packed_equals_separate_documents():
    trained, fixed = inputs("packed")
    q, k, v, params = (trained[n][:1] if n != "params" else trained[n]
                       for n in ("q", "k", "v", "params"))  # fmt: skip
    for op in (ops.causal, ops.bidirectional):
        call = functools.partial(op, features=MAP, params=params, normalize="sum", chunk_size=8)
        y, _ = call(q, k, v, segment_ids=SEGMENTS[:1])
        apart = [call(q[:, part], k[:, part], v[:, part])[0]
                 for part in (slice(0, 5), slice(5, 25), slice(25, T))]  # fmt: skip
        assert_close(y, jnp.concatenate(apart, 1))


def test_cross_attention_reads_keys_of_another_length():
    q, k, v = normal(0, B, 4, H, M), normal(1, B, T, H, M), normal(2, B, T, H, P)
    found, expected = (
        ops.bidirectional(q, k, v, normalize="none", mask=MASK, implementation=i)
        for i in ("xla", "reference")
    )
    assert_close(found, expected)


@pytest.mark.parametrize("length", [1, 2, 7, 127, 1025, 2311])
def test_any_length(length):
    """Also primes, and lengths beyond the span of one saved state."""
    q, k, v, w = (normal(i, 1, length, 1, 8) for i in range(4))

    def loss(q, implementation):
        y, state = ops.causal(q, k, v, chunk_size=64, implementation=implementation)
        return jnp.sum(w * y), (y, state)

    grad = jax.grad(loss, has_aux=True)
    assert_close(grad(q, "xla"), grad(q, "reference"))


def test_jit_vmap_remat_and_forward_mode():
    q, k, v = (normal(i, 3, 1, 20, H, 4) for i in range(3))

    def call(q, k, v):
        return ops.causal(q, k, v, chunk_size=8)[0]

    expected = jnp.stack([call(*x) for x in zip(q, k, v)])
    assert_close(jax.jit(jax.vmap(call))(q, k, v), expected)

    def loss(q):
        return jnp.sum(call(q, k[0], v[0]) ** 2)

    assert_close(jax.grad(jax.checkpoint(loss))(q[0]), jax.grad(loss)(q[0]))
    direction = normal(5, *q[0].shape)
    _, slope = jax.jvp(loss, (q[0],), (direction,))
    assert_close(slope, jnp.sum(jax.grad(loss)(q[0]) * direction))


def test_training_keeps_no_states_inside_a_span():
    """Residuals: q, k, v, parameters and one state per 1024 tokens, nothing per chunk."""
    length, chunk = 4096, 16
    trained = {
        "q": normal(0, 1, length, 1, 8), "k": normal(1, 1, length, 1, 8),
        "v": normal(2, 1, length, 1, 16),
    }  # fmt: skip
    features = llops(2, 128)
    params = features.init(jax.random.key(0), 8, 1)[0]

    def outputs(trained, params):
        return ops.causal(
            **trained, features=features, params=params, normalize="rms", chunk_size=chunk
        )[0]

    _, pull = jax.vjp(outputs, trained, params)
    kept = sum(x.size for x in jax.tree.leaves(pull) if hasattr(x, "size"))
    inputs_size = sum(x.size for x in jax.tree.leaves((trained, params)))
    states = (length // 1024 + 1) * 128 * 16
    bookkeeping = 8 * length  # positions, masks
    assert kept <= inputs_size + states + bookkeeping
    assert kept < (length // chunk) * 128 * 16  # what storing every chunk's state would take


def test_first_token_reads_its_own_value():
    """With a sum normaliser, the first output is the first value."""
    features = llops(2, 32, squared=True)
    params = features.init(jax.random.key(0), D, H)[0]
    q, k, v = normal(0, B, 3, H, D), normal(1, B, 3, H, D), normal(2, B, 3, H, P)
    for implementation in PORTABLE:
        y, _ = ops.causal(
            q, k, v, features=features, params=params, normalize="sum", epsilon=1e-12,
            implementation=implementation,
        )  # fmt: skip
        assert_close(y[:, 0], v[:, 0])


def test_a_query_that_sees_no_key_gives_zero():
    q, k, v = normal(0, 1, 4, 1, 8), normal(1, 1, 4, 1, 8), normal(2, 1, 4, 1, 3)
    mask = jnp.array([[False, False, True, True]])
    for normalize in ops.NORMALIZERS:
        call = functools.partial(ops.causal, normalize=normalize, mask=mask)
        assert jnp.all(call(q, k, v)[0][:, :2] == 0)
        grads = jax.grad(lambda *x, call=call: jnp.sum(call(*x)[0] ** 2), (0, 1, 2))(q, k, v)
        assert all(jnp.all(jnp.isfinite(g)) for g in grads)


def test_long_sums_do_not_stall_in_bfloat16():
    """4096 bfloat16 keys of 1: a bfloat16 normaliser would stop growing at 256."""
    ones = jnp.ones((1, 4096, 1, 1), jnp.bfloat16)
    for op in (ops.causal, ops.bidirectional):
        _, state = op(ones, ones, ones, normalize="sum")
        assert state.z[0, 0, 0] == 4096 and state.S[0, 0, 0, 0] == 4096


def test_positions_reach_the_map_in_every_chunk():
    def features(params, x, *, is_query, positions):
        angle = jnp.broadcast_to(positions, x.shape[:2])[:, :, None, None].astype(jnp.float32)
        return jnp.concatenate([x * jnp.cos(angle), x * jnp.sin(angle)], -1)

    q, k, v = (normal(i, B, T, H, 4) for i in range(3))
    for positions in (None, jnp.arange(T) + 3, jnp.stack([jnp.arange(T), jnp.arange(T)[::-1]])):
        for op in (ops.causal, ops.bidirectional):
            found, expected = (
                op(q, k, v, features=features, positions=positions, chunk_size=8, implementation=i)
                for i in ("xla", "reference")
            )
            assert_close(found, expected)


def test_a_sequence_of_names_falls_back_aloud(monkeypatch):
    class Picky:
        @staticmethod
        def causal(args, method):
            raise NotImplementedError("it wants another shape")

    monkeypatch.setitem(ops.IMPLEMENTATIONS, "picky", Picky)
    q = normal(0, 1, 3, 1, 4)
    with pytest.warns(UserWarning, match="picky cannot do this call .it wants another shape"):
        y, _ = ops.causal(q, q, q, implementation=("picky", "xla"))
    assert_close(y, ops.causal(q, q, q)[0])
    with pytest.raises(NotImplementedError, match="it wants another shape"):
        ops.causal(q, q, q, implementation="picky")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.causal(q, q, q)


GOOD = {"q": (B, T, 4, D), "k": (B, T, 2, D), "v": (B, T, 2, P)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (B, T, D)}, "q has shape .*expected four axes"),
        ({"q": (B, T, 3, D)}, "q has 3 heads, expected a multiple of the 2 heads"),
        ({"k": (B, T, 2, D + 1)}, "k has last axis 7, expected .*6 as in q"),
        ({"k": (B, T - 1, 2, D), "v": (B, T - 1, 2, P)}, "k has 36 tokens, expected 37"),
        ({"v": (B, T, 1, P)}, r"v begins with \(2, 37, 1\), expected \(2, 37, 2\)"),
        ({"k": (1, T, 2, D), "v": (1, T, 2, P)}, "k has batch size 1, expected 2"),
        ({"q": (B, 0, 4, D), "k": (B, 0, 2, D), "v": (B, 0, 2, P)}, "no axis of length 0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    shapes = GOOD | change
    arrays = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        ops.causal(**arrays)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"v": jnp.zeros((B, T, 2, P), int)}, "v has dtype int32, expected a floating dtype"),
        ({"normalize": "max"}, "normalize='max' is unknown; known: none, sum"),
        ({"rule": "momentum"}, "rule='momentum' is unknown; known: additive, decay"),
        ({"rule": "delta", "normalize": "sum"}, "normalize='sum', but this rule corrects"),
        ({"rule": "decay"}, r"gates has none, expected \['log_decay'\]"),
        ({"gates": {"beta": jnp.zeros((B, T, 2))}}, r"gates has \['beta'\], expected none"),
        ({"rule": "decay", "gates": {"log_decay": jnp.zeros((B, T))}}, "token and key/value head"),
        (
            {"rule": "gla", "gates": {"log_decay": jnp.zeros((B, T, 2))}},
            r"expected .* 6\).*feature",
        ),
        ({"mask": jnp.ones((B, 1, T, T), bool)}, "mask has shape .*expected a padding mask"),
        ({"mask": jnp.ones((B, T))}, "mask has .*dtype float32, expected .*bool"),
        ({"segment_ids": jnp.zeros((B, T))}, "segment_ids has .*expected integers"),
        ({"positions": jnp.zeros((3,), int)}, r"positions has shape \(3,\), expected \(37,\)"),
        ({"chunk_size": 0}, "chunk_size=0, expected at least 1"),
        ({"implementation": "triton"}, "implementation='triton' is unknown; known: "),
        ({"initial_state": ops.State(jnp.zeros((B, 2, D, P + 1)), None)}, "initial_state.S has"),
        ({"initial_state": ops.State(jnp.zeros((B, 2, D, P), jnp.bfloat16), None)}, "float32"),
        ({"initial_state": ops.State(jnp.zeros((B, 2, D, P)), jnp.zeros((B, 2, D)))}, "z is an"),
        ({"normalize": "sum", "initial_state": ops.State(jnp.zeros((B, 2, D, P)), None)}, "z is N"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(keywords, message):
    arrays = {name: jnp.zeros(shape) for name, shape in GOOD.items()}
    with pytest.raises(ValueError, match=message):
        ops.causal(**(arrays | keywords))
