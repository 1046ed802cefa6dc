"""Time and memory of causal attention against the number of tokens, one row after the other.

`experiments.latency` and `experiments.slay_scaling` are two such sweeps. The table on disk is
complete after every row. A sweep that is started again keeps the rows which this code, this version
of jax and this device have measured, also those that ran out of memory, and goes on with the rest.
"""

import csv
import dataclasses
import functools
import pathlib
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from experiments import bench_timing, sweep_kernels, sweep_report
from experiments.common.flags import setting
from experiments.common.record import code_version, write_csv
from experiments.sweep_kernels import (
    DIRECTIONS,
    KERNELS,
    QUADRATIC,
    Point,
    arrays,
    num_features,
    program,
)

MEASURED = (
    "M", "computed_by", "device", "jax", "code", "status", "ms", "spread", "kernel_ms", "calls",
    "compiler_mib", "allocator_mib", "compile_s",
)  # fmt: skip
COLUMNS = (*Point._fields, *MEASURED)
OUT_OF_MEMORY = "out of memory"
SHORT = 4096  # tokens up to which the time of kernels is looked at, as calls wait for Python
TIMINGS = 10  # of which the median counts; calls are divided among them
# What a lowered program calls -> who computes it.
CALLS = {"mosaic_gpu": "pallas_gpu", "tpu_custom_call": "pallas_tpu", "cudnn": "cudnn"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a sweep."""

    out: str = setting("experiments/results", "folder of the CSV, the tables and the plot")
    quick: bool = setting(False, "a small sweep, to see that everything works")
    kernels: str = setting("llops_p2,softmax", "kernels, separated by commas")
    tokens: str = setting("1024", "lengths T, separated by commas, the most important first")
    directions: str = setting(",".join(DIRECTIONS), "forward, forward+backward, or both")
    longest_quadratic: int = setting(131072, "longest T of kernels at quadratic cost")
    batch: int = setting(1, "B")
    heads: int = setting(16, "H")
    head_size: int = setting(128, "D, also of values")
    dtype: str | None = setting(
        None,
        "of q, k, v; default bfloat16, on CPUs float32",
        choices=("bfloat16", "float16", "float32"),
    )
    repetitions: int = setting(1000, "most calls in the timings of a row")
    seconds_per_point: float = setting(0.5, "seconds of these calls, of which one is made anyway")
    compiled_ahead: int = setting(8, "rows compiled at the same time, none while one is timed")

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ValueError: naming the setting.
        """
        for name, known in (("kernels", KERNELS), ("directions", DIRECTIONS)):
            asked = getattr(self, name).split(",")
            unknown = [value for value in asked if value not in known]
            if unknown:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: {unknown[0]!r} is unknown; known: "
                    f"{', '.join(known)}."
                )
        if not all(T.isdecimal() and int(T) > 0 for T in self.tokens.split(",")):
            raise ValueError(
                f"tokens={self.tokens!r}, expected lengths such as 1000,2000, separated by commas."
            )
        for name in ("batch", "heads", "head_size", "repetitions", "compiled_ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1.")

    def points(self) -> list[Point]:
        """The rows in the order in which they are measured."""
        on_cpu = jax.default_backend() == "cpu"
        dtype = self.dtype or ("float32" if on_cpu else "bfloat16")
        found = [
            Point(kernel, direction, self.batch, T, self.heads, self.head_size, dtype)
            for direction in self.directions.split(",")
            for T in map(int, self.tokens.split(","))
            for kernel in self.kernels.split(",")
            if kernel not in QUADRATIC or self.longest_quadratic >= T
        ]
        return list(dict.fromkeys(found))


def run(config: Settings, name: str, about: str, published: sweep_report.Published) -> None:
    """Measure all points that are not in the table yet and write the report.

    Args:
        config: the settings.
        name: of the files, before the device and the suffix.
        about: the protocol and what was published, as the head of the report.
        published: the published numbers.
    """
    stem = f"{name}_quick" if config.quick else name
    device = re.sub(r"\W+", "_", jax.devices()[0].device_kind.lower())
    path = pathlib.Path(config.out) / f"{stem}_{device}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    points = config.points()
    lines = read(path)
    version = versions()
    todo = [p for p in points if not _is_done(lines.get(p), version)]
    print(f"{path}: {len(points) - len(todo)} of {len(points)} rows are there", flush=True)
    for first in range(0, len(todo), config.compiled_ahead):
        group = todo[first : first + config.compiled_ahead]
        with ThreadPoolExecutor(len(group)) as pool:
            ready = list(pool.map(compile_point, group))
        for point in group:
            lines[point] = (
                point._asdict()
                | version
                | {"M": num_features(point) or ""}
                | measure(point, ready.pop(0), config)
            )
            write_csv(path, COLUMNS, lines.values())
            print(" ".join(f"{k}={v}" for k, v in lines[point].items() if v != ""), flush=True)
        _report(points, lines, version, path, about, published)
    if not todo:
        _report(points, lines, version, path, about, published)


def _is_done(line: dict | None, version: dict[str, str]) -> bool:
    if line is None or line["status"] not in ("ok", OUT_OF_MEMORY):
        return False
    return version.items() <= line.items()


def _report(points, lines, version, path, about, published):
    """Report all that this version measured at these sizes, by length."""
    sizes = {(p.B, p.H, p.D, p.dtype) for p in points}
    current = [
        lines[p]
        for p in sorted(lines, key=lambda p: (p.direction, p.T, list(KERNELS).index(p.kernel)))
        if (p.B, p.H, p.D, p.dtype) in sizes and version.items() <= lines[p].items()
    ]
    sweep_report.write(current, path, about, published)


def versions() -> dict[str, str]:
    """What makes rows comparable: the device, jax, and a hash of the code that is measured."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "code": code_version(__file__, sweep_kernels.__file__, bench_timing.__file__),
    }


def read(path: pathlib.Path) -> dict[Point, dict[str, Any]]:
    """The rows of a table by point; none if there is no file."""
    if not path.is_file():
        return {}
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = Point.__annotations__
    return {Point(**{n: kinds[n](row[n]) for n in Point._fields}): row for row in rows}


def compile_point(point: Point) -> tuple[bench_timing.Ready, str] | Exception:
    """The compiled program and who computes it, or why there is none."""
    try:
        shapes = jax.eval_shape(functools.partial(arrays, point), jax.random.key(0))
        lowered = program(point).lower(**shapes)
        text = lowered.as_text()
        who = next((name for call, name in CALLS.items() if call in text), "xla")
        return bench_timing.compiled(lowered), who
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return error


def measure(
    point: Point, ready: tuple[bench_timing.Ready, str] | Exception, config: Settings
) -> dict[str, Any]:
    """Time and memory of a compiled point, or the status that says why there are none."""
    if isinstance(ready, Exception):
        return {"status": _status(ready)}
    it, who = ready
    memory = {
        "computed_by": who,
        "compiler_mib": f"{it.peak_mib:.3f}",
        "compile_s": f"{it.compile_s:.1f}",
    }
    if it.peak_mib * 2**20 > available_bytes():
        return memory | {"status": OUT_OF_MEMORY}
    try:
        return memory | timed(point, it, config) | {"status": "ok"}
    except RuntimeError as error:
        return memory | {"status": _status(error)}


def _status(error: Exception) -> str:
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or OUT_OF_MEMORY in text.lower():
        return OUT_OF_MEMORY
    return f"failed: {text.splitlines()[0][:200]}" if text else f"failed: {error!r}"


def available_bytes() -> float:
    """Memory that a program may take: the allocator's limit, or what the host has free."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    meminfo = pathlib.Path("/proc/meminfo")
    if not meminfo.is_file():
        return float("inf")
    kib = re.search(r"MemAvailable:\s+(\d+)", meminfo.read_text())
    return float("inf") if kib is None else 1024 * int(kib[1])


def timed(point: Point, it: bench_timing.Ready, config: Settings) -> dict[str, Any]:
    """The median time of a call.

    The time of the second call says how many there may be in `seconds_per_point`; they are
    dispatched one after the other in up to `TIMINGS` loops. The allocator's peak is noted where the
    first call raised it, else it belongs to an earlier row.
    """
    size = it.peak_mib * 2**20
    sets = [arrays(point, jax.random.key(i)) for i in range(int(np.clip(256e6 // size, 1, 8)))]
    jax.block_until_ready(sets)
    before = _allocator_peak()
    bench_timing.elapsed(it, sets, 1)
    peak = _allocator_peak()
    one = bench_timing.elapsed(it, sets, 1)
    calls = int(np.clip(config.seconds_per_point / one, 1, config.repetitions))
    loops = min(calls, TIMINGS)
    each = calls // loops
    times = [bench_timing.elapsed(it, sets, each) / each * 1e3 for _ in range(loops)]
    kernel_ms = bench_timing.kernel_milliseconds(it, sets[0]) if point.T <= SHORT else None
    return {
        "ms": f"{np.median(times):.4f}",
        "spread": f"{np.ptp(times):.4f}",
        "kernel_ms": "" if kernel_ms is None else f"{kernel_ms:.4f}",
        "calls": loops * each,
        "allocator_mib": f"{peak / 2**20:.1f}" if peak > before else "",
    }


def _allocator_peak() -> int:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", 0)
