"""Settings and tolerances that all tests share, and the record of how far methods are off.

`pytest -m oracle --oracle_errors=FILE.json` writes the largest relative errors of the tests that
compare a method with code of others or with a formula or loop in float64, their oracle.
"""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from toy_run import ToyConfig, pretrain_only, run_toy

# Most of the time of a test goes to compilation for the CPU, which these halve. XLA reads them at
# its first program; commands that tests run inherit them.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if jax.__version_info__ < (0, 11):  # later ones have no choice
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, os.environ.get("XLA_FLAGS", "")])

# Two float32 sums of the same few hundred terms in another order differ by a few units in the last
# place (6e-8) of their largest partial sum; 2e-5 of the tensor's maximum leaves room for partial
# sums that are larger than the result, and none for a lower precision (bfloat16 would be 4e-3).
FLOAT32_TOLERANCE = 2e-5


# The relative errors that the running test has compared.
_errors: list[float] = []


def pytest_addoption(parser):
    parser.addoption("--oracle_errors", help="JSON file to write: method -> oracle -> error")


def pytest_configure(config):
    if config.getoption("--oracle_errors") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ErrorReport(config.getoption("--oracle_errors")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Hand the largest error of a test marked `oracle` to the report, also from a worker."""
    _errors.clear()
    result = yield
    for mark in item.iter_markers("oracle"):
        assert _errors, "the test is marked `oracle`, but has recorded no error"
        for method in mark.args:
            entry = (method, mark.kwargs["source"], max(_errors))
            item.user_properties.append(("oracle", entry))
    return result


class ErrorReport:
    """Collects the errors of passed tests and writes them when the session ends."""

    def __init__(self, path: str):
        self.path = path
        self.errors: dict[str, dict[str, float]] = {}

    def pytest_runtest_logreport(self, report):
        for kind, entry in report.user_properties:
            if report.when == "call" and report.passed and kind == "oracle":
                method, source, error = entry
                oracles = self.errors.setdefault(method, {})
                oracles[source] = max(error, oracles.get(source, 0.0))

    def pytest_sessionfinish(self):
        rounded = {
            method: {source: float(f"{error:.2g}") for source, error in oracles.items()}
            for method, oracles in self.errors.items()
        }
        with open(self.path, "w") as file:
            json.dump(rounded, file, indent=1, sort_keys=True)
            file.write("\n")


def record_error(error: float) -> None:
    """Note a relative error of the running test, for the report."""
    _errors.append(float(error))


# Each warpgroup of an interpreted Mosaic GPU kernel waits in a thread of XLA's pool, which has one
# per core: with fewer cores than such threads it was seen to wait for ever (jax 0.12, two cores).
needs_gpu_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams") or (os.cpu_count() or 1) < 8,
    reason="interpreting Mosaic GPU kernels needs jax >= 0.11 and 8 cores",
)


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
        record_error(error)
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
