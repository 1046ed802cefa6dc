"""Where the arrays of a run lie: the mesh that `--mesh` asks for, and batches and states on it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.common.flags import parse_options
from lowrank_attn import parallel
from lowrank_attn.parallel.mesh import AXES, row_axes


def make_mesh(text: str = "", devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of `--mesh`.

    Args:
        text: sizes such as `data=2,fsdp=2,tensor=2,context=1`; an axis that is not named has one
            device, `data` all that the others leave.
        devices: which; None: all of all processes.

    Raises:
        ValueError: naming the flag.
    """
    sizes = parse_options("mesh", text)
    for name, size in sizes.items():
        if name not in AXES or not isinstance(size, int) or isinstance(size, bool):
            raise ValueError(
                f"mesh={text!r}: {name}={size!r}, expected a number of devices for one of "
                f"{', '.join(AXES)}."
            )
    try:
        return parallel.make_mesh(**sizes, devices=devices)
    except ValueError as error:
        raise ValueError(f"mesh={text!r}: {error}") from error


def check_divides(text: str, mesh: Mesh, sizes: Mapping[str, tuple[int, tuple[str, ...]]]) -> None:
    """Refuse a mesh that was asked for and does not divide what it is to cut.

    Args:
        text: the flag; empty: nothing was asked for.
        mesh: what it means.
        sizes: setting -> its value, and the axes that cut it.

    Raises:
        ValueError: naming the flag and the setting.
    """
    for setting, (size, axes) in sizes.items():
        parts = int(np.prod([mesh.shape[axis] for axis in axes]))
        if text and size % parts:
            raise ValueError(
                f"mesh={text!r} cuts {setting}={size} into {' x '.join(axes)} = {parts} parts, "
                f"expected a multiple of {parts}."
            )


def batch_shardings(
    batch: Mapping[str, Any], mesh: Mesh, axis: int = 0
) -> dict[str, NamedSharding]:
    """How the arrays [B, ...] of a batch lie: rows over `data` and `fsdp`, if that divides evenly.

    Tokens [B, T, ...] are cut over `context` too. `axis` is that of rows.
    """

    def one(x):
        rows = row_axes(mesh, x.shape[axis])
        has_tokens = x.ndim > axis + 1 and x.shape[axis + 1] % mesh.shape["context"] == 0
        tokens = ("context",) if has_tokens and mesh.shape["context"] > 1 else ()
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, rows or None, *tokens))

    return {name: one(x) for name, x in batch.items()}


def own_rows(batch_size: int, mesh: Mesh) -> np.ndarray | None:
    """The rows of a batch that lie on devices of this process; None: all."""
    if jax.process_count() == 1:
        return None
    rows = NamedSharding(mesh, PartitionSpec(row_axes(mesh, batch_size) or None))
    slices = rows.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[part] for part in slices]))


def place(
    batch: Mapping[str, np.ndarray], batch_size: int, mesh: Mesh, axis: int = 0
) -> dict[str, jax.Array]:
    """A batch on the devices, from the rows of this process; see `own_rows`, `batch_shardings`."""
    shapes = {
        name: jax.ShapeDtypeStruct((*x.shape[:axis], batch_size, *x.shape[axis + 1 :]), x.dtype)
        for name, x in batch.items()
    }
    shardings = batch_shardings(shapes, mesh, axis)
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), shardings)
    return {
        name: jax.make_array_from_process_local_data(shardings[name], x, shapes[name].shape)
        for name, x in batch.items()
    }


def abstract(tree: Any, shardings: Any) -> Any:
    """Shapes, dtypes and shardings of arrays."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def jit_evaluation(eval_fn: Callable, mesh: Mesh) -> jax.stages.Wrapped:
    """`eval_fn(params, batch, key)` under `jax.jit`; every process has its results."""
    return jax.jit(on_mesh(eval_fn, mesh), out_shardings=replicated(mesh))


def on_mesh(f: Callable, mesh: Mesh) -> Callable:
    """`f` for `jax.jit`, such that layers see the mesh while it is traced."""

    def traced(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return f(*arguments)

    return traced


def on_one_device(tree: Any) -> Any:
    """Arrays that are cut over devices, whole on the first one of this process."""
    everywhere = replicated(jax.tree.leaves(tree)[0].sharding.mesh)
    if everywhere.num_devices == 1:
        return tree
    whole = jax.jit(lambda x: x, out_shardings=everywhere)(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), whole)
