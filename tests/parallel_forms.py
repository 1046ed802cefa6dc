"""Sequences over 8 simulated devices against one device; run by `test_parallel.py`.

A script, as the number of devices is fixed when JAX starts. Prints relative errors and the bytes of
collectives as JSON.
"""

import functools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # compiles faster

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from conftest import relative_error  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from lowrank_attn import layers, ops, parallel  # noqa: E402
from lowrank_attn.layers.causal_conv import causal_conv  # noqa: E402
from lowrank_attn.layers.visibility import segment_numbers  # noqa: E402
from lowrank_attn.models.decoder import Decoder  # noqa: E402

B, T, HQ, H, D, P = 2, 43, 4, 2, 5, 3
TOKENS = PartitionSpec("data", "context")
ROWS = PartitionSpec("data")
# Documents that begin at borders (8 shards have 6 tokens, 4 have 11), inside shards, and reach over
# several; ids come back.
SEGMENTS = np.array([[3] * 6 + [1] * 5 + [3] * 21 + [2] * 11, [0] * 11 + [4] * 32])


class Call(NamedTuple):
    """A call of `causal`."""

    rule: str
    normalize: str = "none"
    mapped: bool = False
    packed: bool = True


CALLS = {
    "additive": Call("additive", "sum", mapped=True),
    "decay": Call("decay", mapped=True),
    "decay with a sum": Call("decay", "sum_plus_one"),
    "gla": Call("gla", "sum_plus_one"),
    "delta": Call("delta", "rms", packed=False),
    "kda": Call("kda"),
}
# call, shards, scan; over 8 devices with the chunks of `xla`, else token by token
CUTS = [
    *(("additive", shards, "all_gather") for shards in (1, 2, 4, 8)),
    *(("decay", shards, "all_gather") for shards in (1, 2, 4, 8)),
    *(("gla", shards, "all_gather") for shards in (1, 2, 4, 8)),
    *(("delta", shards, "all_gather") for shards in (1, 2, 4, 8)),
    ("decay with a sum", 4, "all_gather"),
    ("kda", 8, "ppermute"),
    ("additive", 4, "ppermute"),
]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def make_mesh(shards: int) -> jax.sharding.Mesh:
    """The sequence over `shards` devices, the batch over two where there are enough."""
    data = min(B, 8 // shards)
    devices = jax.devices()[: data * shards]
    return jax.make_mesh((data, shards), ("data", "context"), (AxisType.Auto,) * 2, devices=devices)


def trained_arrays(call: Call) -> dict[str, Any]:
    """The arguments of a call that have gradients."""
    M = 2 * D if call.mapped else D
    q, k, v = normal(0, B, T, HQ, D), normal(1, B, T, H, D), normal(2, B, T, H, P)
    if not ops.RULES[call.rule].sums:
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
    if call.normalize == "sum_plus_one":
        q, k = np.abs(q), np.abs(k)
    gates = {}
    if "log_decay" in ops.RULES[call.rule].gates:
        size = (M,) if ops.RULES[call.rule].per_feature else ()
        gates["log_decay"] = -0.2 * np.abs(normal(3, B, T, H, *size))
    if "beta" in ops.RULES[call.rule].gates:
        gates["beta"] = 1 / (1 + np.exp(normal(4, B, T, H)))
    z = np.abs(normal(5, B, H, M)) if call.normalize.startswith("sum") else None
    state = ops.State(0.3 * np.abs(normal(6, B, H, M, P)), z)
    params = {"scale": 1 + 0.1 * normal(7, H, 1)} if call.mapped else {}
    return {"q": q, "k": k, "v": v, "gates": gates, "initial_state": state, "params": params}


def positional(params, x, *, is_query, positions):
    """Features max(0, scale x) times cos and sin of an angle that grows with the position."""
    scale = jnp.repeat(params["scale"], x.shape[2] // H, axis=0)
    angle = positions[..., None, None] * (jnp.pi / 2 / T)
    x = jax.nn.relu(x * scale)
    return jnp.concatenate([x * jnp.cos(angle), x * jnp.sin(angle)], axis=-1)


def over_devices(f, shards: int):
    """`f` of arrays that are cut, and of `whole` arrays, as a function of one device."""

    def cut(whole=None, **x):
        whole = {} if whole is None else whole
        x, mask = parallel.pad_tokens(x, shards)
        specs = {"initial_state": ROWS, "params": PartitionSpec()}
        y, state = jax.shard_map(
            lambda x, mask, whole: f(**x, mask=mask, **whole),
            mesh=make_mesh(shards),
            in_specs=(TOKENS, TOKENS, {name: specs[name] for name in whole}),
            out_specs=(TOKENS, ROWS),
        )(x, mask, whole)
        return y[:, :T], state

    return cut


def outputs_and_gradients(f, x: dict[str, Any]) -> list[np.ndarray]:
    """Outputs, and gradients of a sum of them with weights that differ."""

    def loss(x):
        out = f(**x)
        return sum(jnp.sum(jnp.sin(jnp.arange(y.size).reshape(y.shape)) * y)
                   for y in jax.tree.leaves(out)), out  # fmt: skip

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    return [np.asarray(x) for x in jax.tree.leaves((out, gradients))]


def largest_error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(relative_error(f, e) for f, e in zip(found, expected, strict=True))


def options(name: str) -> dict[str, Any]:
    call = CALLS[name]
    features = positional if call.mapped else None
    return {"rule": call.rule, "normalize": call.normalize, "features": features, "chunk_size": 4}


@functools.cache
def on_one_device(name: str) -> list[np.ndarray]:
    fixed = {"segment_ids": jnp.asarray(SEGMENTS)} if CALLS[name].packed else {}
    f = functools.partial(ops.causal, **options(name), **fixed, implementation="reference")
    return outputs_and_gradients(f, trained_arrays(CALLS[name]))


def error_of_causal(name: str, shards: int, scan: str) -> float:
    implementation = "xla" if shards == 8 else "reference"
    f = over_devices(
        functools.partial(
            parallel.causal, **options(name), scan=scan, implementation=implementation
        ),
        shards,
    )
    fixed = {"segment_ids": jnp.asarray(SEGMENTS)} if CALLS[name].packed else {}

    def call(params, initial_state, **x):
        return f({"params": params, "initial_state": initial_state}, **x, **fixed)

    found = outputs_and_gradients(call, trained_arrays(CALLS[name]))
    return largest_error(found, on_one_device(name))


def error_of_window(window: int, shards: int) -> float:
    """Sliding windows that are shorter, or longer, than a shard."""
    x = {name: trained_arrays(CALLS["delta"])[name] for name in "qkv"}
    segment_ids = jnp.asarray(SEGMENTS)

    def attend(kernel, q, k, v, segment_ids, mask=None):
        return kernel({}, q, k, v, causal=True, mask=mask, segment_ids=segment_ids), None

    one = functools.partial(attend, layers.ATTENTION["sliding_window"](window=window))
    cut = over_devices(
        functools.partial(attend, layers.ATTENTION["sliding_window"](window, "context")), shards
    )
    return largest_error(*(
        outputs_and_gradients(functools.partial(f, segment_ids=segment_ids), x) for f in (cut, one)
    ))  # fmt: skip


def error_of_convolution(width: int, shards: int) -> float:
    """Filters that are shorter, or longer, than a shard."""
    segment_ids = jnp.asarray(SEGMENTS)

    def cut(x, filters, segment_ids, mask):
        past = parallel.halo(x, "context", width - 1, segment_ids)
        return causal_conv(x, filters, segment_numbers(segment_ids), past), None

    def one(x, filters):
        return causal_conv(x, filters, segment_numbers(segment_ids)), None

    def all_shards(x, filters):
        f = functools.partial(cut, filters=filters)
        return over_devices(f, shards)(x=x, segment_ids=segment_ids)

    x = {"x": normal(9, B, T, D), "filters": normal(8, D, width)}
    return largest_error(*(outputs_and_gradients(f, x) for f in (all_shards, one)))


def communication(f, length: int, gates: tuple[str, ...] = ()) -> dict[str, int]:
    """Bytes of the collectives in the compiled gradient of outputs, by their kind.

    Counted are results, which a device receives, and of reduce-scatter what it sends.
    """
    x = {name: jax.ShapeDtypeStruct((B, length, heads, size), jnp.float32)
         for name, heads, size in (("q", HQ, D), ("k", H, D), ("v", H, P))}  # fmt: skip
    x["gates"] = {name: jax.ShapeDtypeStruct((B, length, H), jnp.float32) for name in gates}
    cut = jax.shard_map(
        lambda x: f(**x)[0], mesh=make_mesh(8), in_specs=(TOKENS,), out_specs=TOKENS
    )
    program = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(cut(x)))))
    found: Counter[str] = Counter()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    text = program.lower(x).compile().as_text()
    for shapes, kind in re.findall(rf"= (.+?) ({kinds})(?:-start)?\(", text):
        for bits, sizes in re.findall(r"[a-z]+(\d*)\[([\d,]+)\]", shapes):
            count = math.prod(int(n) for n in sizes.split(",")) * int(bits or 8) // 8
            found[kind] += count * (8 if kind == "reduce-scatter" else 1)
    return dict(found)


def window_of_12(q, k, v, gates):
    return layers.ATTENTION["sliding_window"](12, "context")({}, q, k, v, causal=True), None


def all_communication() -> dict[str, list[dict[str, int]]]:
    """Of shards of 16 and of 64 tokens."""
    by_steps = functools.partial(parallel.causal, scan="ppermute")
    calls: dict[str, tuple[Callable, tuple[str, ...]]] = {
        "additive": (parallel.causal, ()),
        "additive in steps": (by_steps, ()),
        "delta": (functools.partial(parallel.causal, rule="delta"), ("beta",)),
        "window": (window_of_12, ()),
    }
    return {
        name: [communication(f, length, gates) for length in (128, 512)]
        for name, (f, gates) in calls.items()
    }


def of_a_decoder() -> tuple[float, dict[str, list[int]]]:
    """The error of a sharded decoder's logits, and the shapes of its parameters on a device."""
    mixers = {"linear": {"num_heads": 4, "num_kv_heads": 1}, "short_conv": {}}
    model = Decoder(32, 16, ("linear", "short_conv"), mixers, mlp_width=24, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    tokens = np.random.default_rng(0).integers(0, 32, (4, 16))
    logits = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens)[0])
    mesh = parallel.make_mesh(fsdp=2, tensor=2, context=2)
    placed = jax.device_put(params, parallel.shardings(params, mesh))
    found = logits(placed, jax.device_put(tokens, NamedSharding(mesh, parallel.TOKENS)))
    parts = {
        jax.tree_util.keystr(path, simple=True, separator="/"): list(
            x.sharding.shard_shape(x.shape)
        )
        for path, x in jax.tree_util.tree_leaves_with_path(placed)
    }
    return relative_error(found, logits(params, tokens)), parts


def main():
    errors = {f"{name}, {shards} shards, {scan}": error_of_causal(name, shards, scan)
              for name, shards, scan in CUTS}  # fmt: skip
    errors |= {f"window {W}, {n} shards": error_of_window(W, n) for W, n in ((4, 4), (13, 8))}
    errors |= {f"filter {K}, {n} shards": error_of_convolution(K, n) for K, n in ((4, 4), (9, 8))}
    errors["decoder"], parts = of_a_decoder()
    report = {"errors": errors, "communication": all_communication(), "parts": parts}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
