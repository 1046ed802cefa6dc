"""Decoders over meshes of 8 simulated devices against one device; run by `test_mesh.py`.

A script, as the number of devices is fixed when JAX starts. Prints relative errors as JSON.
"""

import json
import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # compiles faster

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from conftest import relative_error  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from lowrank_attn import parallel  # noqa: E402
from lowrank_attn.models.decoder import Decoder  # noqa: E402

B = 4
HEADS = {"num_heads": 4, "qk_dim": 4}
MIXERS = {
    "short_conv": {"kernel_size": 4},
    "linear": {**HEADS, "use_rotary": True},
    "sliding_window": {"num_heads": 4, "window": 5},
}
BASED = {"layers": tuple(MIXERS), "mixers": MIXERS | {"linear": {**HEADS, "kernel": "taylor"}}}
LLOPS = {"layers": ("linear",), "mixers": MIXERS}
MESHES = {
    "data=2, context=4": {"data": 2, "context": 4},
    "context=8": {"context": 8},
    "tensor=2, fsdp=2, data=2": {"tensor": 2, "fsdp": 2, "data": 2},
}


def of_rule(rule):
    return {"layers": ("linear",), "mixers": {"linear": {**HEADS, "rule": rule, "kernel": "elu"}}}


def one_kv_head():
    return {"layers": ("linear",), "mixers": {"linear": {**HEADS, "num_kv_heads": 1}}}


def tokens_and_segments(T):
    """Documents of 1 to 9 tokens, which begin at borders of shards, inside, and reach over some."""
    rng = np.random.default_rng(T)
    tokens = rng.integers(0, 32, (B, T), dtype=np.int32)
    begins = rng.random((B, T)) < 0.2
    begins[0, :: T // 8 or 1] = True
    begins[1] = False
    return tokens, np.cumsum(begins, axis=1, dtype=np.int32)


def run(model, tokens, segments, mesh):
    """Logits, and the gradient of a sum of them with weights that differ."""
    graph, params = nnx.split(model, nnx.Param, ...)[0], nnx.state(model, nnx.Param)
    rest = nnx.state(model, nnx.Not(nnx.Param))

    def loss(params, tokens, segments):
        logits, _ = nnx.merge(graph, params, rest)(tokens, segment_ids=segments)
        return jnp.sum(jnp.sin(jnp.arange(logits.size).reshape(logits.shape)) * logits), logits

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    if mesh is None:
        (_, logits), grads = step(params, tokens, segments)
    else:
        params = jax.device_put(params, parallel.shardings(params, mesh))
        fits = tokens.shape[1] % mesh.shape["context"] == 0
        spec = parallel.TOKENS if fits else PartitionSpec(("data", "fsdp"))
        placed = jax.device_put((tokens, segments), NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            (_, logits), grads = step(params, *placed)
    return [np.asarray(x) for x in jax.tree.leaves((logits, grads))]


def errors(shape, T, meshes=MESHES):
    model = Decoder(32, 16, **shape, mlp_width=24, rngs=nnx.Rngs(0))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] == "kernel":
            variable.set_value(8 * variable[...])
    inputs = tokens_and_segments(T)
    expected = run(model, *inputs, None)
    return {
        name: max(
            relative_error(f, e)
            for f, e in zip(
                run(model, *inputs, parallel.make_mesh(**MESHES[name])), expected, strict=True
            )
        )
        for name in meshes
    }


def main():
    found = {"based": errors(BASED, 32), "based, T=37": errors(BASED, 37, ("context=8",))}
    found["llops"] = errors(LLOPS, 32, ("data=2, context=4",))
    for rule in ("retention", "kda"):
        found[rule] = errors(of_rule(rule), 32, ("data=2, context=4",))
    found["one head of keys"] = errors(one_kv_head(), 32, ("tensor=2, fsdp=2, data=2",))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
