"""The causal Hopper kernels on a GPU, and the oracle that is used there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pallas_gpu import (
    Call,
    assert_close,
    documents,
    inputs,
    needs_gpu,
    pattern,
    scan_reference,
    with_gradients,
)

from lowrank_attn.ops import api, pallas_gpu


def quadratic(call, q, k, v, params, state, gates):
    """What a `Call` computes, with all scores explicit: in float32, and fast on a GPU."""
    args, method = api.prepare(
        *(x.astype(jnp.float32) for x in (q, k, v)), call.features, params,
        "decay" if gates else "additive", gates, call.normalize,
        1e-6, call.mask, call.segment_ids, None, state, 128,
    )  # fmt: skip
    with jax.default_matmul_precision("float32"):
        phi_q, phi_k, v = method.map(args)
        log_decay = pallas_gpu._log_decay(args)
        G = phi_q.shape[2] // phi_k.shape[2]
        S = jnp.repeat(method.join(args.state), G, axis=1)
        out = scan_reference(phi_q, phi_k, v, S, log_decay=log_decay)
    return method.finish(out.y, jnp.float32), method.split(out.S[:, ::G])


@pytest.mark.parametrize("normalize,decay", [("rms", None), ("sum", 0.3), ("sum_plus_one", None)])
def test_the_quadratic_oracle_is_the_reference(normalize, decay):
    primals, features = inputs(0, T=40, G=2, normalize=normalize, decay=decay)
    call = Call(features, normalize, pattern(1, 40, 5), documents(1, 40, 15))
    oracle = functools.partial(quadratic, call)
    got, want = (with_gradients(f, *primals) for f in (oracle, call.reference))
    assert_close(got, want, 1e-4)  # 2e-5, and a norm or a sum of a fifth to divide by


GPU_SHAPES = [  # normalize, shape, every n-th token masked, tokens per document
    ("none", {"B": 2, "T": 1000, "H": 3, "D": 128, "M": 256, "P": 128}, 0, 0),
    ("rms", {"B": 1, "T": 2101, "H": 2, "G": 2, "D": 64, "M": 192, "P": 96, "p": 4}, 5, 0),
    ("sum", {"B": 2, "T": 513, "H": 2, "D": 128, "M": 256, "P": 128}, 5, 0),
    ("sum_plus_one", {"B": 1, "T": 2100, "H": 2, "M": 128, "P": 64, "mapped": False}, 5, 0),
    ("none", {"B": 1, "T": 77, "H": 2, "D": 96, "M": 64, "P": 32, "p": 6}, 0, 0),
    ("none", {"B": 1, "T": 300, "H": 2, "D": 32, "M": 100, "P": 128, "p": 3}, 0, 200),
    ("none", {"B": 2, "T": 1000, "H": 2, "M": 256, "P": 128, "mapped": False, "decay": 0.1}, 0, 0),
    ("sum", {"B": 1, "T": 2101, "H": 2, "M": 128, "P": 64, "mapped": False, "decay": 0.5}, 5, 300),
    ("rms", {"B": 2, "T": 600, "H": 1, "G": 2, "M": 64, "P": 64, "decay": 0.3}, 0, 0),
    # no norm: of hardly more than one score, it is not continuous where that score changes its sign
    ("none", {"B": 2, "T": 600, "H": 1, "G": 2, "M": 64, "P": 64, "decay": 30.0}, 0, 0),
    ("sum_plus_one", {"B": 1, "T": 700, "H": 2, "M": 192, "P": 96, "mapped": False}, 0, 100),
    ("sum", {"B": 1, "T": 2100, "H": 2, "M": 512, "P": 128, "mapped": False}, 0, 0),
    ("none", {"B": 1, "T": 700, "H": 1, "G": 2, "M": 320, "mapped": False, "decay": 0.1}, 5, 0),
    ("sum", {"B": 1, "T": 1030, "H": 2, "D": 128, "M": 512, "P": 128, "decay": 0.1}, 5, 0),
]


@needs_gpu
@pytest.mark.parametrize("normalize,options,every,tokens", GPU_SHAPES)
def test_attention_and_gradients_on_gpu(normalize, options, every, tokens):
    """16 seeds, each run twice with equal bits."""
    B, T = options["B"], options["T"]
    _, features = inputs(0, normalize=normalize, **options)
    call = Call(features, normalize, pattern(B, T, every), documents(B, T, tokens))
    run = functools.partial(call.kernel, None)
    run = jax.jit(functools.partial(with_gradients, run))
    oracle = jax.jit(functools.partial(with_gradients, functools.partial(quadratic, call)))
    for seed in range(16):
        primals, _ = inputs(seed, normalize=normalize, **options)
        got = run(*primals)
        again = run(*primals)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)
        want = oracle(*primals)
        assert_close(got[0], want[0], 5e-3)
        *got, got_gates = got[1]
        *want, want_gates = want[1]
        assert_close(got, want, 1e-2)
        # Gradients of log decays sum up q . dq - k . dk over spans of 256 tokens. Four roundings of
        # 1.1e-3 in each make 3.2e-3 a token and 5e-2 a span; two terms' size is the least of a sum.
        assert_close(got_gates, want_gates, 2.5e-2)
