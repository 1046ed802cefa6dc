"""The Flax layers: their sizes and dtypes, what they refuse, and Flax's own layers around them."""

import jax
import jax.numpy as jnp
import pytest
from conftest import assert_close, normal
from flax import linen as nn
from flax import nnx

from lowrank_attn.layers import GATINGS, linen
from lowrank_attn.layers.nnx import AttentionFn, Constant, LinearAttention
from lowrank_attn.layers.rotary import rotary

B, T, E, H = 2, 21, 16, 4


def layer(kernel="llops", seed=0, **options):
    return LinearAttention(E, H, kernel=kernel, rngs=nnx.Rngs(seed), **options)


def variables(module):
    """The parameters and constants of an NNX layer as Linen collections."""
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    constants = nnx.to_pure_dict(nnx.state(module, Constant))
    return {"params": params} | ({"constants": constants} if constants else {})


@pytest.mark.parametrize("rule", [name for name in GATINGS if name != "additive"])
def test_rules_have_one_tree_and_train_and_continue(rule):
    """NNX and Linen agree, padding and future are hidden, gates train, parts are the whole."""
    options = {"kernel": "elu", "causal": True, "rule": rule, "chunk_size": 4}
    ours = layer(num_kv_heads=2, **options)
    theirs = linen.LinearAttention(H, num_kv_heads=2, **options)
    x = normal(1, B, T, E)
    mask = jnp.arange(T)[None] < jnp.array([[T], [15]])
    shared = variables(ours)
    initial = jax.eval_shape(theirs.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, initial) == jax.tree.map(jnp.shape, shared)

    def loss(module, x):
        y, state = module(x, mask=mask)
        return jnp.sum(y[:, 10] ** 2), (y, state)

    (grads, influence), (y, state) = nnx.jit(nnx.grad(loss, argnums=(0, 1), has_aux=True))(ours, x)
    for path, grad in nnx.to_flat_state(grads):
        assert jnp.all(jnp.isfinite(grad[...])) and jnp.any(grad[...] != 0), path
    influence = jnp.max(jnp.abs(influence), axis=(0, 2))
    assert jnp.all(influence[:11] > 0) and jnp.all(influence[11:] == 0)

    apply = jax.jit(theirs.apply)
    first, between = apply(shared, x[:, :14])
    second, last = apply(shared, x[:, 14:15], initial_state=between)
    assert_close(jnp.concatenate([first, second], 1)[1], y[1, :15])
    assert_close(last.S[1], state.S[1])


def test_grouped_heads_and_other_sizes():
    module = layer(num_kv_heads=2, qk_dim=6, value_dim=5)
    assert module.query.kernel.shape == (E, H, 6) and module.key.kernel.shape == (E, 2, 6)
    assert module(normal(1, B, T, E))[0].shape == (B, T, E)
    assert module.attend.phi["W"].shape[0] == 2 and module.attend.gain.shape == (H, 5)


def test_bfloat16_computes_in_it_and_keeps_float32_parameters_and_state():
    y, state = layer(dtype=jnp.bfloat16)(normal(1, B, T, E))
    assert y.dtype == jnp.bfloat16 and state.S.dtype == jnp.float32
    expected, _ = layer()(normal(1, B, T, E))
    # three roundings to 8 bits in a row, in the worst element of a few hundred
    assert_close(y, expected, 3e-2)


def test_rotary_depends_on_differences_of_positions_only():
    q, k = normal(0, 1, T, 1, 8), normal(1, 1, T, 1, 8)
    scores = [jnp.einsum("bthd,bshd->bts", rotary(q, at), rotary(k, at), precision="highest")
              for at in (jnp.arange(T), jnp.arange(T) + 31)]  # fmt: skip
    assert_close(scores[1], scores[0])
    with pytest.raises(ValueError, match="x has head size 7"):
        rotary(normal(0, 1, T, 1, 7), jnp.arange(T))


@pytest.mark.parametrize("kernel", ["llops", "slay"])
def test_nnx_multi_head_attention_takes_it(kernel):
    def make(rngs):
        attention_fn = AttentionFn(H, H, E // H, E // H, kernel=kernel, rngs=rngs)
        return nnx.MultiHeadAttention(
            H, E, attention_fn=attention_fn, decode=False, deterministic=True, rngs=rngs
        )

    module = make(nnx.Rngs(0))
    x = normal(1, B, T, E)
    mask = (jnp.arange(T)[None] < jnp.array([[T], [9]]))[:, None, None]
    y = module(x, mask=mask)
    assert y.shape == x.shape
    assert_close(module(x.at[1, 9:].set(50), mask=mask)[1, :9], y[1, :9])
    grads = nnx.grad(lambda m: jnp.sum(m(x, mask=mask) ** 2))(module)
    trained = nnx.to_flat_state(nnx.state(grads["attention_fn"])) if kernel == "llops" else []
    assert all(jnp.any(grad[...] != 0) for _, grad in trained)
    causal = module(x, is_causal=True)
    assert_close(module(x.at[:, 12:].set(50), is_causal=True)[:, :12], causal[:, :12])


@pytest.mark.parametrize("kernel", ["llops", "slay"])
def test_linen_multi_head_attention_takes_it(kernel):
    module = nn.MultiHeadDotProductAttention(
        num_heads=H, attention_fn=linen.AttentionFn(kernel=kernel)
    )
    x = normal(1, B, T, E)
    mask = (jnp.arange(T)[None] < jnp.array([[T], [9]]))[:, None, None]
    values = module.init(jax.random.key(0), x, mask=mask)
    y = module.apply(values, x, mask=mask)
    assert_close(module.apply(values, x.at[1, 9:].set(50), mask=mask)[1, :9], y[1, :9])
    if kernel == "llops":
        assert values["params"]["attention_fn"]["phi"]["W"].shape[0] == H


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_what_linear_attention_cannot_do_is_refused(flavour):
    q, k, v = (normal(i, B, T, H, 4) for i in range(3))
    if flavour == "nnx":
        call = AttentionFn(H, H, 4, 4, rngs=nnx.Rngs(0))
    else:
        module = linen.AttentionFn()
        values = module.init(jax.random.key(0), q, k, v)

        def call(*args, **keywords):
            return module.apply(values, *args, **keywords)

    with pytest.raises(ValueError, match="mask has shape .*expected .*causal=True"):
        call(q, k, v, mask=jnp.tril(jnp.ones((B, 1, T, T), bool)))
    with pytest.raises(ValueError, match="dropout_rate=0.1: attention weights are never formed"):
        call(q, k, v, dropout_rate=0.1, deterministic=False)
    with pytest.raises(ValueError, match="sow_weights=True"):
        call(q, k, v, module=object())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "linear"}, "kernel='linear' is unknown; known: llops, .*softmax"),
        ({"options": {"degree": 3}}, "options={'degree': 3} do not fit kernel='llops'"),
        ({"normalize": "max"}, "normalize='max' is unknown"),
        ({"kernel": "softmax", "normalize": "sum"}, "normalize='sum', but this kernel"),
        ({"normalize": "sum"}, "normalize='sum' with a feature map whose scores can be negative"),
        (
            {"kernel": "linformer", "causal": True},
            "causal=True, but this kernel has no causal form",
        ),
        ({"num_kv_heads": 3}, "num_heads=4, expected a multiple of num_kv_heads=3"),
        ({"rule": "momentum", "causal": True}, "rule='momentum' is unknown; known: additive"),
        ({"rule": "delta"}, "rule='delta' with causal=False: .* order of the tokens"),
        ({"rule": "kda", "causal": True, "kernel": "softmax"}, "rule='kda' with kernel='softmax'"),
        ({"rule": "delta", "causal": True, "normalize": "sum"}, "normalize='sum' with rule='delt"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        layer(**options)
    module = linen.LinearAttention(H, **options)
    with pytest.raises(ValueError):
        module.init(jax.random.key(0), normal(0, B, T, E))


def test_delta_rules_bring_features_to_length_1():
    module = layer("elu", rule="delta", causal=True)
    phi = module.key_features(3 * normal(1, B, T, E))
    assert_close(jnp.linalg.norm(phi, axis=-1), jnp.ones((B, T, H)))
    assert module.attend.normalize == "rms"


def test_width_must_be_a_multiple_of_the_heads():
    with pytest.raises(ValueError, match="width=16, expected a multiple of num_heads=3"):
        LinearAttention(E, 3, rngs=nnx.Rngs(0))
