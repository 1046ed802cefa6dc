"""The mesh of a training run, and where parameters lie on it, by their names."""

import math
import re
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "context", "tensor")

# Tokens [B, T, ...]: the batch over `data` and `fsdp`, the sequence over `context`.
TOKENS = PartitionSpec(("data", "fsdp"), "context")

# Name -> how its leading axes are cut. The first rule with a fitting name and no more axes than the
# parameter has holds; all other parameters are on every device.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    ("(query|key|value)/kernel", PartitionSpec("fsdp", "tensor")),  # [E, H, D]
    ("(query|key|value)/bias", PartitionSpec("tensor")),  # [H, D]
    ("qkv/kernel", PartitionSpec("fsdp", None, "tensor")),  # [E, 3, H, D]
    ("out/kernel", PartitionSpec("tensor", None, "fsdp")),  # [H, P, E]
    ("attend/(phi/.*|gain)", PartitionSpec("tensor")),  # [H, ...]
    ("up/kernel", PartitionSpec("fsdp", None, "tensor")),  # [E, 2, F]
    ("up/kernel", PartitionSpec("fsdp", "tensor")),  # [E, F]
    ("up/bias", PartitionSpec(None, "tensor")),  # [2, F]
    ("up/bias", PartitionSpec("tensor")),  # [F]
    ("(out|down)/kernel", PartitionSpec("tensor", "fsdp")),  # [F, E]
    ("conv", PartitionSpec("tensor")),  # [F, K]
    ("(embedding|head)/embedding", PartitionSpec("tensor", "fsdp")),  # [V, E]
)


def make_mesh(
    *,
    data: int | None = None,
    fsdp: int = 1,
    tensor: int = 1,
    context: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with the axes `data`, `fsdp`, `context` and `tensor`, neighbours along the last.

    Args:
        data: devices over which the batch is cut, each with all parameters; None: all that the
            other axes leave.
        fsdp: devices over which the batch and the parameters are cut.
        tensor: devices over which heads and hidden sizes are cut.
        context: devices over which the sequence is cut; see `causal`.
        devices: which; None: all of them.

    Raises:
        ValueError: if the sizes are not positive, or their product is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    others = {"fsdp": fsdp, "context": context, "tensor": tensor}
    product = math.prod(others.values())
    if data is None and product > 0:
        data = len(devices) // product
    sizes = {"data": data or 0} | others
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != len(devices):
        wanted = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"{wanted} for {len(devices)} devices, expected positive sizes whose product is the "
            "number of devices; data=None takes what the others leave."
        )
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices
    )


def active_mesh() -> AbstractMesh | None:
    """The mesh of `make_mesh` over which `jit` spreads arrays here, made current by `jax.set_mesh`.

    None if there is none, for a single device, inside `jax.shard_map`, and for meshes of others.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != AXES or mesh.size == 1 or not mesh.are_all_axes_auto:
        return None
    return mesh


def row_axes(mesh: AbstractMesh | Mesh, rows: int) -> tuple[str, ...]:
    """The axes that cut a batch: `data` and `fsdp` if their product divides the number of rows."""
    return ("data", "fsdp") if rows % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else ()


def cut_tokens(x: jax.Array) -> jax.Array:
    """Let x [B, T, ...] lie on the active mesh as tokens do; without one it is returned as it is.

    A batch or a sequence that the mesh does not divide stays whole.
    """
    mesh = active_mesh()
    if mesh is None:
        return x
    tokens = "context" if x.shape[1] % mesh.shape["context"] == 0 else None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(row_axes(mesh, len(x)), tokens))


def cut_table(table: jax.Array) -> jax.Array:
    """Let a table [V, E] lie on the active mesh as a lookup reads it: V over `tensor`, E whole."""
    mesh = active_mesh()
    if mesh is None:
        return table
    return jax.lax.with_sharding_constraint(
        table, _dividing(PartitionSpec("tensor"), table.shape, mesh)
    )


def shardings(params, mesh: Mesh, rules: Sequence[tuple[str, PartitionSpec]] = RULES):
    """Where each parameter lies, for `jax.device_put`, `jax.jit` and restoring checkpoints.

    An axis that the mesh does not divide, such as the one head of multi-query keys, stays whole.

    Args:
        params: arrays or their shapes in any tree whose paths are names: `nnx.state(model)`, Linen
            variables, or the state of an optimizer with the same names inside.
        mesh: see `make_mesh`.
        rules: (pattern of the end of a path, how the leading axes are cut); see `RULES`.

    Returns:
        The tree with a `NamedSharding` for each array.
    """

    def one(path, x):
        name = re.sub("(/value)+$", "", jax.tree_util.keystr(path, simple=True, separator="/"))
        for pattern, spec in rules:
            if len(spec) <= x.ndim and re.search(f"(^|/)({pattern})$", name):
                return NamedSharding(mesh, _dividing(spec, x.shape, mesh))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(one, params)


def _dividing(spec, shape, mesh):
    """Without the axes of the mesh that do not divide those of an array."""

    def count(names):
        return math.prod(mesh.shape[name] for name in jax.tree.leaves(names))

    return PartitionSpec(*(names if size % count(names) == 0 else None
                           for names, size in zip(spec, shape)))  # fmt: skip
