"""Sequences over devices: against one device, what they communicate, and what is refused."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from conftest import FLOAT32_TOLERANCE, normal
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from lowrank_attn import layers, ops, parallel
from lowrank_attn.features import FEATURE_MAPS

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def report():
    """What 8 simulated devices say; see `parallel_forms`."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "tests/parallel_forms.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_outputs_states_and_gradients_are_those_of_one_device(report):
    wrong = {case: error for case, error in report["errors"].items() if error > FLOAT32_TOLERANCE}
    assert not wrong
    assert len(report["errors"]) == 24


def test_communication_does_not_depend_on_the_length(report):
    for short, long in report["communication"].values():
        assert short == long


def test_communication_is_what_the_docstrings_say(report):
    """B H M (P + 1) float32 numbers of each of 8 shards, for P = 3, M = 5 and 2 rows of 2 heads."""
    state = 2 * 2 * 5 * (3 + 1) * 4
    matrices = 2 * 2 * 5 * (3 + 5) * 4
    steps = 4 * state
    tokens = 2 * 12 * (2 * (5 + 3) * 4)  # keys and values of a window, 2 heads
    found = {name: short for name, (short, _) in report["communication"].items()}
    assert found["additive"] == {"all-gather": 8 * state, "reduce-scatter": 8 * state}
    assert found["delta"] == {"all-gather": 8 * matrices, "reduce-scatter": 8 * matrices}
    assert found["additive in steps"] == {"collective-permute": 2 * steps}
    real = 2 * 12  # one byte each
    assert found["window"] == {"collective-permute": 2 * tokens + real}


def test_parameters_are_cut_by_their_names(report):
    """Over fsdp=2 and tensor=2, for E = 16, 4 heads of 4, one of keys, MLPs of 24 and 32 tokens."""
    parts = report["parts"]
    expected = {
        "embedding/embedding": [16, 8],
        "blocks/0/mixer/query/kernel": [8, 2, 4],
        "blocks/0/mixer/key/kernel": [8, 1, 4],  # its one head cannot be cut
        "blocks/0/mixer/out/kernel": [2, 4, 8],
        "blocks/0/mixer/attend/gain": [2, 4],
        "blocks/0/mlp/up/kernel": [8, 2, 12],
        "blocks/0/mlp/out/kernel": [12, 8],
        "blocks/1/mixer/up/kernel": [8, 2, 16],
        "blocks/1/mixer/up/bias": [2, 16],
        "blocks/1/mixer/conv": [16, 3],
        "blocks/1/mixer/out/kernel": [16, 8],
        "norm/scale": [16],
    }
    assert {name: parts[f"{name}/value"] for name in expected} == expected


def test_sizes_of_a_mesh():
    device = jax.devices()[:1]
    assert dict(parallel.make_mesh(devices=device).shape) == {
        "data": 1, "fsdp": 1, "context": 1, "tensor": 1
    }  # fmt: skip
    with pytest.raises(ValueError, match="fsdp=1, context=1, tensor=2 for 1 devices"):
        parallel.make_mesh(tensor=2, devices=device)
    with pytest.raises(ValueError, match="expected positive sizes"):
        parallel.make_mesh(data=-1, fsdp=-1, devices=device)


def on_one_shard(f, *arrays):
    mesh = jax.make_mesh((1,), ("context",), (AxisType.Auto,), devices=jax.devices()[:1])
    spec = PartitionSpec(None, "context")
    return jax.shard_map(f, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec)(*arrays)


def test_the_operation_inside_shard_map():
    """Its empty state varies over the devices as its tokens do."""
    x = normal(0, 2, 12, 2, 4)
    y = on_one_shard(lambda x: ops.causal(x, x, x, chunk_size=4)[0], x)
    assert jnp.array_equal(y, jax.jit(lambda x: ops.causal(x, x, x, chunk_size=4)[0])(x))


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="the kernels need jax >= 0.11")
@pytest.mark.parametrize("op", [parallel.causal, ops.bidirectional])
def test_kernels_have_gradients_inside_shard_map(op):
    """Those of parameters are sums over the devices; only types are looked at, without a GPU."""
    kernel = FEATURE_MAPS["llops"](4, 64)
    params, _ = kernel.init(jax.random.key(0), 64, 2)

    def loss(x, params):
        def shard(x):
            return op(
                x, x, x, features=kernel, params=params, implementation="pallas_gpu"
            )[0]  # fmt: skip

        return jnp.sum(on_one_shard(shard, x).astype(jnp.float32))

    x = normal(0, 2, 64, 2, 64, dtype=jnp.bfloat16)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, params))
    assert "psum" in jaxpr


README_EXAMPLE = """
import re, sys
import jax, jax.numpy as jnp
from lowrank_attn import ops

jax.config.update("jax_num_cpu_devices", 8)
(example,) = re.findall(r"```python\\n(import jax\\nfrom lowrank_attn import parallel.*?)```",
                        open("README.md").read(), re.S)
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 21, 2, 4))
segment_ids = jnp.arange(21)[None].repeat(2, 0) // 6
want = ops.causal(q, k, v, segment_ids=segment_ids, implementation="xla")[0]
exec(example)
assert y.shape == (2, 24, 2, 4)
assert jnp.max(jnp.abs(y[:, :21] - want)) < 2e-5 * jnp.max(jnp.abs(want))
"""


def test_readme_example_runs():
    subprocess.run(
        [sys.executable, "-c", README_EXAMPLE],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        check=True,
    )


def test_unknown_scan():
    x = normal(0, 2, 4, 2, 4)
    with pytest.raises(ValueError, match="scan='ring' is unknown; known: all_gather, ppermute"):
        on_one_shard(lambda x: parallel.causal(x, x, x, scan="ring")[0], x)


def test_windows_look_back_only():
    x = normal(0, 2, 4, 2, 4)
    window = layers.ATTENTION["sliding_window"](2, "context")
    with pytest.raises(ValueError, match="causal=False .* set causal=True"):
        on_one_shard(lambda x: window({}, x, x, x, causal=False), x)
    with pytest.raises(ValueError, match="size=-1, expected"):
        on_one_shard(lambda x: parallel.halo(x, "context", -1), x)


def test_padding():
    x, mask = parallel.pad_tokens({"x": normal(0, 2, 5, 3), "ids": jnp.arange(10).reshape(2, 5)}, 4)
    assert x["x"].shape == (2, 8, 3)
    assert x["ids"][1].tolist() == [5, 6, 7, 8, 9, 9, 9, 9]
    assert mask.tolist() == [[True] * 5 + [False] * 3] * 2
    with pytest.raises(ValueError, match=r"shape \(2, 6\), expected \[2, 5, ...\]"):
        parallel.pad_tokens([jnp.zeros((2, 5)), jnp.zeros((2, 6))], 4)
