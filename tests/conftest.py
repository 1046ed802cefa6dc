"""Settings and tolerances that all tests share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_run import ToyConfig, pretrain_only, run_toy

# Two float32 sums of the same few hundred terms in another order differ by a few units in the last
# place (6e-8) of their largest partial sum; 2e-5 of the tensor's maximum leaves room for partial
# sums that are larger than the result, and none for a lower precision (bfloat16 would be 4e-3).
FLOAT32_TOLERANCE = 2e-5


def relative_error(found: jax.Array, expected: jax.Array) -> float:
    """The largest difference over the largest magnitude expected."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert np.all(np.isfinite(found))
    return float(np.max(np.abs(found - expected)) / (np.max(np.abs(expected)) + 1e-30))


def assert_close(found, expected, tolerance: float = FLOAT32_TOLERANCE) -> None:
    """Every leaf of `found` is within `tolerance` of the largest magnitude of its counterpart."""
    found, expected = (jax.tree_util.tree_leaves_with_path(tree) for tree in (found, expected))
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (path, f), (_, e) in zip(found, expected):
        error = relative_error(f, e)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.2e} > {tolerance:.0e}"


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    """Standard normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    """The settings and the folder of a run of one phase with checkpoints 8 and 16."""
    config = ToyConfig(pretrain_steps=16)
    run_dir = tmp_path_factory.mktemp("short")
    run_toy(config, run_dir, pretrain_only(config))
    return config, run_dir
