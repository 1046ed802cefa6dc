"""The Hopper kernels: interpreted on a CPU, lowered for CUDA, and on a GPU where there is one."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn import ops
from lowrank_attn.features.llops import llops
from lowrank_attn.ops import api, pallas_gpu
from lowrank_attn.ops.pallas_gpu_scan import Denominator, scan

HAS_KERNELS = hasattr(plgpu, "InterpretGPUParams")
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="Mosaic GPU kernels need jax >= 0.11")
needs_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not HAS_KERNELS, reason="needs a Hopper GPU and jax >= 0.11"
)


def relative_error(a, b):
    """Frobenius norm of the difference over that of b (of 1 if b is 0)."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)


def assert_close(got, want, tolerance):
    """Compare two trees leaf by leaf."""
    got, want = jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)
    for (path, a), b in zip(got, want, strict=True):
        error = relative_error(a, b)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def inputs(seed, *, B=1, T=100, H=1, G=1, D=32, M=64, P=32, p=2, normalize="none", mapped=True):
    """q, k, v, the parameters and the state of one call, and the map (None if not mapped)."""
    keys = jax.random.split(jax.random.key(seed), 8)
    features = llops(p, M, squared=normalize.startswith("sum")) if mapped else None
    size = D if mapped else M
    shapes = ((B, T, H * G, size), (B, T, H, size), (B, T, H, P))
    q, k, v = (jax.random.normal(x, s, jnp.bfloat16) for x, s in zip(keys, shapes, strict=False))
    if not mapped and normalize.startswith("sum"):
        q, k = jnp.abs(q), jnp.abs(k)
    params = {}
    if mapped:
        params = dict(features.init(keys[3], D, H)[0])
        params["b"] += 0.1 * jax.random.normal(keys[4], params["b"].shape)
        params["gain"] += 0.1 * jax.random.normal(keys[5], params["gain"].shape)
    z = jnp.abs(jax.random.normal(keys[7], (B, H, M))) if normalize.startswith("sum") else None
    state = ops.State(jax.random.normal(keys[6], (B, H, M, P)), z)
    return (q, k, v, params, state), features


def kernel(features, normalize, mask, interpret, q, k, v, params, state):
    """`pallas_gpu.causal`, interpreted if asked for."""
    args, method = api._prepare(
        q, k, v, features, params, "additive", None, normalize, 1e-6, mask, None, None, state, 128
    )
    return pallas_gpu.causal(args, method, interpret)


def reference(features, normalize, mask, q, k, v, params, state):
    """The oracle in float32."""
    return ops.causal(
        *(x.astype(jnp.float32) for x in (q, k, v)), features=features, params=params,
        normalize=normalize, mask=mask, initial_state=state, implementation="reference",
    )  # fmt: skip


def with_gradients(f, *primals):
    """Outputs of f, and the gradients for its arguments for random gradients of the outputs."""
    out, vjp = jax.vjp(f, *primals)
    leaves, tree = jax.tree.flatten(out)
    keys = jax.random.split(jax.random.key(99), len(leaves))
    leaves = [
        jax.random.normal(k, x.shape).astype(x.dtype) for k, x in zip(keys, leaves, strict=True)
    ]
    return out, vjp(tree.unflatten(leaves))


def scan_inputs(seed, *, B=1, T=100, H=1, Hk=1, K=64, V=64, denominator=None):
    """Arguments of `scan`; positive features with a denominator."""
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = ((B, T, H, K), (B, T, Hk, K), (B, T, Hk, V))
    q, k, v = (jax.random.normal(x, s, jnp.bfloat16) for x, s in zip(keys, shapes, strict=False))
    S = jax.random.normal(keys[3], (B, H, K, V))
    if denominator is None:
        return q, k, v, S, None
    return jnp.abs(q), jnp.abs(k), v, S, jnp.abs(jax.random.normal(keys[4], (B, H, K)))


def scan_reference(q, k, v, S, z, denominator, reverse):
    """The quadratic form of `scan` in float32."""
    H = max(x.shape[2] for x in (q, k, v))
    q, k, v = (jnp.repeat(x.astype(jnp.float32), H // x.shape[2], axis=2) for x in (q, k, v))
    with jax.default_matmul_precision("float32"):
        scores = jnp.einsum("bthk,bshk->bhts", q, k)
        scores = jnp.triu(scores) if reverse else jnp.tril(scores)
        y = jnp.einsum("bhts,bshv->bthv", scores, v) + jnp.einsum("bthk,bhkv->bthv", q, S)
        S = S + jnp.einsum("bthk,bthv->bhkv", k, v)
        if denominator is None:
            return y, S, None, None
        d = jnp.sum(scores, axis=-1).swapaxes(1, 2) + jnp.einsum("bthk,bhk->bth", q, z)
        d = d + denominator.offset
        return y / (d + denominator.epsilon)[..., None], S, z + jnp.sum(k, axis=1), d


@needs_kernels
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("denominator", [None, Denominator(1.0, 1e-6)])
def test_interpreted_scan_matches_quadratic_form(reverse, denominator):
    args = scan_inputs(0, H=2, denominator=denominator)
    got = scan(
        *args, denominator=denominator, reverse=reverse, interpret=plgpu.InterpretGPUParams()
    )
    assert_close(got, scan_reference(*args, denominator, reverse), 4e-3)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    "normalize,options",
    [
        ("none", {"T": 101}),
        ("rms", {"p": 1, "G": 2, "mask": True}),
        ("sum", {"D": 64, "P": 64}),
        ("sum_plus_one", {"mapped": False, "G": 2, "mask": True}),
    ],
)
def test_interpreted_attention_and_gradients(normalize, options):
    options = dict(options)
    mask = jnp.arange(options.get("T", 100))[None] % 3 > 0 if options.pop("mask", False) else None
    primals, features = inputs(0, normalize=normalize, **options)
    interpret = plgpu.InterpretGPUParams()
    got = with_gradients(functools.partial(kernel, features, normalize, mask, interpret), *primals)
    want = with_gradients(functools.partial(reference, features, normalize, mask), *primals)
    assert_close(got, want, 8e-3)


LOWER = """
import sys
import jax, jax.numpy as jnp
from lowrank_attn import ops
from lowrank_attn.features.llops import llops

p, B, T, H, D, M, P, normalize = eval(sys.argv[1])
features = llops(p, M, squared=normalize == "sum")
params = jax.eval_shape(lambda: features.init(jax.random.key(0), D, H)[0])

def run(q, k, v, params):
    f = lambda *a: ops.causal(*a[:3], features=features, params=a[3], normalize=normalize,
                              implementation="pallas_gpu")[0]
    y, vjp = jax.vjp(f, q, k, v, params)
    return y, vjp(y)

q, v = (jax.ShapeDtypeStruct((B, T, H, n), jnp.bfloat16) for n in (D, P))
text = jax.jit(run).trace(q, q, v, params).lower(lowering_platforms=("cuda",)).as_text()
print("kernels:", text.count("custom_call @mosaic_gpu_v2"))
"""


@needs_kernels
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 16384, 16, 128, 256, 128, "none"),
        (4, 4, 1000, 16, 128, 256, 128, "rms"),
        (2, 1, 16384, 16, 128, 256, 128, "sum"),
        (6, 2, 777, 3, 96, 192, 96, "none"),
        (1, 1, 1, 1, 32, 64, 32, "none"),
    ],
)
def test_lowers_for_cuda(shape):
    """In a process of its own, as a compiler that aborts would end pytest."""
    done = subprocess.run(
        [sys.executable, "-c", LOWER, repr(shape)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 9, done.stdout


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"rule": "decay", "gates": {"log_decay": jnp.zeros((1, 8, 1))}}, "additive rule"),
        ({"segment_ids": jnp.zeros((1, 8), jnp.int32)}, "segment_ids"),
        ({"dtype": jnp.float32}, "expected bfloat16"),
        ({"M": 257}, "at most 256"),
        ({"P": 129}, "at most 128"),
    ],
)
def test_refusals_name_what_would_work(change, reason):
    change = dict(change)
    dtype, M, P = change.pop("dtype", jnp.bfloat16), change.pop("M", 16), change.pop("P", 16)
    q, v = jnp.ones((1, 8, 1, M), dtype), jnp.ones((1, 8, 1, P), dtype)
    reason = reason if HAS_KERNELS else "jax >= 0.11"
    with pytest.raises(NotImplementedError, match=reason):
        ops.causal(q, q, v, implementation="pallas_gpu", **change)


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("options", [{}, {"constants": False}, {"tied": False, "qk_norm": False}])
def test_product_form_is_the_map(p, squared, options):
    features = llops(p, 24, squared=squared, **options)
    params = features.init(jax.random.key(0), 16, 1)[0]
    params = {n: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape) for n, x in params.items()}
    params = {n: x[0] for n, x in params.items()}
    x = 3 * jax.random.normal(jax.random.key(2), (10, 16))
    x_hat = x
    if features.product.normalized:
        x_hat = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    for is_query in (True, False):
        Theta, b = features.product.factors(params, is_query=is_query)
        with jax.default_matmul_precision("float32"):
            phi = jnp.prod(jnp.einsum("td,pdm->ptm", x_hat, Theta) + b[:, None], axis=0)
        phi = jnp.square(phi) if features.product.squared else phi
        want = features.apply(params, x, is_query=is_query)
        np.testing.assert_allclose(phi, want, rtol=2e-5, atol=1e-6)
    assert llops(2, 24, rank=2).product is None


GPU_SHAPES = [
    ("none", {"B": 2, "T": 1000, "H": 3, "D": 128, "M": 256, "P": 128}, False),
    ("rms", {"B": 1, "T": 2101, "H": 2, "G": 2, "D": 64, "M": 192, "P": 96, "p": 4}, True),
    ("sum", {"B": 2, "T": 513, "H": 2, "D": 128, "M": 256, "P": 128}, False),
    ("sum_plus_one", {"B": 1, "T": 2100, "H": 2, "M": 128, "P": 64, "mapped": False}, True),
    ("none", {"B": 1, "T": 77, "H": 2, "D": 96, "M": 64, "P": 32, "p": 6}, False),
    ("none", {"B": 1, "T": 300, "H": 2, "D": 32, "M": 100, "P": 128, "p": 3}, False),
]


@needs_gpu
@pytest.mark.parametrize("normalize,options,masked", GPU_SHAPES)
def test_attention_and_gradients_on_gpu(normalize, options, masked):
    """16 seeds, each run twice with equal bits."""
    mask = jnp.arange(options["T"])[None] % 5 > 0 if masked else None
    mask = None if mask is None else jnp.broadcast_to(mask, (options["B"], options["T"]))
    _, features = inputs(0, normalize=normalize, **options)
    run = functools.partial(kernel, features, normalize, mask, None)
    run = jax.jit(functools.partial(with_gradients, run))
    oracle = functools.partial(reference, features, normalize, mask)
    oracle = jax.jit(functools.partial(with_gradients, oracle))
    for seed in range(16):
        primals, _ = inputs(seed, normalize=normalize, **options)
        got = run(*primals)
        again = run(*primals)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)
        want = oracle(*primals)
        assert_close(got[0], want[0], 5e-3)
        assert_close(got[1], want[1], 1e-2)
