"""The default choice of the implementation, on a CPU that pretends to have other devices beside."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import normal
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from lowrank_attn import ops
from lowrank_attn.features import llops
from lowrank_attn.ops import dispatch

B, T, H, D, P = 2, 40, 2, 16, 8
MAP = llops(2, 32)
PARAMS = MAP.init(jax.random.key(0), D, H)[0]
HAS_GPU_KERNELS = hasattr(plgpu, "InterpretGPUParams")
PLATFORMS = [
    pytest.param(
        "cuda", "@mosaic_gpu_v2",
        marks=pytest.mark.skipif(not HAS_GPU_KERNELS, reason="GPU kernels need jax >= 0.11"),
    ),
    pytest.param("tpu", "@tpu_custom_call"),
]  # fmt: skip
TPU = AbstractMesh(
    (1,), ("x",), (AxisType.Auto,), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu")
)


@pytest.fixture
def present(monkeypatch):
    """Sets the devices that the process seems to have."""

    def pretend(**devices):
        monkeypatch.setattr(dispatch, "devices", lambda: {"cpu": 1} | devices)

    return pretend


def inputs(op="causal", dtype=jnp.bfloat16):
    """q, k, v of one call."""
    tokens = () if op == "decode_step" else (T,)
    return [normal(i, B, *tokens, H, x, dtype=dtype) for i, x in enumerate((D, D, P))]


def call(op, q, k, v, params=PARAMS, implementation=None, **options):
    """One call with the map."""
    if op == "decode_step":
        options["state"] = ops.State(jnp.ones((B, H, 32, P)), None)
    return getattr(ops, op)(
        q, k, v, features=MAP, params=params, implementation=implementation, **options
    )


def loss(op, implementation, q, k, v, params):
    """A scalar of all results."""
    y, state = call(op, q, k, v, params, implementation, normalize="rms")
    return jnp.sum(jnp.sin(y.astype(jnp.float32))) + jnp.sum(jnp.sin(state.S))


def gradients(op, implementation):
    """The jitted gradients of `loss`."""
    return jax.jit(jax.grad(functools.partial(loss, op, implementation), argnums=(0, 1, 2, 3)))


def lowered(f, platform, *args):
    """The text of f lowered for a platform; TPU kernels need to know which TPU."""
    with jax.sharding.use_abstract_mesh(TPU):
        return f.trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("op", ["causal", "bidirectional", "decode_step"])
def test_a_cpu_process_traces_nothing_but_xla(op):
    found, expected = (
        str(jax.make_jaxpr(functools.partial(call, op, implementation=i))(*inputs(op)))
        for i in (None, "xla")
    )
    assert found == expected


@pytest.mark.parametrize(("platform", "kernel"), PLATFORMS)
def test_calls_run_where_they_are_lowered(platform, kernel, present):
    """With gradients; on the CPU beside the accelerator, bits, memory and all, as by `xla`."""
    present(**{platform: 1})
    op = "causal" if platform == "cuda" else "bidirectional"
    args = *inputs(op), PARAMS
    chosen = gradients(op, None)
    assert kernel in lowered(chosen, platform, *args)
    assert kernel not in lowered(chosen, "cpu", *args)
    portable = gradients(op, "xla")
    chosen, portable = (f.lower(*args).compile() for f in (chosen, portable))
    for a, b in zip(jax.tree.leaves(chosen(*args)), jax.tree.leaves(portable(*args))):
        np.testing.assert_array_equal(a, b)
    found, allowed = (f.memory_analysis().temp_size_in_bytes for f in (chosen, portable))
    assert found <= allowed


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "kernel"), PLATFORMS)
def test_transformations(platform, kernel, present):
    """Gradients of layers that are scanned, rematerialised and vectorised."""
    present(**{platform: 1})
    q, k, _ = inputs()

    def deep(implementation, q, params):
        @jax.checkpoint
        def layer(x, _):
            return call("causal", x, k, k, params, implementation)[0], None

        return jnp.sum(jax.lax.scan(layer, q, None, length=3)[0].astype(jnp.float32))

    def many(implementation, q, params):
        return jnp.sum(jax.vmap(functools.partial(deep, implementation), (0, None))(q, params))

    x = jnp.stack([q, 2 * q])
    chosen, portable = (
        jax.jit(jax.grad(functools.partial(many, i), argnums=(0, 1))) for i in (None, "xla")
    )
    assert kernel in lowered(chosen, platform, x, PARAMS)
    for a, b in zip(*(jax.tree.leaves(g(x, PARAMS)) for g in (chosen, portable))):
        np.testing.assert_array_equal(a, b)


def test_decoding_on_a_gpu_is_that_of_xla(present):
    present(cuda=1)
    step = functools.partial(call, "decode_step")
    jaxpr = jax.make_jaxpr(step)(*inputs("decode_step"))
    assert "platform_index" not in str(jaxpr)
    present(tpu=1)
    assert "tpu_custom_call" in lowered(jax.jit(step), "tpu", *inputs("decode_step"))


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        ({"cuda": 1}, {"dtype": jnp.float32}),
        ({"cuda": 1}, {"eager": True}),  # its arrays are on the CPU
        ({"tpu": 1}, {"dtype": jnp.float16}),
        ({"cuda": 8}, {"dtype": jnp.float32}),
    ],
)
def test_calls_that_kernels_are_not_made_for_fall_back_without_a_word(devices, options, present):
    """Warnings are errors here."""
    present(**devices)
    options = dict(options)
    f = functools.partial(call, "causal")
    f = f if options.pop("eager", False) else jax.jit(f)
    jaxpr = jax.make_jaxpr(f)(*inputs(**options)) if options else None
    assert "platform_index" not in str(jaxpr)
    f(*inputs(**options))


@pytest.mark.parametrize(
    ("devices", "options", "reason"),
    [
        pytest.param({"cuda": 1}, {"segment_ids": jnp.zeros((B, T), int)}, "no segment_ids",
                     marks=PLATFORMS[0].marks),
        ({"tpu": 4}, {}, "4 devices, and jit cannot partition"),
    ],
)  # fmt: skip
def test_other_calls_fall_back_aloud(devices, options, reason, present):
    """The warning names the line of the caller."""
    present(**devices)
    f = functools.partial(call, "bidirectional", **options)
    with pytest.warns(UserWarning, match=f"{reason}.*; trying xla") as caught:
        jaxpr = jax.make_jaxpr(f)(*inputs())
    assert caught[0].filename == __file__
    assert "platform_index" not in str(jaxpr)


def test_many_devices_inside_shard_map(present):
    """There, each device has its own call."""
    present(tpu=4)
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,))
    spec = PartitionSpec("x")
    f = jax.shard_map(
        lambda *x: call("bidirectional", *x)[0], mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "platform_index" in str(jax.make_jaxpr(f)(*inputs()))


def test_unknown_platforms_are_left_to_xla(present):
    present(rocm=1)
    assert "platform_index" not in str(jax.make_jaxpr(functools.partial(call, "causal"))(*inputs()))


def test_the_devices_of_this_process():
    assert dispatch.devices()[jax.default_backend().replace("gpu", "cuda")] == jax.device_count()
