"""Attention methods against golden numbers of public code.

Tolerances: 1e-6 of the largest output, 3e-6 of the largest gradient, see golden/README.md.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from lowrank_attn.layers.linformer import linformer
from lowrank_attn.layers.mamba import mamba
from lowrank_attn.layers.nystromformer import nystromformer
from lowrank_attn.layers.reformer import reformer
from lowrank_attn.layers.skyformer import skyformer

GOLDEN = Path(__file__).parent / "golden"


class Golden:
    """The arrays of one case: `golden(NAME)` is `PREFIX.NAME` or else `NAME`, in float32."""

    def __init__(self, file, prefix):
        self.arrays = np.load(GOLDEN / f"{file}.npz")
        self.prefix = prefix

    def __call__(self, name):
        name = f"{self.prefix}.{name}" if f"{self.prefix}.{name}" in self.arrays else name
        return jnp.asarray(self.arrays[name], jnp.float32)


def check(golden, attention, inputs):
    """Outputs and gradients of sum(y w) with respect to `inputs`, a dict of golden names."""
    y, vjp = jax.vjp(jax.jit(attention), inputs)
    assert_close(y, golden("y"), 1e-6)
    for name, gradient in vjp(golden("w"))[0].items():
        assert_close({name: gradient}, {name: golden(f"d_{name}")}, 3e-6)


@pytest.mark.oracle("nystromformer", source="transformers 5.24.0")
@pytest.mark.parametrize("prefix", ["no_conv", "conv"])
def test_nystromformer(prefix):
    golden = Golden("nystromformer", prefix)
    conv = {} if prefix == "no_conv" else {"param.conv.weight": golden("param.conv.weight")}
    method = nystromformer(8, conv_size=5 if conv else None, shared_start=True)

    def attention(inputs):
        params = {"conv": inputs["param.conv.weight"].reshape(3, 5)} if conv else {}
        return method(params, *(inputs[n] for n in "qkv"), causal=False)

    inputs = {n: golden(n) for n in "qkv"} | conv
    check(golden, attention, inputs)
    if not conv:
        alone = attention({n: inputs[n][:1] for n in "qkv"})
        assert_close(alone, golden("y_first_example_alone"), 1e-6)


@pytest.mark.oracle("skyformer", source="pkuzengqi/Skyformer")
@pytest.mark.parametrize("prefix", ["full", "masked"])
def test_skyformer(prefix):
    """Public code draws rows for each example; here each example is a group of heads with its own.

    Its mask sets q, k and v to zero, which is done by hand: no mask could differ between heads.
    """
    golden = Golden("skyformer", prefix)
    rows = golden.arrays[f"{prefix}.sampled_rows"][:, 0]  # [B, N]
    real = golden("mask")[:, :, None, None]
    T = real.shape[1]
    draw = jnp.asarray((rows % T + 0.5) / T, jnp.float32)
    method = skyformer(12, shared_start=True)

    def folded(x):  # [B, T, H, D] -> [1, T, B H, D]
        return jnp.moveaxis(x, 0, 1).reshape(1, T, -1, x.shape[-1])

    def attention(inputs):
        q, k, v = (folded(inputs[n] * real) for n in "qkv")
        scale = (8 / 32) ** 0.25  # public code divides by 32^(1/4) whatever D
        params = {"draw": jnp.repeat(draw, 2, axis=0)}
        y = method(params, q * scale, k * scale, v, causal=False)
        return jnp.moveaxis(y.reshape(T, 2, 2, -1), 1, 0)

    check(golden, attention, {n: golden(n) for n in "qkv"})


@pytest.mark.oracle("linformer", source="linformer 0.2.3")
@pytest.mark.parametrize("prefix", ["separate", "shared_kv", "one_kv_head"])
def test_linformer(prefix):
    golden = Golden("linformer", prefix)
    H = 1 if prefix == "one_kv_head" else 3
    method = linformer(max_length=56, rank=12, tied=prefix == "shared_kv")
    names = ["param.proj_k", "param.to_k.weight"]
    names += [] if prefix == "shared_kv" else ["param.proj_v"]

    def heads(x, name, n):
        return (x @ golden(f"param.{name}.weight").T).reshape(2, 50, n, 8)

    def attention(inputs):
        x = inputs["x"]
        q = heads(x, "to_q", 3)
        k = (x @ inputs["param.to_k.weight"].T).reshape(2, 50, H, 8)
        v = k if prefix == "shared_kv" else heads(x, "to_v", H)
        E = {
            n: inputs[f"param.proj_{p}"] for n, p in zip("EF", "kv") if f"param.proj_{p}" in inputs
        }
        params = {n: jnp.broadcast_to(e, (H, *e.shape)) for n, e in E.items()}
        y = method(params, q, k, v, causal=False).reshape(2, 50, 24)
        return y @ golden("param.to_out.weight").T + golden("param.to_out.bias")

    check(golden, attention, {"x": golden("x")} | {n: golden(n) for n in names})


@pytest.mark.oracle("reformer", source="transformers 5.24.0")
@pytest.mark.parametrize("prefix", ["causal", "full"])
def test_reformer(prefix):
    golden = Golden("reformer", prefix)
    method = reformer(num_hashes=2, num_buckets=6, chunk_size=8)

    def attention(inputs):
        qk = inputs["qk"]
        params = {"rotations": golden("rotations")}
        return method(params, qk, qk, inputs["v"], causal=prefix == "causal")

    check(golden, attention, {"qk": golden("qk"), "v": golden("v")})


@pytest.mark.oracle("mamba", source="transformers 5.24.0")
def test_mamba_in_a_language_model():
    """The public model around it: RMSNorm, residual, tied embedding; loss and gradients."""
    arrays = np.load(GOLDEN / "mamba_lm.npz")
    weights = {n[6:]: jnp.asarray(arrays[n]) for n in arrays.files if n.startswith("param.back")}
    ids, H = arrays["ids"], 2
    B, T = ids.shape
    method = mamba(dt_rank=3)

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale

    def mixer(w, x):
        params = {
            "conv": w["conv1d.weight"].reshape(H, -1, 4),
            "conv_bias": w["conv1d.bias"].reshape(H, -1),
            "x_proj": w["x_proj.weight"].T.reshape(H, -1, 35),
            "dt_proj": jnp.moveaxis(w["dt_proj.weight"].reshape(H, -1, 3), 1, 2),
            "dt_bias": w["dt_proj.bias"].reshape(H, -1),
            "A_log": w["A_log"].reshape(H, -1, 16),
            "skip": w["D"].reshape(H, -1),
        }
        v, q = (y.reshape(B, T, H, -1) for y in jnp.split(x @ w["in_proj.weight"].T, 2, axis=-1))
        return method(params, q, q, v, causal=True).reshape(B, T, -1) @ w["out_proj.weight"].T

    def loss(weights):
        embedding = weights["backbone.embedding.weight"]
        names = [n.removeprefix("backbone.layers.0.") for n in weights if "layers.0." in n]
        layers = {n: jnp.stack([weights[f"backbone.layers.{i}.{n}"] for i in range(3)])
                  for n in names}  # fmt: skip

        def layer(x, w):
            mixer_weights = {n.removeprefix("mixer."): leaf for n, leaf in w.items()}
            return x + mixer(mixer_weights, norm(x, w["norm.weight"])), None

        x, _ = jax.lax.scan(layer, embedding[ids], layers)
        logits = norm(x, weights["backbone.norm_f.weight"]) @ embedding.T
        log_p = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1)), logits

    with jax.default_matmul_precision("highest"):
        (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    # Through three layers: the public code's own float32 run is 4.4e-7 off.
    assert_close(logits, arrays["logits"], 2e-6)
    assert_close(value, arrays["loss"], 1e-6)
    for name, gradient in grads.items():
        if f"grad.{name}" in arrays:
            assert_close({name: gradient}, {name: arrays[f"grad.{name}"]}, 1e-5)
        else:
            norm_of = jnp.linalg.norm(gradient)
            assert_close({name: norm_of}, {name: arrays[f"grad_norm.{name}"]}, 1e-5)
    assert len(grads) == 32
