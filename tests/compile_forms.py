"""Compile every form of the parity tests for the TPU topology named on the command line.

A script, run by `test_pallas_tpu_compile`: libtpu reads its settings once per process.
"""

import os
import sys

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_pallas_tpu import FLOAT32, make_call, with_gradients

FORMS = FLOAT32 | {
    "packed": {"op": "bidirectional", "segments": True},
    "bfloat16": {"normalize": "rms", "G": 2, "segments": True, "mask": True, "dtype": jnp.bfloat16},
    "bfloat16_both": {
        "op": "bidirectional",
        "normalize": "sum",
        "mask": True,
        "dtype": jnp.bfloat16,
    },
    "bfloat16_decay": {
        "rule": "decay",
        "normalize": "sum",
        "segments": True,
        "dtype": jnp.bfloat16,
    },
    "decode": {"op": "decode_step", "B": 20, "mask": True, "dtype": jnp.bfloat16},
    "decode_sum": {"op": "decode_step", "B": 3, "rule": "decay", "normalize": "sum", "G": 2},
    "decode_odd": {"op": "decode_step", "map_": "odd", "H": 3},
}


def compile_form(devices, settings):
    call, x = make_call(**settings)
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), x
    )
    with jax.sharding.use_abstract_mesh(Mesh(np.array(devices[:1]), ("x",)).abstract_mesh):
        jax.jit(with_gradients(call, "pallas_tpu")).lower(x).compile()


def compile_sharded(devices):
    """Sequences over the devices, parameters on all of them, gradients summed by `shard_map`."""
    mesh = Mesh(np.array(devices), ("data",))
    call, x = make_call(B=len(devices), normalize="rms", mask=False)
    specs = jax.tree.map(lambda _: PartitionSpec("data"), x)
    specs["params"] = jax.tree.map(lambda _: PartitionSpec(), x["params"])
    x = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        x,
        specs,
    )

    def shard(x):
        return with_gradients(call, "pallas_tpu")(x)[1]

    gradients = jax.shard_map(shard, mesh=mesh, in_specs=(specs,), out_specs=specs)
    jax.jit(gradients).lower(x).compile()


if __name__ == "__main__":
    devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
    for name, settings in FORMS.items():
        if name == "map_with_constants" and sys.argv[1].startswith("v4"):
            continue  # a known limit: v4 cannot reshape what the gradient of SLAY's map needs
        print(name, flush=True)
        try:
            compile_form(devices, settings)
        except NotImplementedError as error:  # the one form that one chip cannot run
            assert name == "decode_sum" and "v4" in str(error), error
    print("sharded", flush=True)
    compile_sharded(devices)
    print("all compiled")
