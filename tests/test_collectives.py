"""The count of collectives: on a module written by hand, and on what XLA makes."""

import json
import os
import pathlib
import subprocess
import sys

from experiments.collectives import Collective, collectives

ROOT = pathlib.Path(__file__).parent.parent
MODULE = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[4,6])) -> (s32[], bf16[4,6]) {
  %ar = bf16[4,6]{1,0:T(8,128)(2,1)} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
}

%condition (p: (s32[], bf16[4,6])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%all-reduce-scatter.1 (p: f32[16]) -> f32[8] {
  %inner = f32[16]{0} all-reduce(%p), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%start (p: f32[2]) -> f32[8] {
  %part.1 = f32[8]{0} all-gather(%p), channel_id=3, replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}
}

%async_collective_fusion.2 (p: f32[2]) -> f32[8] {
  %part.2 = f32[8]{0} all-gather(%p), channel_id=3, replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}
}

ENTRY %main (p: bf16[4,6]) -> bf16[4,6] {
  %loop = (s32[], bf16[4,6]) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %rs = f32[8]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %async-collective-start.1 = f32[8]{0} fusion(%p), calls=%start
  %b = f32[8]{0} fusion(%p), calls=%async_collective_fusion.2
  %async-collective-done.1 = f32[8]{0} fusion(%p), calls=%start
  %cp = (u8[3]{0}, u8[3]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=4, source_target_pairs={{0,1}}
  %cpd = u8[3]{0} collective-permute-done(%cp)
  ROOT %all = (f32[], f32[4]{0}) all-reduce(%q, %r), channel_id=5, to_apply=%add
}
"""  # noqa: E501


def test_a_module_written_by_hand():
    """48 bytes over 4 devices, five times; 20 bytes over all 8; the others once."""
    assert collectives(MODULE) == {
        "all-reduce": Collective(6, 5 * 48 + 20, 5 * 2 * 48 * 3 // 4 + 2 * 20 * 7 // 8),
        "reduce-scatter": Collective(1, 64, 32),
        "all-gather": Collective(1, 32, 24),
        "collective-permute": Collective(1, 3, 3),
    }


PROGRAM = """
import json, jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from experiments.collectives import collectives
mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
def f(x):
    y = jax.lax.pcast(jax.lax.psum(x, "x"), "x", to="varying")
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2)]
    step = lambda c, _: (jax.lax.ppermute(jnp.sin(c), "x", pairs), None)
    y, _ = jax.lax.scan(step, y, length=7)
    return jax.lax.all_gather(y, "x"), jax.lax.psum_scatter(jnp.cos(y), "x", tiled=True)
g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=(P(None, "x"), P("x"))))
text = g.lower(jax.ShapeDtypeStruct((16, 3), jnp.float32)).compile().as_text()
print(json.dumps({k: v for k, v in collectives(text).items()}))
"""


def test_what_xla_makes_of_known_collectives():
    """Arrays [4, 3] of float32, 48 bytes, on each of 4 devices; 7 steps of a loop."""
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "all-reduce": [1, 48, 72],
        "collective-permute": [7, 7 * 48, 7 * 48],
        "all-gather": [1, 4 * 48, 3 * 48],
        "reduce-scatter": [1, 48, 36],
    }
