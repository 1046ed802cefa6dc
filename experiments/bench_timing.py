"""How `experiments.bench` compiles, compares and times one call."""

import functools
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench_cases import Case, arrays, program

# The best of several measurements of whole cards.
PEAKS = {"NVIDIA H200": (790e12, 4.3e12)}
SECONDS = 0.05  # of calls in one timing


class Ready(NamedTuple):
    """A call that can be timed.

    Attributes:
        call: from what `convert` returns to outputs; it may return before they are computed.
        wait: returns when the outputs are there.
        convert: from the inputs of `arrays` to what `call` takes.
        to_numpy: from outputs to a list of float64 arrays.
        compile_s: seconds of compilation.
        peak_mib: arguments, outputs and temporary memory of the compiled program, in MiB.
    """

    call: Callable
    wait: Callable
    convert: Callable
    to_numpy: Callable
    compile_s: float
    peak_mib: float


def ready(case: Case, implementation: str) -> Ready:
    """Compile a case for an implementation in JAX.

    Raises:
        NotImplementedError: if the implementation cannot do the case.
    """
    shapes = jax.eval_shape(functools.partial(arrays, case), jax.random.key(0))
    return compiled(program(case, implementation).lower(**shapes), _options(case))


def compiled(lowered: jax.stages.Lowered, options: dict | None = None) -> Ready:
    """Compile a program of named arrays, with options of the compiler."""
    began = time.perf_counter()
    it = lowered.compile(options)
    compile_s = time.perf_counter() - began
    memory = it.memory_analysis()
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    peak = sum(getattr(memory, size, float("nan")) for size in sizes) / 2**20
    return in_jax(lambda x: it(**x), compile_s, peak)


def _options(case):
    """On GPUs without the search for the fastest products at the small shape."""
    quick = case == case.small() and jax.default_backend() == "gpu"
    return {"xla_gpu_autotune_level": 0} if quick else None


def in_jax(call: Callable, compile_s: float = float("nan"), peak: float = float("nan")) -> Ready:
    """A call from arrays to arrays of JAX."""

    def to_numpy(outputs):
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(outputs)]

    return Ready(call, jax.block_until_ready, lambda x: x, to_numpy, compile_s, peak)


def error(case: Case, prepare: Callable[[Case], Ready]) -> float:
    """The largest relative error of an output or gradient at a small shape against float32.

    Args:
        case: the case, of which `small()` is computed.
        prepare: makes a case `Ready`.
    """
    small = case.small()
    inputs = arrays(small, jax.random.key(3))
    it = prepare(small)
    got = it.call(it.convert(inputs))
    it.wait(got)
    pairs = zip(it.to_numpy(got), reference(small), strict=True)
    return float(max(_relative(a, b) for a, b in pairs))


@functools.cache
def reference(small: Case) -> list[np.ndarray]:
    """Outputs and gradients for the inputs of `error`, token by token in float32."""
    inputs = jax.tree.map(lambda x: x.astype(jnp.float32), arrays(small, jax.random.key(3)))
    with jax.default_matmul_precision("float32"):
        out = program(small, "reference").lower(**inputs).compile(_options(small))(**inputs)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(out)]


def _relative(found, expected):
    if not np.any(expected):  # parameters that do not matter, such as gains under a norm
        return np.linalg.norm(found)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def milliseconds(it: Ready, sets: list, repeats: int) -> tuple[float, float]:
    """Median and spread of the wall time of one call, over repeats of several calls."""
    it.wait([it.call(x) for x in sets[:2]])
    calls = int(np.clip(SECONDS / elapsed(it, sets, 1), 1, 1000))
    times = [elapsed(it, sets, calls) / calls * 1e3 for _ in range(repeats)]
    return float(np.median(times)), max(times) - min(times)


def elapsed(it: Ready, sets: list, calls: int) -> float:
    """Seconds of several calls after each other, with the sets of inputs in turn."""
    began = time.perf_counter()
    for i in range(calls):
        out = it.call(sets[i % len(sets)])
    it.wait(out)
    return time.perf_counter() - began


def kernel_milliseconds(it: Ready, inputs, calls: int = 5) -> float | None:
    """Time that the kernels of one call take on a GPU, a mean over calls; None elsewhere."""
    if jax.default_backend() != "gpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            it.wait([it.call(inputs) for _ in range(calls)])
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines]
        total = sum(e.duration_ns for line in lines if "Stream" in line.name for e in line.events)
    return total / calls / 1e6


def peaks() -> tuple[float, float]:
    """Operations a second of bfloat16 matrix products and bytes a second of copies on this device.

    Both on random data; a copy reads and writes each byte. They are measured now unless the device
    is in `PEAKS`.
    """
    if jax.devices()[0].device_kind in PEAKS:
        return PEAKS[jax.devices()[0].device_kind]
    small = jax.default_backend() == "cpu"
    n, rows = (1024, 2**13) if small else (8192, 2**17)
    a, b = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (rows, 4096), jnp.bfloat16)

    def seconds(f, *args):
        return milliseconds(in_jax(lambda args: f(*args)), [args], 5)[0] / 1e3

    return (
        2.0 * n**3 / seconds(jax.jit(jnp.matmul), a, b),
        2.0 * x.nbytes / seconds(jax.jit(jnp.negative), x),
    )
