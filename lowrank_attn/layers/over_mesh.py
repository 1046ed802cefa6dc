"""Layers over the devices of a mesh: how a call is cut, and what runs on each device.

`jit` can spread everything over devices except kernels and what must go from token to token. Where
a mesh of `parallel.make_mesh` is current, these parts run inside `jax.shard_map`: rows cut over
`data` and `fsdp`, tokens over `context`, heads over `tensor`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from lowrank_attn.layers.base import AttentionMethod
from lowrank_attn.layers.causal_conv import causal_conv
from lowrank_attn.layers.visibility import segment_numbers
from lowrank_attn.parallel.halo import halo
from lowrank_attn.parallel.mesh import active_mesh, row_axes
from lowrank_attn.parallel.padding import pad_tokens


class Cut(NamedTuple):
    """The axes of a mesh that cut a call; None: not cut.

    Attributes:
        rows: cut the B axis.
        tokens: cuts the T axis.
        heads: cuts the heads of queries.
        kv_heads: cuts the heads of keys and values.
    """

    rows: tuple[str, ...]
    tokens: str | None
    heads: str | None
    kv_heads: str | None

    def specs(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """How the named arguments of a call of attention are cut."""
        found = {}
        for name, x in arrays.items():
            if name == "q":
                found[name] = PartitionSpec(self.rows, self.tokens, self.heads)
            elif name in ("params", "initial_state"):
                rows = () if name == "params" else (self.rows,)
                found[name] = PartitionSpec(*rows, self.kv_heads)
            elif name in ("mask", "segment_ids"):
                found[name] = PartitionSpec(self.rows, self.tokens)
            elif name == "positions":
                rows = (self.rows,) if x.ndim == 2 else ()
                found[name] = PartitionSpec(*rows, self.tokens)
            else:  # k, v, gates
                found[name] = PartitionSpec(self.rows, self.tokens, self.kv_heads)
        return found


def cut_of(mesh: AbstractMesh, q: jax.Array, k: jax.Array, over_tokens: bool) -> Cut:
    """How a mesh cuts queries [B, T, Hq, D] and keys [B, S, H, D].

    Axes that do not divide rows or heads are left out: all devices along them compute the same.
    One head of keys stays whole beside heads of queries that are cut.
    """
    size = mesh.shape["tensor"]
    kv_heads = "tensor" if k.shape[2] % size == 0 else None
    heads = "tensor" if kv_heads or (k.shape[2] == 1 and q.shape[2] % size == 0) else None
    tokens = "context" if over_tokens and mesh.shape["context"] > 1 else None
    return Cut(row_axes(mesh, len(q)), tokens, heads, kv_heads)


def attention_over_mesh(
    call: Callable[..., tuple[jax.Array, Any]],
    call_of_shards: Callable[..., tuple[jax.Array, Any]] | None,
    arrays: dict[str, Any],
) -> tuple[jax.Array, Any]:
    """Linear attention, over the devices of the current mesh if there is one.

    Args:
        call: `call(**arrays)` gives y [B, T, Hq, P] and the `State`, on one device.
        call_of_shards: the same for a sequence that is cut over `context`, inside `shard_map`.
            None: it cannot be cut.
        arrays: the arguments of `ops.causal`: q, k, v, params, gates, mask, segment_ids, positions
            and initial_state, without those that are None.

    Raises:
        ValueError: if the mesh cuts sequences and there is no form for that.
    """
    mesh = active_mesh()
    if mesh is None:
        return call(**arrays)
    T = arrays["q"].shape[1]
    is_step = T == 1 and "initial_state" in arrays
    cut = cut_of(mesh, arrays["q"], arrays["k"], over_tokens=not is_step)
    if cut.tokens:
        if call_of_shards is None:
            raise ValueError(
                f"the mesh has context={mesh.shape['context']}, and attention that is not causal "
                "cannot be cut along the sequence. Set causal=True, or context=1 and cut the batch "
                "(data, fsdp) or the heads (tensor)."
            )
        call = call_of_shards
        arrays = _padded(arrays, mesh.shape["context"])

    def on_each(arrays):
        y, state = call(**arrays)
        if cut.heads and not cut.kv_heads:  # the same on all; the mean says so
            state = jax.lax.pmean(state, "tensor")
        return y, state

    y, state = jax.shard_map(
        on_each,
        in_specs=(cut.specs(arrays),),
        out_specs=(
            PartitionSpec(cut.rows, cut.tokens, cut.heads),
            PartitionSpec(cut.rows, cut.kv_heads),
        ),
    )(arrays)
    return y[:, :T], state


def method_over_mesh(
    method: AttentionMethod,
    params: dict[str, jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """An attention method, with the sequence cut if the mesh does so; else `jit` spreads it.

    Raises:
        ValueError: if the mesh cuts sequences and the method reads all tokens.
    """
    mesh = active_mesh()
    if mesh is None or mesh.shape["context"] == 1:
        return method(params, q, k, v, causal=causal, mask=mask, segment_ids=segment_ids)
    if method.cut is None:
        raise ValueError(
            f"the mesh has context={mesh.shape['context']}, but this kernel reads all tokens of a "
            "sequence, which cannot be cut: of kernels that are no feature map only "
            "sliding_window can. Set context=1 and cut the batch (data, fsdp) or the heads "
            "(tensor), or take a linear kernel, such as llops."
        )
    arrays = {"q": q, "k": k, "v": v, "mask": mask, "segment_ids": segment_ids}
    arrays = _padded({n: x for n, x in arrays.items() if x is not None}, mesh.shape["context"])
    cut = cut_of(mesh, q, k, over_tokens=True)
    of_shards = method.cut("context")
    y = jax.shard_map(
        lambda arrays: of_shards(params, causal=causal, **arrays),
        in_specs=(cut.specs(arrays),),
        out_specs=PartitionSpec(cut.rows, cut.tokens, cut.heads),
    )(arrays)
    return y[:, : q.shape[1]]


def conv_over_mesh(x: jax.Array, filters: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """`causal_conv` of x [B, T, I] with filters [I, K], over the devices of the current mesh."""

    def conv(x, filters, segment_ids, past=None):
        segment = None if segment_ids is None else segment_numbers(segment_ids)
        return causal_conv(x, filters, segment, past)

    mesh = active_mesh()
    if mesh is None or mesh.shape["context"] == 1:
        return conv(x, filters, segment_ids)

    def on_each(x, filters, segment_ids):
        past = halo(x, "context", filters.shape[1] - 1, segment_ids)
        return conv(x, filters, segment_ids, past)

    T, rows = x.shape[1], row_axes(mesh, len(x))
    channels = "tensor" if x.shape[2] % mesh.shape["tensor"] == 0 else None
    (x, segment_ids), _ = pad_tokens((x, segment_ids), mesh.shape["context"])
    tokens = PartitionSpec(rows, "context")
    y = jax.shard_map(
        on_each,
        in_specs=(
            PartitionSpec(rows, "context", channels),
            PartitionSpec(channels),
            None if segment_ids is None else tokens,
        ),
        out_specs=PartitionSpec(rows, "context", channels),
    )(x, filters, segment_ids)
    return y[:, :T]


def _padded(arrays, shards):
    """The arguments of a call with a number of tokens that `shards` divides."""
    T = arrays["q"].shape[1]
    if T % shards == 0:
        return arrays
    fixed = {name: arrays[name] for name in ("params", "initial_state") if name in arrays}
    tokens = {name: x for name, x in arrays.items() if name not in fixed}
    if "positions" in tokens:
        tokens["positions"] = jnp.broadcast_to(tokens["positions"], arrays["q"].shape[:2])
    tokens, real = pad_tokens(tokens, shards)
    return {**tokens, **fixed, "mask": tokens["mask"] & real if "mask" in tokens else real}
