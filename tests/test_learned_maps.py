"""Polynomial and learnable maps and methods against numbers of their public code.

Tolerances are those of golden/README.md: what float32 loses against float64 vectors, 1e-6 of the
largest output and 3e-6 of the largest gradient.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, normal

from lowrank_attn import ops
from lowrank_attn.features import focused, hedgehog, mlp, polysketch, polysketch_learned
from lowrank_attn.features.polysketch import random_sketch
from lowrank_attn.layers.flatten import flatten
from lowrank_attn.layers.polaformer import polaformer
from lowrank_attn.layers.polysketch_mixed import polysketch_mixed

GOLDEN = Path(__file__).parent / "golden"
OUTPUT, GRADIENT = 1e-6, 3e-6
cases = pytest.mark.parametrize("case", ["causal", "full"])


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as golden:
        return {key: golden[key] for key in golden}


def float32(x):
    return jnp.asarray(x, jnp.float32)


def value_and_pull(function, w, *arguments):
    y, vjp = jax.vjp(jax.jit(function), *arguments)
    return y, vjp(float32(w))


def check(golden, prefix, attention, params, roundings=1):
    """Compare outputs and gradients of q, k and v; return the gradient of the parameters.

    `roundings` is how many times the usual rounding the scores carry.
    """
    q, k, v = (float32(golden[name]) for name in "qkv")
    y, (d_params, *gradients) = value_and_pull(attention, golden["w"], params, q, k, v)
    assert_close(y, golden[f"{prefix}.y"], roundings * OUTPUT)
    for name, gradient in zip("qkv", gradients, strict=True):
        assert_close(gradient, golden[f"{prefix}.d_{name}"], roundings * GRADIENT)
    return d_params


def attention(feature_map, case, normalize):
    op = ops.causal if case == "causal" else ops.bidirectional

    def attend(params, q, k, v):
        y, _ = op(q, k, v, features=feature_map, params=params, normalize=normalize, epsilon=1e-12)
        return y

    return attend


@pytest.mark.oracle("hedgehog", source="HazyResearch/lolcats")
@cases
@pytest.mark.parametrize("activation", ["softmax", "exp"])
def test_golden_hedgehog(activation, case):
    golden = load("hedgehog")
    params = {"W": float32(np.stack([golden["W_q"], golden["W_k"]], axis=1))}
    feature_map = hedgehog(activation)
    for side in "qk":
        phi = feature_map(params, float32(golden[side]), is_query=side == "q")
        assert_close(phi, golden[f"{activation}.phi_{side}"], OUTPUT)
    d_params = check(golden, f"{activation}.{case}", attention(feature_map, case, "sum"), params)
    for n, side in enumerate("qk"):
        assert_close(d_params["W"][:, n], golden[f"{activation}.{case}.d_W_{side}"], GRADIENT)


def test_joint_hedgehog_is_the_kernel_of_exponentials_but_for_a_weight_of_each_token():
    x = normal(1, 5, 6)
    params = {"W": jnp.stack([jnp.eye(6)] * 2)}
    phi = hedgehog("joint_softmax").apply(params, x, is_query=True)
    z = np.asarray(x, np.float64)
    plain = np.concatenate([np.exp(2 * z), np.exp(-2 * z)], axis=-1)
    assert_close(phi, plain / plain.sum(-1, keepdims=True), OUTPUT)


def polysketch_params(golden):
    """The public code multiplies both matrices by r^(-1/2), ours their product by r^(-1/2)."""
    r = golden["sketch1"].shape[1]
    G = float32(np.stack([golden["sketch1"], golden["sketch2"]]) * r**0.25)
    return {"G1": jnp.broadcast_to(G, (2, *G.shape))}


@pytest.mark.oracle("polysketch", source="google-research/polysketchformer")
@cases
def test_golden_polysketch(case):
    golden = load("polysketch_random")
    params = polysketch_params(golden)
    sketch = random_sketch({"G1": params["G1"][0]}, float32(golden["q"][:, :, 0]).reshape(100, 8))
    assert_close(sketch, golden["phi_q"][:, :, 0].reshape(100, 6), OUTPUT)
    feature_map = polysketch(sketch_size=6, qk_norm=False)
    check(golden, case, attention(feature_map, case, "sum_plus_one"), params)


@pytest.mark.oracle("polysketch_mixed", source="google-research/polysketchformer")
def test_golden_polysketch_with_exact_blocks():
    golden = load("polysketch_random")
    method = polysketch_mixed(sketch_size=6, block_size=10, qk_norm=False)

    def attend(params, q, k, v):
        return method.apply(params, q, k, v, causal=True)

    check(golden, "mixed_causal", attend, polysketch_params(golden))


@pytest.mark.oracle("polysketch_learned", source="google-research/polysketchformer")
@cases
def test_golden_polysketch_learned(case):
    golden = load("polysketch_learned")

    def leaf(prefix, level, *path):  # both branches, for each of two heads
        names = [f"{prefix}params.ff{branch}_{level}.{'.'.join(path)}" for branch in (1, 2)]
        return np.stack([golden[name] for name in names])

    def all_leaves(prefix):
        paths = {"gain": ("LayerNorm_0", "scale"), "b": ("LayerNorm_0", "bias"),
                 "up": ("Dense_0", "kernel"), "down": ("Dense_1", "kernel")}  # fmt: skip
        return {f"{name}{level + 1}": leaf(prefix, level, *path)
                for name, path in paths.items() for level in (0, 1)}  # fmt: skip

    params = {name: jnp.stack([float32(x)] * 2) for name, x in all_leaves("").items()}
    feature_map = polysketch_learned(sketch_size=6)
    # a score is the fourth power of what comes out of four matrix products and two norms, where the
    # tolerances were set for products of two or three roundings: three times as many
    attend = attention(feature_map, case, "sum_plus_one")
    d_params = check(golden, case, attend, params, roundings=3)
    if case == "causal":  # the public parameters are shared by the heads
        d_params = {name: jnp.sum(x, axis=0) for name, x in d_params.items()}
        assert_close(d_params, all_leaves("causal.d_"), 3 * GRADIENT)


@pytest.mark.parametrize("degree", [4, 8])
def test_polysketch_is_unbiased(degree):
    """E phi(q) . phi(k) of the half degree is (q . k)^(degree / 2): over 2^14 draws, 5 sigma."""
    feature_map = polysketch(sketch_size=16, degree=degree, qk_norm=False)
    draws = feature_map.init(jax.random.key(0), 3, 2**14)[1]
    x = float32([[0.9, 0.5, -0.2], [0.7, -0.3, 0.4]])
    sketches = jax.vmap(lambda params: random_sketch(params, x))(draws)
    scores = np.asarray(jnp.sum(sketches[:, 0] * sketches[:, 1], axis=-1), np.float64)
    expected = float(x[0] @ x[1]) ** (degree // 2)
    sigma = scores.std() / 2**7
    assert abs(scores.mean() - expected) < 5 * sigma < 0.5 * expected


@pytest.mark.oracle("mlp", source="formula in float64")
def test_mlp_is_two_layers():
    feature_map = mlp(num_features=7, num_hidden=5)
    params = feature_map.init(jax.random.key(0), 6, 1)[0]
    params = {name: leaf[0] + 0.1 * normal(3, *leaf.shape[1:]) for name, leaf in params.items()}
    x = normal(1, 4, 6)
    rows = np.asarray(x, np.float64)
    rows /= np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + 1e-6)
    for is_query in (True, False):
        W1, b1, W2, b2 = (np.asarray(params[n][1 - is_query], np.float64)
                          for n in ("W1", "b1", "W2", "b2"))  # fmt: skip
        z = rows @ W1 + b1
        hidden = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        expected = (hidden @ W2 + b2) / np.sqrt(7)
        assert_close(feature_map.apply(params, x, is_query=is_query), expected, OUTPUT)


@pytest.mark.oracle("focused", source="LeapLabTHU/FLatten-Transformer")
def test_golden_focused_map():
    """The public norms run over all channels, as ours do with a single head."""
    golden = load("flatten")
    params = {"scale": float32(golden["param.scale"][0])}
    phi = focused()(params, float32(golden["core.q"])[:, :, None], is_query=True)
    assert_close(phi[:, :, 0], golden["core.phi_q"].reshape(phi.shape[:2] + (24,)), OUTPUT)


def image_inputs(golden):
    """Split channels of q, k and v into three heads; parameters of the convolution for each."""
    k = golden["core.k_before_position"] + golden["param.positional_encoding"]
    q, k, v = (float32(x).reshape(2, 50, 3, 8) for x in (golden["core.q"], k, golden["core.v"]))
    conv, bias = (float32(golden[f"param.dwc.{name}"]) for name in ("weight", "bias"))
    params = {
        "scale": float32(golden["param.scale"]).reshape(3, 8),
        "conv": jnp.broadcast_to(conv[:, 0], (3, 8, 5, 5)),
        "conv_bias": jnp.broadcast_to(bias, (3, 8)),
    }
    return params, q, k, v


def joined(x):
    return x.reshape(*x.shape[:2], -1)


@pytest.mark.oracle("flatten", source="LeapLabTHU/FLatten-Transformer")
def test_golden_flatten():
    golden = load("flatten")
    params, *qkv = image_inputs(golden)
    method = flatten(grid_width=10, delta=50e-6)
    y = joined(method.apply(params, *qkv, causal=False))
    assert_close(y, golden["core.plus_conv"], OUTPUT)

    def without_convolution(scale, q, k, v):
        zeros = {name: jnp.zeros_like(params[name]) for name in ("conv", "conv_bias")}
        return joined(method.apply({"scale": scale} | zeros, q, k, v, causal=False))

    y, (d_scale, *d_qkv) = value_and_pull(
        without_convolution, golden["core.w"], params["scale"], *qkv
    )
    assert_close(y, golden["core.y"], OUTPUT)
    assert_close(d_scale.reshape(1, 1, 24), golden["core.d_scale"], GRADIENT)
    for name, gradient in zip("qkv", d_qkv, strict=True):
        assert_close(joined(gradient), golden[f"core.d_{name}"], GRADIENT)


@pytest.mark.oracle("polaformer", source="ZacharyMeng/PolaFormer")
def test_golden_polaformer():
    golden = load("polaformer")
    params, *qkv = image_inputs(golden)
    params["exponent"] = float32(golden["param.power"])[0, :, 0]
    gate = float32(golden["core.gate"])
    method = polaformer(grid_width=10, delta=50e-6)

    def gated(params, gate, q, k, v):
        return joined(method.apply(params, q, k, v, causal=False)) * gate

    y, (d_params, d_gate, *d_qkv) = value_and_pull(gated, golden["core.w"], params, gate, *qkv)
    assert_close(y, golden["core.plus_conv_times_gate"], OUTPUT)
    assert_close(d_gate, golden["core.d_gate"], GRADIENT)
    assert_close(d_params["scale"].reshape(1, 1, 24), golden["core.d_scale"], GRADIENT)
    assert_close(d_params["exponent"][None, :, None], golden["core.d_power"], GRADIENT)
    for name, gradient in zip("qkv", d_qkv, strict=True):
        assert_close(joined(gradient), golden[f"core.d_{name}"], GRADIENT)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (polysketch, {"degree": 2}, "degree=2, expected 4, 8 or 16"),
        (polysketch, {"sketch_size": 0}, "sketch_size=0, expected at least 1"),
        (polysketch_learned, {"expansion": 0}, "expansion=0, expected at least 1"),
        (polysketch_mixed, {"block_size": 0}, "block_size=0, expected at least 1"),
        (hedgehog, {"activation": "relu"}, "activation='relu' is unknown; known: softmax, exp"),
        (mlp, {"num_hidden": 0}, "num_hidden=0, expected at least 1"),
        (focused, {"power": 0.5}, "power=0.5, expected at least 1"),
        (flatten, {"kernel_size": 4}, "kernel_size=4, expected an odd number"),
        (polaformer, {"alpha": 0.0}, "alpha=0.0, expected a number > 0"),
        (flatten, {"delta": 0.0}, "delta=0.0, expected a number > 0"),
        (polaformer, {"grid_width": 0}, "grid_width=0, expected at least 1"),
    ],
)
def test_options_out_of_range_are_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)
