"""Bidirectional attention on Hopper: interpreted on a CPU, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import needs_gpu_interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_pallas_gpu import assert_close, inputs, needs_gpu, needs_kernels, with_gradients

from lowrank_attn import ops
from lowrank_attn.features.llops import llops
from lowrank_attn.ops import api, pallas_gpu
from lowrank_attn.ops.pallas_gpu_products import read, total

# Products and the outputs are rounded to bfloat16, gradients a few times on their way.
FORWARD_TOLERANCE, GRADIENT_TOLERANCE = 5e-3, 1e-2


def primals_of(seed, *, S=None, **options):
    """As `inputs`, with S keys."""
    (q, k, v, params, state, _), features = inputs(seed, **options)
    return (q, k[:, :S], v[:, :S], params, state), features


def kernel(features, normalize, mask, interpret, q, k, v, params, state):
    """`pallas_gpu.bidirectional`, interpreted if asked for."""
    args, method = api.prepare(
        q, k, v, features, params, "additive", None, normalize, 1e-6, mask, None, None, state, 128
    )
    return pallas_gpu.bidirectional(args, method, interpret)


def reference(features, normalize, mask, q, k, v, params, state):
    """The oracle in float32."""
    return ops.bidirectional(
        *(x.astype(jnp.float32) for x in (q, k, v)), features=features, params=params,
        normalize=normalize, mask=mask, initial_state=state, implementation="reference",
    )  # fmt: skip


@needs_gpu_interpreter
@pytest.mark.parametrize("B,T,H,G,K,V", [(1, 104, 1, 2, 64, 64), (1, 72, 2, 1, 256, 192)])
def test_interpreted_products(B, T, H, G, K, V):
    """The last tile is ragged; S rounds to bfloat16 on its way in and y on its way out."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (B, T, heads, size), jnp.bfloat16)
        for key, heads, size in zip(keys, (H * G, H, H), (K, K, V), strict=False)
    )
    S = jax.random.normal(keys[3], (B, H, K, V))
    interpret = plgpu.InterpretGPUParams()
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    want = jnp.einsum("bthk,bthv->bhkv", wide_k, wide_v, precision="highest")
    assert_close(total(k, v, interpret), want, 2e-6)
    want = jnp.einsum("bthk,bhkv->bthv", wide_q, jnp.repeat(S, G, 1), precision="highest")
    assert_close(read(q, S, interpret), want, 4e-3)


@needs_gpu_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    "normalize,options,masked",
    [
        ("rms", {"T": 24, "S": 45, "p": 1}, True),
        ("sum", {"T": 24, "S": 61}, False),
        ("sum_plus_one", {"T": 24, "G": 2, "mapped": False}, True),
    ],
)
def test_interpreted_attention_and_gradients(normalize, options, masked):
    primals, features = primals_of(0, normalize=normalize, **options)
    S = primals[1].shape[1]
    mask = jnp.arange(S)[None] % 3 > 0 if masked else None
    interpret = plgpu.InterpretGPUParams()
    got = with_gradients(functools.partial(kernel, features, normalize, mask, interpret), *primals)
    want = with_gradients(functools.partial(reference, features, normalize, mask), *primals)
    assert_close(got[0], want[0], FORWARD_TOLERANCE)
    assert_close(got[1], want[1], GRADIENT_TOLERANCE)


@needs_gpu_interpreter
@pytest.mark.slow
def test_masked_keys_may_be_anything():
    """Infinite keys and values at padding reach neither the outputs nor the state."""
    (q, k, v, params, state), features = primals_of(0, T=24, normalize="sum")
    mask = jnp.arange(24)[None] < 15
    run = functools.partial(kernel, features, "sum", mask, plgpu.InterpretGPUParams())
    hidden = ~mask[:, :, None, None]
    changed = run(q, jnp.where(hidden, jnp.inf, k), jnp.where(hidden, -jnp.inf, v), params, state)
    for a, b in zip(jax.tree.leaves(changed), jax.tree.leaves(run(q, k, v, params, state))):
        np.testing.assert_array_equal(a, b)


@needs_kernels
@pytest.mark.parametrize("shape", [(32, 2000, 2, 32, 256, 32), (1, 1, 1, 128, 100, 128)])
def test_lowers_for_cuda(shape):
    """Features, two products; back: features, four products, two kernels a side of the map."""
    B, T, H, D, M, P = shape
    features = llops(4, M)
    params = jax.eval_shape(lambda: features.init(jax.random.key(0), D, H)[0])
    q, v = (jax.ShapeDtypeStruct((B, T, H, n), jnp.bfloat16) for n in (D, P))

    def run(q, k, v, params):
        def f(*a):
            return ops.bidirectional(
                *a[:3], features=features, params=a[3], normalize="sum", implementation="pallas_gpu"
            )[0]

        y, vjp = jax.vjp(f, q, k, v, params)
        return vjp(y)

    text = jax.jit(run).trace(q, q, v, params).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") >= 11


GPU_SHAPES = [
    ("rms", {"B": 4, "T": 2000, "H": 2, "D": 32, "M": 256, "P": 32, "p": 4}, True),
    ("sum", {"B": 1, "T": 1000, "H": 2, "G": 2, "D": 128, "M": 256, "P": 128}, True),
    ("none", {"B": 2, "T": 513, "S": 77, "H": 3, "D": 96, "M": 100, "P": 96}, False),
    ("sum_plus_one", {"B": 1, "T": 2100, "H": 2, "M": 273, "P": 64, "mapped": False}, True),
]


@needs_gpu
@pytest.mark.parametrize("normalize,options,masked", GPU_SHAPES)
def test_attention_and_gradients_on_gpu(normalize, options, masked):
    """16 seeds, each run twice with equal bits."""
    options = dict(options)
    S = options.pop("S", None)
    mask = None
    if masked:
        mask = jnp.arange(options["T"])[None] % 5 > 0
        mask = jnp.broadcast_to(mask, (options["B"], options["T"]))
    _, features = primals_of(0, normalize=normalize, **options)
    run = functools.partial(kernel, features, normalize, mask, None)
    run = jax.jit(functools.partial(with_gradients, run))
    oracle = functools.partial(reference, features, normalize, mask)
    oracle = jax.jit(functools.partial(with_gradients, oracle))
    for seed in range(16):
        primals, _ = primals_of(seed, S=S, normalize=normalize, **options)
        got, again = run(*primals), run(*primals)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)
        want = oracle(*primals)
        assert_close(got[0], want[0], FORWARD_TOLERANCE)
        assert_close(got[1], want[1], GRADIENT_TOLERANCE)
