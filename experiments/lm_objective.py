"""The loss of a language model on rows of packed documents, without all logits in memory."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from experiments.objectives import Objective
from lowrank_attn.models.decoder import Decoder, table_logits
from lowrank_attn.ops.manual_axes import vary, varying_axes
from lowrank_attn.parallel.mesh import AXES, active_mesh, cut_table, row_axes

_HEAD_TOKENS = 4096  # whose logits are in memory at once


def next_token(module: Callable[[Any], Decoder], eot: int, accumulate: int = 1) -> Objective:
    """Cross entropy of the next token.

    A batch holds `tokens` and `targets` [B, T], and in evaluations `weight` [B]. A document begins
    at each `eot`, and nothing reaches from one to another.

    Args:
        module: `module(params)` is the model.
        eot: the id.
        accumulate: the gradient of a batch is computed in so many parts, one after another, which
            takes the memory of one; divides B.
    """

    def mean_loss(params, batch):
        weight = jnp.ones(batch["tokens"].shape[0])
        return _total(module(params), eot, batch, weight) / batch["tokens"].size

    def loss(params, batch, key):
        if accumulate == 1:
            return mean_loss(params, batch), {}
        # every part has rows of all devices
        parts = {
            name: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1)
            for name, x in batch.items()
        }
        total = sum_of_parts(lambda params, _, part: mean_loss(params, part), params, (), parts)
        return total / accumulate, {}

    def evaluate(params, batch, key):
        weight = batch["weight"]
        tokens = jnp.sum(weight) * batch["tokens"].shape[1]
        return {"loss": (_total(module(params), eot, batch, weight), tokens)}

    return Objective(loss, evaluate)


def sum_of_parts(
    f: Callable[[Any, Any, Any], jax.Array], params: Any, floats: Any, integers: Any
) -> jax.Array:
    """The sum over i of f(params, floats[i], integers[i]), whose gradient is computed on the way.

    So only one part's intermediate values are in memory at a time, and none is computed twice, as
    rematerialisation would.

    Args:
        f: gives a scalar; it must not depend on values that are differentiated and not its own.
        params: a tree of arrays, the same for all parts.
        floats: a tree of arrays [number of parts, ...], differentiated.
        integers: such a tree that is not.
    """
    axes = varying_axes((params, floats, integers))

    @jax.custom_vjp
    def total(params, floats, integers):
        return jax.lax.scan(
            lambda sum_, part: (sum_ + f(params, *part), None),
            vary(jnp.zeros(()), axes),
            (floats, integers),
        )[0]

    def forward(params, floats, integers):
        def step(sums, part):
            value, (dparams, dpart) = jax.value_and_grad(f, argnums=(0, 1))(params, *part)
            return jax.tree.map(jnp.add, sums, (value, dparams)), dpart

        start = vary((jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), axes)
        (value, dparams), dfloats = jax.lax.scan(step, start, (floats, integers))
        return value, (dparams, dfloats)

    def backward(gradients, dtotal):
        scaled = jax.tree.map(lambda g: (g * dtotal).astype(g.dtype), gradients)
        return *scaled, None

    total.defvjp(forward, backward)
    return total(params, floats, integers)


def _total(
    model: Decoder, eot: int, batch: Mapping[str, jax.Array], weight: jax.Array
) -> jax.Array:
    """The sum over tokens of their cross entropies, each times the weight of its row."""
    tokens = batch["tokens"].astype(jnp.int32)
    x, _ = model.hidden(tokens, segment_ids=jnp.cumsum(tokens == eot, axis=1))
    targets = batch["targets"].astype(jnp.int32)
    weights = jnp.broadcast_to(weight[:, None], tokens.shape)
    table = cut_table(model.head_table())
    mesh = active_mesh()
    if mesh is None:
        return _head_total(table, x, targets, weights)
    # every device has the sum of its tokens' losses, and their gradient is summed up once
    rows = tuple(axis for axis in row_axes(mesh, len(tokens)) if mesh.shape[axis] > 1)
    size = mesh.shape["context"]
    context = ("context",) if size > 1 and tokens.shape[1] % size == 0 else ()
    axes, spec = (*rows, *context), PartitionSpec(rows, context)
    if not axes:
        return _head_total(table, x, targets, weights)

    def on_each(table, *tokens):
        return jax.lax.psum(_head_total(vary(table, frozenset(axes)), *tokens), axes)

    manual = set(AXES) if mesh.shape["tensor"] == 1 else set(axes)
    return jax.shard_map(
        on_each,
        in_specs=(PartitionSpec(), spec, spec, spec),
        out_specs=PartitionSpec(),
        axis_names=manual,
    )(table, x, targets, weights)


def _head_total(
    table: jax.Array, x: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    """The sum of weighted losses of tokens x [B, T, E], with the logits of a part at a time."""
    B, T = targets.shape
    size = max(n for n in range(1, T + 1) if T % n == 0 and (n == 1 or n * B <= _HEAD_TOKENS))

    def in_parts(x):  # [B, T, ...] -> [T / size, B, size, ...]
        return x.reshape(B, -1, size, *x.shape[2:]).swapaxes(0, 1)

    def part_total(table, x, other):
        targets, weight = other
        losses = optax.softmax_cross_entropy_with_integer_labels(table_logits(x, table), targets)
        return jnp.sum(losses * weight)

    return sum_of_parts(part_total, table, in_parts(x), (in_parts(targets), in_parts(weights)))
