"""What every entry of the registries keeps: it trains, hides what it must, and hands its state on.

Entries are tried with their defaults, in both flavours of the layer, on two packed documents with
padding at the end. A method that cannot do a form must say so by a ValueError or
NotImplementedError that names the argument; what it does accept must then be right.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from conftest import assert_close, normal
from flax import nnx

from lowrank_attn import ops
from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.layers import ATTENTION, linen
from lowrank_attn.layers.attend import make_kernel
from lowrank_attn.layers.nnx import Constant, LinearAttention

B, T, E, H = 2, 22, 16, 4
BORDER, REAL = 8, 15  # the second document begins, the padding begins
TOKEN = 10  # whose view of the others is tested
MASK = jnp.broadcast_to(jnp.arange(T) < REAL, (B, T))
SEGMENTS = jnp.broadcast_to(jnp.arange(T) >= BORDER, (B, T)).astype(jnp.int32)
KERNELS = [*FEATURE_MAPS, *ATTENTION]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def new_layer(kernel, **options):
    return LinearAttention(E, H, kernel=kernel, rngs=nnx.Rngs(0), **options)


@functools.cache
def values(kernel):
    """Parameters and constants, which all forms of a layer share, drawn in one compilation."""
    return jax.jit(lambda: nnx.state(new_layer(kernel)))()


def layer(kernel, **options):
    abstract = nnx.eval_shape(lambda: new_layer(kernel, **options))
    return nnx.merge(nnx.split(abstract)[0], values(kernel))


@functools.cache
def accepted(kernel, causal):
    """The arguments that hide tokens as far as the kernel takes them; None if it refuses the form.

    Nothing is computed, shapes only.
    """
    arguments = {"mask": MASK, "segment_ids": SEGMENTS}

    def call(arguments):
        return new_layer(kernel, causal=causal)(jnp.zeros((B, T, E)), **arguments)[0]

    while True:
        try:
            nnx.eval_shape(call, arguments)
            return arguments
        except (ValueError, NotImplementedError) as error:
            refused = [name for name in arguments if name in str(error)]
            if not refused:
                assert causal and "causal" in str(error), error
                return None
            arguments = {name: x for name, x in arguments.items() if name not in refused}


def forward(kernel, causal):
    """The output for x [B, T, E] of `results`, without gradients."""
    hide = accepted(kernel, causal)
    return nnx.jit(lambda module, x: module(x, **hide)[0])(
        layer(kernel, causal=causal), normal(1, B, T, E)
    )


@functools.cache
def results(kernel, causal):
    """The output, and the gradients of two sums of squares: of the real tokens and of one token."""
    graph, params, rest = nnx.split(layer(kernel, causal=causal), nnx.Param, ...)
    hide = accepted(kernel, causal)

    @jax.jit
    def run(params, x, weight):
        def loss(params, x):
            y, _ = nnx.merge(graph, params, rest)(x, **hide)
            return jnp.sum(weight[:, None] * jnp.square(y)), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return y, gradients

    x = normal(1, B, T, E)
    y, (of_params, _) = run(params, x, jnp.arange(T) < REAL)
    _, (_, of_x) = run(params, x, jnp.arange(T) == TOKEN)
    return y, [leaf[...] for _, leaf in nnx.to_flat_state(of_params)], of_x


def skip_if_refused(kernel, causal):
    if accepted(kernel, causal) is None:
        pytest.skip("the method says that it has no causal form")


def test_names_are_those_of_one_kind():
    assert not set(FEATURE_MAPS) & set(ATTENTION)


@every_kernel
def test_every_kernel_has_a_bidirectional_or_a_causal_form(kernel):
    forms = [accepted(kernel, causal) for causal in (False, True)]
    assert forms[0] is not None
    if kernel in FEATURE_MAPS:
        assert all(set(form or ()) == {"mask", "segment_ids"} for form in forms)


@pytest.mark.parametrize(
    ("kernel", "causal"),
    [(kernel, True) for kernel in KERNELS] + [(kernel, False) for kernel in ATTENTION],
)
def test_trains_and_hides_what_must_not_be_seen(kernel, causal):
    """By gradient: finite, exactly zero from what is hidden, not zero from the rest.

    Both forms of feature maps are sums by the same operations, which have their own tests.
    """
    skip_if_refused(kernel, causal)
    y, of_params, of_x = results(kernel, causal)
    assert jnp.all(jnp.isfinite(y[:, :REAL])) and jnp.all(jnp.isfinite(of_x))
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in of_params)
    assert any(jnp.any(leaf != 0) for leaf in of_params)

    hide = accepted(kernel, causal)
    at = jnp.arange(T)
    visible = at >= (BORDER if "segment_ids" in hide else 0)
    visible &= at < (REAL if "mask" in hide else T)
    visible &= at <= (TOKEN if causal else T)
    influence = jnp.max(jnp.abs(of_x), axis=(0, 2))
    assert jnp.all(influence[~visible] == 0) and influence[TOKEN] > 0
    if kernel in FEATURE_MAPS:  # methods may look at some tokens only
        assert jnp.all(influence[visible] > 0)
    else:
        assert jnp.count_nonzero(influence) > 1


def collections(kernel):
    """The parameters and constants of an NNX layer as Linen collections."""
    params, constants = (
        nnx.to_pure_dict(nnx.state(layer(kernel), kind)) for kind in (nnx.Param, Constant)
    )
    return {"params": params} | ({"constants": constants} if constants else {})


@every_kernel
def test_nnx_and_linen_have_one_tree(kernel):
    theirs = linen.LinearAttention(H, kernel=kernel)
    initial = jax.eval_shape(theirs.init, jax.random.key(0), jnp.zeros((B, T, E)))
    assert jax.tree.map(jnp.shape, initial) == jax.tree.map(jnp.shape, collections(kernel))


@pytest.mark.parametrize("kernel", ["llops", "slay", "polysketch", "softmax", "flatten"])
def test_nnx_and_linen_have_one_output(kernel):
    """With trained parameters, constants, both or none, of a map or a method."""
    theirs = linen.LinearAttention(H, kernel=kernel)
    hide = accepted(kernel, False)
    y, _ = jax.jit(lambda values, x: theirs.apply(values, x, **hide))(
        collections(kernel), normal(1, B, T, E)
    )
    assert_close(y, forward(kernel, False))


@pytest.mark.parametrize("kernel", FEATURE_MAPS)
def test_the_last_real_token_sees_the_same_in_both_forms(kernel):
    causal, full = results(kernel, True)[0], forward(kernel, False)
    assert_close(causal[:, REAL - 1], full[:, REAL - 1])


@pytest.mark.parametrize("kernel", FEATURE_MAPS)
def test_handing_the_state_on_continues_the_sequence(kernel):
    module = layer(kernel, causal=True, use_rotary=True)
    x, half = normal(1, B, T, E), T // 2

    @nnx.jit
    def run(module, x, start, state):
        return module(x, positions=start + jnp.arange(x.shape[1]), initial_state=state)

    shapes = nnx.eval_shape(lambda module, x: module(x)[1], module, x)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    assert isinstance(nothing, ops.State)
    whole, last = run(module, x, 0, nothing)
    first, state = run(module, x[:, :half], 0, nothing)
    second, state = run(module, x[:, half:], half, state)
    assert_close((jnp.concatenate([first, second], 1), state), (whole, last))


@pytest.mark.parametrize("kernel", ATTENTION)
def test_methods_take_no_normaliser_of_the_layer(kernel):
    with pytest.raises(ValueError, match="normalize='sum', but this kernel"):
        new_layer(kernel, normalize="sum")


@pytest.mark.parametrize("kernel", FEATURE_MAPS)
def test_signed_maps_are_not_divided_by_their_sum(kernel):
    feature_map = make_kernel(kernel)
    assert feature_map.non_negative or feature_map.normalize not in ("sum", "sum_plus_one")


@every_kernel
def test_unknown_options_are_refused(kernel):
    with pytest.raises(ValueError, match=f"options=.* do not fit kernel='{kernel}'"):
        make_kernel(kernel, {"no_such_option": 1})
