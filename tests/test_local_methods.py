"""Methods that look at neighbours apart, against loops in float64: convolutions and exact blocks.

Tolerances: 1e-6 for sums of at most 5 terms; 2e-5 (see conftest) for attention.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, normal

from lowrank_attn.features.polysketch import normalized_rows, random_sketch
from lowrank_attn.layers.depthwise import depthwise
from lowrank_attn.layers.flatten import flatten
from lowrank_attn.layers.polaformer import polaformer
from lowrank_attn.layers.polysketch_mixed import polysketch_mixed

B, T, H, G, D, P = 2, 11, 2, 2, 4, 4
SEGMENTS = np.array([[0] * 4 + [1] * 7, [0, 0, 1, 1, 1, 0, 0, 0, 0, 2, 2]])
MASK = np.array([[True] * 9 + [False] * 2, [False] + [True] * 10])
both_forms = pytest.mark.parametrize("causal", [False, True])


def documents(b):
    return np.cumsum(np.diff(SEGMENTS[b], prepend=SEGMENTS[b, 0]) != 0)


def sees(b, t, s, causal):
    return MASK[b, s] and documents(b)[t] == documents(b)[s] and (s <= t or not causal)


@both_forms
def test_convolution_stays_in_its_document(causal):
    v, conv, bias = normal(0, B, T, H, P), normal(1, H, P, 1, 5), normal(2, H, P)
    y = depthwise(
        {"conv": conv, "conv_bias": bias}, v, num_queries=T, causal=causal, mask=jnp.asarray(MASK),
        segment_ids=jnp.asarray(SEGMENTS), grid_width=None,
    )  # fmt: skip
    v, conv, bias = (np.asarray(x, np.float64) for x in (v, conv, bias))
    expected = np.broadcast_to(bias, y.shape).copy()
    for b, t, i in np.ndindex(B, T, 5):
        s = t + i - (4 if causal else 2)
        if 0 <= s < T and sees(b, t, s, causal):
            expected[b, t] += conv[:, :, 0, i] * v[b, s]
    assert_close(y, expected, 1e-6)


@pytest.mark.oracle("polysketch_mixed", source="loop in float64")
@both_forms
def test_exact_blocks_and_sketched_rest(causal):
    q, k, v = normal(0, B, T, H * G, D), normal(1, B, T, H, D), normal(2, B, T, H, P)
    method = polysketch_mixed(sketch_size=3, block_size=4)
    trainable, constant = method.init(jax.random.key(0), D, H)
    params = {n: x + 0.1 * normal(3, *x.shape) for n, x in trainable.items()} | constant
    hide = {"mask": jnp.asarray(MASK), "segment_ids": jnp.asarray(SEGMENTS)}
    y = jax.jit(lambda q, k, v: method.apply(params, q, k, v, causal=causal, **hide))(q, k, v)

    heads = [{n: x[h] for n, x in params.items()} for h in range(H)]

    def mapped(function, x, heads):
        rows = [function(p, x[:, :, h].reshape(-1, D)).reshape(B, T, -1)
                for h, p in enumerate(heads)]  # fmt: skip
        return np.stack([np.asarray(row, np.float64) for row in rows], axis=2)

    repeated = [p for p in heads for _ in range(G)]
    q_hat, q_sketch = (mapped(f, q, repeated) for f in (normalized_rows, random_sketch))
    k_hat, k_sketch = (mapped(f, k, heads) for f in (normalized_rows, random_sketch))
    expected = np.zeros((B, T, H * G, P))
    for b, t, h in np.ndindex(B, T, H * G):
        total = 1 + 1e-6
        for s in range(T):
            if sees(b, t, s, causal):
                exact = (q_hat[b, t, h] @ k_hat[b, s, h // G]) ** 4
                sketched = (q_sketch[b, t, h] @ k_sketch[b, s, h // G]) ** 2
                score = exact if t // 4 == s // 4 else sketched
                total += score
                expected[b, t, h] += score * np.asarray(v[b, s, h // G], np.float64)
        expected[b, t, h] /= total
    assert_close(y, expected)


@pytest.mark.parametrize("make", [flatten, polaformer])
def test_groups_of_queries_share_values_and_their_convolution(make):
    """Two query heads of a group are the two heads of a call with repeated keys and values."""
    q, k, v = normal(0, B, T, H * G, D), normal(1, B, T, H, D), normal(2, B, T, H, P)
    method = make()
    params = method.init(jax.random.key(0), D, H)[0]
    run = jax.jit(lambda params, q, k, v: method.apply(params, q, k, v, causal=True))
    y = run(params, q, k, v)
    repeated = {n: jnp.repeat(x, G, axis=0) for n, x in params.items()}
    assert_close(y, run(repeated, q, *(jnp.repeat(x, G, axis=2) for x in (k, v))))


@pytest.mark.parametrize("make", [flatten, polaformer])
def test_what_a_convolution_cannot_do_is_refused(make):
    q, k, v = normal(0, B, T, H, D), normal(1, B, T, H, D), normal(2, B, T, H, P)

    def call(v=v, q=q, k=k, grid_width=None, **options):
        method = make(grid_width=grid_width)
        options = {"causal": False} | options

        def attend():
            params = method.init(jax.random.key(0), D, H)[0]
            return method.apply(params, q, k, v, **options)

        jax.eval_shape(attend)

    with pytest.raises(ValueError, match="v has head size 2, expected 4 as in q and k"):
        call(v=v[..., :2])
    with pytest.raises(ValueError, match="v has 11 tokens, expected 5 as in q"):
        call(q=q[:, :5])
    with pytest.raises(ValueError, match="grid_width=11 with causal=True, no segment_ids"):
        call(grid_width=11, causal=True)
    with pytest.raises(ValueError, match="grid_width=11 with causal=False, segment_ids"):
        call(grid_width=11, segment_ids=jnp.asarray(SEGMENTS))
    with pytest.raises(ValueError, match="grid_width=3 .* and 11 tokens: expected a whole image"):
        call(grid_width=3)


def test_blocks_need_the_same_tokens_and_halves_an_even_size():
    q, k = normal(0, B, T, H, D), normal(1, B, T, H, D)
    method = polysketch_mixed()
    params = method.init(jax.random.key(0), D, H)
    with pytest.raises(ValueError, match="q has 11 tokens and k has 5, expected the same tokens"):
        method.apply(params[0] | params[1], q, k[:, :5], k[:, :5], causal=False)
    with pytest.raises(ValueError, match="v has head size 3, expected an even one"):
        polaformer().apply({}, q, k, k[..., :3], causal=False)
