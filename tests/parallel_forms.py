"""Sequences over 8 simulated devices against one device; run by `test_parallel.py`.

A script, as the number of devices is fixed when JAX starts. Prints the relative errors and the
collectives as JSON.
"""

import functools
import json
import sys
from typing import Any, NamedTuple

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # compiles faster

import jax.numpy as jnp  # noqa: E402
from conftest import normal, relative_error  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

from lowrank_attn import features, ops, parallel  # noqa: E402

B, T, HQ, H, D, P = 2, 43, 4, 2, 5, 3
TOKENS = PartitionSpec("data", "context")
ROWS = PartitionSpec("data")
ALL = PartitionSpec()


class Case(NamedTuple):
    """A call, and how it is cut."""

    shards: int
    rule: str
    normalize: str = "none"
    packed: bool = False
    mapped: bool = False
    scan: str = "all_gather"
    implementation: str = "xla"


CASES = {
    "additive, 1 shard": Case(1, "additive", "sum", packed=True, mapped=True),
    "additive, 2 shards": Case(2, "additive", "sum", packed=True, mapped=True),
    "additive, 4 shards": Case(4, "additive", "rms", mapped=True),
    "additive, 8 shards": Case(8, "additive", "sum", packed=True, mapped=True),
    "additive, in steps": Case(8, "additive", "sum_plus_one", packed=True, scan="ppermute"),
    "decay, 2 shards": Case(2, "decay", "none", packed=True, mapped=True),
    "decay, 4 shards": Case(4, "decay", "sum_plus_one", packed=True),
    "decay, 8 shards": Case(8, "decay", "none", packed=True),
    "gla, 2 shards": Case(2, "gla", "rms"),
    "gla, 8 shards": Case(8, "gla", "sum_plus_one", packed=True),
    "delta, 2 shards": Case(2, "delta", "rms", packed=True),
    "delta, 8 shards": Case(8, "delta", "none", packed=True),
    "kda, in steps": Case(4, "kda", "none", packed=True, scan="ppermute"),
    "gated_delta, token by token": Case(8, "gated_delta", implementation="reference"),
}


def make_mesh(shards: int) -> jax.sharding.Mesh:
    data = min(2, 8 // shards)
    devices = jax.devices()[: data * shards]
    return jax.make_mesh((data, shards), ("data", "context"), (AxisType.Auto,) * 2, devices=devices)


def arguments(case: Case) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Arrays that are differentiated, arrays that are not, and the feature map."""
    M = 2 * D if case.mapped else D
    x = {name: normal(i, B, T, heads, size) for i, (name, heads, size) in
         enumerate((("q", HQ, D), ("k", H, D), ("v", H, P)))}  # fmt: skip
    if "delta" in case.rule or case.rule == "kda":
        x["k"] /= jnp.linalg.norm(x["k"], axis=-1, keepdims=True)
    if case.normalize == "sum_plus_one":
        x |= {name: jnp.abs(x[name]) for name in "qk"}
    rule = ops.RULES[case.rule]
    gates = {}
    if "log_decay" in rule.gates:
        size = (M,) if rule.per_feature else ()
        gates["log_decay"] = -0.2 * jnp.abs(normal(4, B, T, H, *size))
    if "beta" in rule.gates:
        gates["beta"] = jax.nn.sigmoid(normal(5, B, T, H))
    S = 0.3 * jnp.abs(normal(6, B, H, M, P))
    z = jnp.abs(normal(7, B, H, M)) if case.normalize.startswith("sum") else None
    trained = x | {"gates": gates, "initial_state": ops.State(S, z), "params": {}}
    fmap = None
    if case.mapped:  # depends on positions, and its features are not negative
        fmap = positional
        trained["params"] = {"scale": 1 + 0.1 * normal(8, H, 1)}
    fixed = {}
    if case.packed:  # documents that begin at borders, inside shards, and span several; ids return
        rows = [[3] * 6 + [1] * 5 + [3] * 21 + [2] * 11, [0] * 11 + [4] * 32]
        fixed["segment_ids"] = jnp.asarray(rows)
    return trained, fixed, fmap


def positional(params, x, *, is_query, positions):
    """Features max(0, scale x) cos(w t) and sin(w t), w t in the first quadrant."""
    scale = jnp.repeat(params["scale"], x.shape[2] // H, axis=0)
    angle = positions[..., None, None] * (jnp.pi / 2 / T)
    x = jax.nn.relu(x * scale)
    return jnp.concatenate([x * jnp.cos(angle), x * jnp.sin(angle)], axis=-1)


def error(case: Case) -> float:
    """The largest relative error of outputs, the state and all gradients."""
    trained, fixed, fmap = arguments(case)
    static = {"rule": case.rule, "normalize": case.normalize, "features": fmap, "chunk_size": 4}
    one = functools.partial(ops.causal, **static, implementation=case.implementation)
    mesh = make_mesh(case.shards)

    def cut(**x):
        call = functools.partial(
            parallel.causal, scan=case.scan, **static, implementation=case.implementation
        )
        whole = {name: x.pop(name) for name in ("params", "initial_state")}
        x, mask = parallel.pad_tokens(x, case.shards)
        specs = {"params": ALL, "initial_state": ROWS}
        y, state = jax.shard_map(
            lambda x, mask, whole: call(**x, mask=mask, **whole),
            mesh=mesh,
            in_specs=(TOKENS, TOKENS, specs),
            out_specs=(TOKENS, ROWS),
        )(x, mask, whole)
        return y[:, :T], state

    def results(f):
        def loss(trained):
            out = f(**trained, **fixed)
            return sum(jnp.vdot(jnp.sin(jnp.arange(x.size)), x) for x in jax.tree.leaves(out)), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
        return jax.tree.leaves((out, gradients))

    pairs = zip(results(cut), results(one), strict=True)
    return max(relative_error(found, expected) for found, expected in pairs)


if __name__ == "__main__":
    import time

    errors = {}
    for name, case in CASES.items():
        t = time.time()
        errors[name] = error(case)
        print(name, errors[name], time.time() - t, file=sys.stderr)
    json.dump({"errors": errors}, sys.stdout)
