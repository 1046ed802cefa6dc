"""The Hopper kernels: interpreted on a CPU, lowered for CUDA, and on a GPU where there is one."""

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import needs_gpu_interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn import ops
from lowrank_attn.features.llops import llops
from lowrank_attn.ops import api, pallas_gpu, pallas_gpu_attention
from lowrank_attn.ops.pallas_gpu_attention import Settings, attend
from lowrank_attn.ops.pallas_gpu_scan import CHUNKS_PER_STATE, Denominator, Scan, scan

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


def inputs(
    seed, *, B=1, T=100, H=1, G=1, D=32, M=64, P=32, p=2, normalize="none", mapped=True, decay=None
):
    """q, k, v, the parameters, the state and the gates of one call, and the map (or None).

    Gates are 0 to -decay.
    """
    keys = jax.random.split(jax.random.key(seed), 9)
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
    gates = {} if decay is None else {"log_decay": -decay * jax.random.uniform(keys[8], (B, T, H))}
    return (q, k, v, params, state, gates), features


class Call(NamedTuple):
    """The static part of a call, and its mask and segments."""

    features: Callable | None
    normalize: str
    mask: jax.Array | None = None
    segment_ids: jax.Array | None = None

    def kernel(self, interpret, q, k, v, params, state, gates):
        """`pallas_gpu.causal`, interpreted if asked for."""
        args, method = api.prepare(
            q, k, v, self.features, params, "decay" if gates else "additive", gates, self.normalize,
            1e-6, self.mask, self.segment_ids, None, state, 128,
        )  # fmt: skip
        return pallas_gpu.causal(args, method, interpret)

    def reference(self, q, k, v, params, state, gates):
        """The oracle in float32."""
        return ops.causal(
            *(x.astype(jnp.float32) for x in (q, k, v)), features=self.features, params=params,
            rule="decay" if gates else "additive", gates=gates, normalize=self.normalize,
            mask=self.mask, segment_ids=self.segment_ids, initial_state=state,
            implementation="reference",
        )  # fmt: skip


def pattern(B, T, every):
    """Bool [B, T], false at every n-th token, another one in each row; None for 0."""
    return (jnp.arange(T) + jnp.arange(B)[:, None]) % every > 0 if every else None


def documents(B, T, tokens):
    """Segment ids [B, T] of documents of so many tokens; None for 0."""
    return (jnp.arange(T) + jnp.arange(B)[:, None]) // tokens if tokens else None


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


def scan_reference(
    q, k, v, S, z=None, *, log_decay=None, denominator=None, reverse=False, strict=False,
    with_states=False, row_sums=False, interpret=None,
):  # fmt: skip
    """The quadratic form of `scan` in float32."""
    B, T = q.shape[:2]
    H = max(x.shape[2] for x in (q, k, v))
    log_decay = jnp.zeros((B, T, 1)) if log_decay is None else log_decay
    q, k, v, g = (
        jnp.repeat(x.astype(jnp.float32), H // x.shape[2], axis=2) for x in (q, k, v, log_decay)
    )
    decays = decay_matrix(g)  # [B, H, end, start], ends and starts 0..T
    starts = jnp.arange(0, T, CHUNKS_PER_STATE * 64)
    if reverse:
        decays = jnp.swapaxes(decays, 2, 3)
        edges, inside = starts, jnp.arange(T) >= starts[:, None]
    else:
        edges, inside = jnp.minimum(starts + CHUNKS_PER_STATE * 64, T), 1.0
    enters = T if reverse else 0
    pairs, from_start = decays[:, :, 1:, 1:], decays[:, :, 1:, enters]
    to_edges, kept = decays[:, :, edges, 1:] * inside, decays[:, :, edges, enters]
    if strict:
        pairs = pairs * (1 - jnp.eye(T))
    with jax.default_matmul_precision("float32"):
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * pairs
        y = jnp.einsum("bhts,bshv->bthv", scores, v)
        y = y + jnp.einsum("bht,bthk,bhkv->bthv", from_start, q, S)
        states = jnp.einsum("bhns,bshk,bshv->bhnkv", to_edges, k, v)
        states = states + jnp.einsum("bhn,bhkv->bhnkv", kept, S)
        S, states = states[:, :, 0 if reverse else -1], states if with_states else None
        if denominator is None:
            return Scan(y, S, None, jnp.sum(y[..., -64:], -1) if row_sums else None, states)
        d = jnp.sum(scores, axis=-1).swapaxes(1, 2) + jnp.einsum("bthk,bhk->bth", q, z)
        d = d + denominator.offset
        return Scan(y / (d + denominator.epsilon)[..., None], S, z + jnp.sum(k, axis=1), d, states)


def decay_matrix(g):
    """[B, H, T + 1, T + 1]: what is left after t tokens of what was there after s <= t; or 0."""
    T = g.shape[1]
    g = jnp.moveaxis(g, 1, 2)
    cut = g <= pallas_gpu.LOG_OF_NOTHING  # counted, as sums with them would be rounded
    sums, cuts = (
        jnp.pad(jnp.cumsum(x, axis=2), [(0, 0), (0, 0), (1, 0)])
        for x in (jnp.where(cut, 0, g), cut.astype(jnp.int32))
    )
    between = sums[..., :, None] - sums[..., None, :]
    later = jnp.arange(T + 1)[:, None] >= jnp.arange(T + 1)
    passes = later & (cuts[..., :, None] == cuts[..., None, :])
    return jnp.where(passes, jnp.exp(jnp.where(passes, between, 0)), 0)


def log_decays(T, H, strongest):
    """[1, T, H] from 0 to -strongest, and one reset."""
    g = -strongest * jax.random.uniform(jax.random.key(7), (1, T, H))
    return g.at[:, T // 2].set(pallas_gpu.LOG_OF_NOTHING)


@needs_gpu_interpreter
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("variant", ["plain", "denominator", "decay", "parts"])
def test_interpreted_scan_matches_quadratic_form(reverse, variant):
    options = {"reverse": reverse}
    if variant == "denominator":
        options["denominator"] = Denominator(1.0, 1e-6)
    if variant == "decay":
        options |= {"log_decay": log_decays(70, 1, 0.1), "strict": True, "with_states": True}
    if variant in ("decay", "parts"):
        options["row_sums"] = True
    K = 384 if variant == "parts" else 64
    args = scan_inputs(0, T=70, K=K, denominator=options.get("denominator"))
    got = scan(*args, **options, interpret=plgpu.InterpretGPUParams())
    assert_close(got, scan_reference(*args, **options), 4e-3)


@pytest.mark.parametrize(
    "normalize,decay",
    [("none", None), ("none", 0.2), ("none", 30.0), ("sum_plus_one", None), ("sum_plus_one", 0.2)],
)
def test_gradients_are_scans(monkeypatch, normalize, decay):
    """The algebra of the backward pass alone, on exact scans; two query heads share keys."""
    monkeypatch.setattr(pallas_gpu_attention, "scan", scan_reference)
    primals, _ = inputs(
        0, T=300, G=2, M=64, P=64, normalize=normalize, mapped=False, decay=decay or 1.0
    )
    q, k, v, _, state, gates = primals
    denominator = None if normalize == "none" else Denominator(1.0, 1e-6)
    settings = Settings(denominator, learned_decay=decay is not None)

    def ours(q, k, v, state, gates):
        g = None if decay is None else gates["log_decay"]
        y, S, z = attend(q, k, v, state.S, state.z, g, settings)
        return y, ops.State(S, z)

    def oracle(q, k, v, state, gates):
        gates = {} if decay is None else gates
        return Call(None, normalize).reference(q, k, v, {}, state, gates)

    args = (q, k, v, state, gates)
    got, want = (jax.jit(functools.partial(with_gradients, f))(*args) for f in (ours, oracle))
    assert_close(got, want, 8e-3)


@needs_gpu_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    "normalize,options,every",
    [
        ("none", {"T": 70}, 0),
        ("sum", {"T": 70, "D": 64, "P": 64}, 3),
        ("sum_plus_one", {"T": 70, "mapped": False, "G": 2}, 3),
        ("rms", {"T": 70, "p": 1, "G": 2}, 3),
    ],
)
def test_interpreted_attention_and_gradients(normalize, options, every):
    primals, features = inputs(0, normalize=normalize, **options)
    call = Call(features, normalize, pattern(1, 70, every))
    interpret = plgpu.InterpretGPUParams()
    got = with_gradients(functools.partial(call.kernel, interpret), *primals)
    assert_close(got, with_gradients(call.reference, *primals), 8e-3)


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
        ({"dtype": jnp.float32}, "expected bfloat16"),
        ({"M": 513}, "at most 512"),
        ({"P": 129}, "at most 128"),
    ],
)
def test_refusals_name_what_would_work(change, reason):
    change = dict(change)
    dtype, M, P = change.pop("dtype", jnp.bfloat16), change.pop("M", 16), change.pop("P", 16)
    q, v = jnp.ones((1, 8, 1, M), dtype), jnp.ones((1, 8, 1, P), dtype)
    if dtype != jnp.bfloat16 and not HAS_KERNELS:
        reason = "jax >= 0.11"
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
