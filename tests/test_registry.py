"""What every entry of the registries keeps: it trains, hides what it must, and hands its state on.

Entries are tried with their defaults, in both flavours of the layer. A method that cannot do a form
must say so by a ValueError or NotImplementedError that names the argument; what it does accept must
then be right.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from conftest import assert_close, normal
from flax import nnx

from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.layers import ATTENTION, linen
from lowrank_attn.layers.attend import make_kernel, resolve_normalize
from lowrank_attn.layers.nnx import Constant, LinearAttention

B, T, E, H = 2, 21, 16, 4
KERNELS = [*FEATURE_MAPS, *ATTENTION]
REAL = 15  # tokens before the padding
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def layer(kernel, **options):
    return LinearAttention(E, H, kernel=kernel, rngs=nnx.Rngs(0), **options)


def variables(module):
    """The parameters and constants of an NNX layer as Linen collections."""
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    constants = nnx.to_pure_dict(nnx.state(module, Constant))
    return {"params": params} | ({"constants": constants} if constants else {})


def unless_refused(argument, call):
    """The result of `call`, or a skip if it refuses this argument by name."""
    try:
        return call()
    except (ValueError, NotImplementedError) as error:
        if argument not in str(error):
            raise
        pytest.skip(f"refused: {error}")


def test_names_are_those_of_one_kind():
    assert not set(FEATURE_MAPS) & set(ATTENTION)


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_nnx_and_linen_have_one_tree_and_one_output(kernel, causal):
    ours = layer(kernel, causal=causal, use_rotary=True)
    theirs = linen.LinearAttention(H, kernel=kernel, causal=causal, use_rotary=True)
    x = normal(1, B, T, E)
    shared = variables(ours)
    y, state = unless_refused("causal", lambda: nnx.jit(lambda m, x: m(x))(ours, x))
    initial = jax.eval_shape(theirs.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, initial) == jax.tree.map(jnp.shape, shared)
    same_y, same_state = jax.jit(theirs.apply)(shared, x)
    assert jnp.all(y == same_y)
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.all(a == b), state, same_state))


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_trains_and_hides_the_future_and_padding(kernel, causal):
    """By gradient: finite everywhere, exactly zero from what is hidden, not zero from the rest."""
    graph, params, rest = nnx.split(layer(kernel, causal=causal), nnx.Param, ...)
    x = normal(1, B, T, E)
    mask = jnp.broadcast_to(jnp.arange(T) < REAL, (B, T))

    @jax.jit
    def gradients(params, x):
        def loss(params, x, tokens):
            y, _ = nnx.merge(graph, params, rest)(x, mask=mask)
            return jnp.sum(jnp.square(y[:, tokens]))

        of_params = jax.grad(loss)(params, x, slice(0, REAL))
        return of_params, jax.grad(loss, 1)(params, x, slice(10, 11))

    of_params, of_x = unless_refused(
        "causal", lambda: unless_refused("mask", lambda: gradients(params, x))
    )
    leaves = [leaf[...] for _, leaf in nnx.to_flat_state(of_params)]
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in leaves)
    assert any(jnp.any(leaf != 0) for leaf in leaves)
    influence = jnp.max(jnp.abs(of_x), axis=(0, 2))
    visible = 11 if causal else REAL
    assert jnp.all(influence[visible:] == 0) and influence[10] > 0
    if kernel in FEATURE_MAPS:  # methods may look at some tokens only
        assert jnp.all(influence[:visible] > 0)
    else:
        assert jnp.count_nonzero(influence) > 1


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_do_not_see_each_other(kernel, causal):
    """Other values in the first document do not move the second one."""
    module = layer(kernel, causal=causal)
    segment_ids = jnp.broadcast_to(jnp.arange(T) >= 8, (B, T)).astype(jnp.int32)
    x = normal(1, B, T, E)
    other = x.at[:, :8].set(normal(2, B, 8, E))
    run = nnx.jit(lambda module, x: module(x, segment_ids=segment_ids)[0])
    y = unless_refused("causal", lambda: unless_refused("segment_ids", lambda: run(module, x)))
    changed = run(module, other)
    # The additions of sums over both documents may be rounded in another order.
    assert_close(changed[:, 8:], y[:, 8:])
    assert not jnp.allclose(changed[:, :8], y[:, :8])


@every_kernel
def test_one_prefix_is_causal_and_bidirectional_alike(kernel):
    """The last token of a sequence sees all of it in both forms, so its outputs agree."""
    x = normal(1, B, T, E)
    forms = [layer(kernel, causal=causal) for causal in (True, False)]
    if kernel not in FEATURE_MAPS:
        pytest.skip("methods may have forms that differ by more than what is visible")
    causal, full = (nnx.jit(lambda m, x: m(x)[0])(module, x) for module in forms)
    assert_close(causal[:, -1], full[:, -1])


@pytest.mark.parametrize("kernel", FEATURE_MAPS)
def test_handing_the_state_on_continues_the_sequence(kernel):
    module = layer(kernel, causal=True, use_rotary=True)
    x = normal(1, B, T, E)
    whole, last = nnx.jit(lambda m, x: m(x))(module, x)
    first, state = nnx.jit(lambda m, x: m(x))(module, x[:, :8])
    rest = functools.partial(LinearAttention.__call__, positions=jnp.arange(8, T))
    second, state = nnx.jit(lambda m, x, s: rest(m, x, initial_state=s))(module, x[:, 8:], state)
    assert_close((jnp.concatenate([first, second], 1), state), (whole, last))


@pytest.mark.parametrize("kernel", ATTENTION)
def test_methods_take_no_normaliser_of_the_layer(kernel):
    with pytest.raises(ValueError, match="normalize='sum', but this kernel"):
        layer(kernel, normalize="sum")


@pytest.mark.parametrize("kernel", FEATURE_MAPS)
def test_signed_maps_are_not_divided_by_their_sum(kernel):
    feature_map = make_kernel(kernel)
    safe = resolve_normalize(feature_map, None)
    assert feature_map.non_negative or safe not in ("sum", "sum_plus_one")


@every_kernel
def test_unknown_options_are_refused(kernel):
    with pytest.raises(ValueError, match=f"options=.* do not fit kernel='{kernel}'"):
        make_kernel(kernel, {"no_such_option": 1})
