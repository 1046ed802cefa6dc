"""The Hopper kernels of features and their gradients against float32.

Tolerances are twice the error that roundings to bfloat16 (1.7e-3 of the norm each) must leave: one
for the features and for dTheta (of dy), two for dx (dy, dx) and db (dy, the norms that undo their
inverses).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import needs_gpu_interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.pallas_gpu_feature_gradients import factor_gradients, feature_gradients
from lowrank_attn.ops.pallas_gpu_features import Form, features

HAS_KERNELS = hasattr(plgpu, "InterpretGPUParams")
TOLERANCES = {"phi": 3.4e-3, "dx": 4.8e-3, "dTheta": 3.4e-3, "db": 4.8e-3}


def inputs(seed, *, p=2, B=1, T=72, H=1, G=1, D=64, M=64, **_):
    keys = jax.random.split(jax.random.key(seed), 5)
    x = jax.random.normal(keys[0], (B, T, H * G, D), jnp.bfloat16)
    Theta = (jax.random.normal(keys[1], (H, p, D, M)) / D**0.5).astype(jnp.bfloat16)
    b = 1 + 0.1 * jax.random.normal(keys[2], (H, p, M))
    return x, Theta, b, jax.random.normal(keys[3], (B, T, H * G, M), jnp.bfloat16)


def kernels(form, interpret, x, Theta, b, g):
    """Features and the gradients for x, Theta and b."""
    (phi,), (inverse,) = features((x,), Theta[None], b[None], form, interpret)
    return phi, *feature_gradients(x, inverse, Theta, b, g, form, interpret)


def reference(form, x, Theta, b, g):
    """The same in float32."""

    def phi(x, Theta, b):
        G = x.shape[2] // Theta.shape[0]
        if form.norm_size:
            square = jnp.sum(jnp.square(x), axis=-1, keepdims=True) / form.norm_size
            x = x / jnp.sqrt(square + 1e-6)
        with jax.default_matmul_precision("float32"):
            y = jnp.einsum("bthd,hpdm->bthpm", x, jnp.repeat(Theta, G, axis=0))
        y = jnp.prod(y + jnp.repeat(b, G, axis=0), axis=3)
        return jnp.square(y) if form.squared else y

    phi, vjp = jax.vjp(phi, *(a.astype(jnp.float32) for a in (x, Theta, b)))
    return phi, *vjp(g.astype(jnp.float32))


def assert_close(got, want):
    for (name, tolerance), a, b in zip(TOLERANCES.items(), got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_factor_gradients(p):
    """Also where a factor is zero: nothing is divided."""
    ys = list(jax.random.normal(jax.random.key(0), (p, 8)).at[0, 0].set(0.0))
    g = jax.random.normal(jax.random.key(1), (8,))
    want = jax.grad(lambda ys: jnp.sum(g * jnp.prod(jnp.stack(ys), axis=0)))(ys)
    for a, b in zip(factor_gradients(ys, g), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


SHAPES = [
    ({"p": 2, "T": 72, "M": 64}, Form(64, False)),
    ({"p": 3, "T": 304, "G": 2}, Form(0, True)),
    ({"p": 4, "T": 136, "D": 128, "M": 192}, Form(96, False)),
]


@needs_gpu_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("options,form", SHAPES)
def test_interpreted(options, form):
    """Both ways to share out work, rings that wrap, Theta resident and streamed."""
    args = inputs(0, **options)
    assert_close(kernels(form, plgpu.InterpretGPUParams(), *args), reference(form, *args))


GPU_SHAPES = [
    *SHAPES,
    *(
        ({"p": p, "B": 2, "T": 1000, "H": 3, "D": 128, "M": 256}, Form(128, p > 4))
        for p in range(1, 7)
    ),
    ({"p": 1, "B": 2, "T": 1000, "H": 2, "M": 512}, Form(64, False)),
    ({"p": 2, "B": 1, "T": 4096, "H": 2, "G": 2, "D": 128, "M": 512}, Form(128, True)),
    ({"p": 2, "B": 3, "T": 504, "H": 2, "M": 192}, Form(0, False)),
]


@pytest.mark.skipif(
    jax.default_backend() != "gpu" or not HAS_KERNELS, reason="needs a Hopper GPU and jax >= 0.11"
)
@pytest.mark.parametrize("options,form", GPU_SHAPES)
def test_on_gpu(options, form):
    """16 seeds, each run twice with equal bits."""
    run = jax.jit(functools.partial(kernels, form, None))
    oracle = jax.jit(functools.partial(reference, form))
    for seed in range(16):
        args = inputs(seed, **options)
        got = run(*args)
        for a, b in zip(got, run(*args), strict=True):
            np.testing.assert_array_equal(a, b)
        assert_close(got, oracle(*args))
