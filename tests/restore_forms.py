"""Parameters of a small model through checkpoints over other meshes; run by `test_mesh.py`.

    JAX_NUM_CPU_DEVICES=4 python tests/restore_forms.py FOLDER STEP MESH

Draws them at step 1, else restores step - 1 onto the mesh; saves them as `step`; prints the digest
of their values, the number of devices, and how they are cut.
"""

import hashlib
import json
import sys

import jax
import numpy as np
from flax import nnx
from small_lm import SMALL

from experiments.common.checkpoint import Checkpoints
from experiments.common.placement import make_mesh
from lowrank_attn import parallel


def main(folder, step, mesh):
    mesh = make_mesh(mesh)
    params = nnx.state(SMALL.make(rngs=nnx.Rngs(int(step))), nnx.Param)
    state = jax.device_put(params, parallel.shardings(params, mesh))
    checkpoints = Checkpoints(folder)
    if checkpoints.latest_step() is not None:
        state = checkpoints.restore(int(step) - 1, state)
    checkpoints.save(int(step), state, {}, {}, None)
    checkpoints.close()
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.asarray(leaf).tobytes())
    cut = sorted({str(tuple(leaf.sharding.spec)) for leaf in jax.tree.leaves(state)})
    print(json.dumps([digest.hexdigest(), jax.device_count(), cut]))


if __name__ == "__main__":
    main(*sys.argv[1:])
