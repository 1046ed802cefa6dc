"""Inside `jax.shard_map`: over which axes of the mesh arrays vary."""

import jax


def varying_axes(tree) -> frozenset[str]:
    """The manual mesh axes over which any array of `tree` varies."""
    axes = (jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree))
    return frozenset().union(*axes)


def vary(tree, axes: frozenset[str]):
    """Let all arrays of `tree` vary over `axes` too, as carries of scans and kernels need."""

    def one(x):
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)
