"""Speed of the attention operations on this machine: python -m experiments.bench

Every row is one implementation at one shape. Before it is timed, the same call at a small shape is
compared with float32; a row whose error is too large is left out, aloud. Inputs are random and
rotate, so that small shapes do not run from the cache. Writes a CSV, a markdown table and a plot
after every row.
"""

import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags, logging

from experiments import bench_fla, bench_timing
from experiments.bench_cases import Case, arrays, cases, implementations
from experiments.bench_plot import plot_times
from experiments.common.record import markdown_table, write_csv, write_text
from lowrank_attn.ops import block_sizes, xla

_OUT = flags.DEFINE_string("out", "experiments/results", "Folder of the CSV, the table, the plot.")
_TOKENS = flags.DEFINE_list(
    "tokens", ["1024", "2048", "4096", "16384", "131072"], "Sequence lengths of the sweeps."
)
_MEMORY_TOKENS = flags.DEFINE_integer(
    "memory_tokens", 2**20, "Length of the one long sequence of 16 heads; 0: no such row."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timings per row, of which the median counts.")
_ONLY = flags.DEFINE_string(
    "only", "", "Regular expression found in `implementation kernel direction` of the rows to run."
)

COLUMNS = [
    "implementation", "direction", "kernel", "p", "normalize", "B", "T", "H", "D", "M", "P",
    "dtype", "device", "jax", "ms", "ms_spread", "kernel_ms", "rel_err", "tflops", "gbps",
    "roofline_fraction", "peak_mib", "compile_s", "block_sizes",
]  # fmt: skip
# Rounding of inputs, products and outputs to bfloat16, with room for what gradients add up.
FORWARD_TOLERANCE, BACKWARD_TOLERANCE = 6e-3, 1.2e-2
KERNELS = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}
SHORT = 4096  # tokens up to which the time of kernels is looked at, as calls wait for Python
COMPILED_AHEAD = 8  # rows, at the same time; none is compiled while another one is timed


class Row(NamedTuple):
    """What is measured: a case and who computes it."""

    case: Case
    implementation: str

    @property
    def prepare(self) -> Callable[[Case], bench_timing.Ready]:
        """What makes a case ready to be timed."""
        module = bench_fla if self.implementation.startswith("fla") else bench_timing
        return functools.partial(module.ready, implementation=self.implementation)


def compiled(row: Row) -> tuple[bench_timing.Ready, float] | None:
    """The compiled row and its error, or None, aloud, if it is unsupported or wrong."""
    limit = BACKWARD_TOLERANCE if row.case.backward else FORWARD_TOLERANCE
    try:
        rel_err = bench_timing.error(row.case, row.prepare)
        if rel_err < limit:
            return row.prepare(row.case), rel_err
        logging.error("left out, relative error %.1e >= %.1e: %s", rel_err, limit, row)
    except Exception as e:  # whatever a peer raises, the other rows are measured
        _left_out(row, e)
    return None


def _left_out(row, error):
    reason = str(error).splitlines() or [""]
    logging.warning("left out, %s: %s: %s", type(error).__name__, reason[0], row)


def measured(rows: list[Row], repeats: int, peaks: tuple[float, float]) -> Iterator[dict]:
    """Lines of the table, one for each row that can be computed and is right."""
    for first in range(0, len(rows), COMPILED_AHEAD):
        group = rows[first : first + COMPILED_AHEAD]
        with ThreadPoolExecutor(COMPILED_AHEAD) as pool:
            ready = list(pool.map(compiled, group))
        for row, it in zip(group, ready, strict=True):
            if it is not None:
                try:
                    yield timed(row, *it, repeats, peaks)
                except Exception as e:  # such as memory that ends
                    _left_out(row, e)


def timed(
    row: Row, it: bench_timing.Ready, rel_err: float, repeats: int, peaks: tuple[float, float]
) -> dict:
    """Time one row; the result is a line of the table."""
    case = row.case
    count = int(np.clip(256e6 // case.bytes(), 1, 8))
    sets = [it.convert(arrays(case, jax.random.key(10 + i))) for i in range(count)]
    ms, spread = bench_timing.milliseconds(it, sets, repeats)
    kernel_ms = None
    if case.T <= SHORT:
        kernel_ms = bench_timing.kernel_milliseconds(it, sets[0])
    flops, moved = case.flops(), case.bytes()
    limit = max(flops / peaks[0], moved / peaks[1])
    return case._asdict() | {
        "implementation": row.implementation,
        "dtype": "bfloat16",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "ms": f"{ms:.4f}",
        "ms_spread": f"{spread:.4f}",
        "kernel_ms": "" if kernel_ms is None else f"{kernel_ms:.4f}",
        "rel_err": f"{rel_err:.1e}",
        "tflops": f"{flops / ms / 1e9:.4g}",
        "gbps": f"{moved / ms / 1e6:.4g}",
        "roofline_fraction": f"{limit / ms * 1e3:.3f}",
        "peak_mib": "" if math.isnan(it.peak_mib) else f"{it.peak_mib:.1f}",
        "compile_s": "" if math.isnan(it.compile_s) else f"{it.compile_s:.1f}",
        "block_sizes": _block_sizes(row),
    }


def _block_sizes(row):
    if row.implementation == "pallas_tpu":
        sizes = block_sizes.tpu_blocks()._asdict()
    elif row.implementation == "xla" and row.case.chunked:
        sizes = {"chunk": block_sizes.xla_blocks(128).chunk, "span": xla.TOKENS_PER_SAVED_STATE}
    else:
        return "own"
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def write(lines: list[dict], folder: pathlib.Path, peaks: tuple[float, float]) -> None:
    """Write `bench_<device>.csv`, the same as a markdown table, and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"\W+", "_", jax.devices()[0].device_kind.lower())
    path = folder / f"bench_{device}.csv"
    write_csv(path, COLUMNS, lines)
    table = markdown_table(COLUMNS, ([line[c] for c in COLUMNS] for line in lines))
    rates = f"{peaks[0] / 1e12:.3g} TFLOP/s and {peaks[1] / 1e9:.0f} GB/s"
    write_text(
        path.with_suffix(".md"),
        f"Limits: {rates} (bfloat16 products and copies, measured).\n"
        "`peak_mib` is what the compiler assigns: arguments, outputs and temporary memory.\n\n"
        f"{table}\n",
    )
    plot_times(lines, path.with_suffix(".png"))


def main(_):
    """Measure every case with every implementation that has it."""
    kernels = KERNELS.get(jax.default_backend())
    rows = [
        Row(case, name)
        for case in cases([int(T) for T in _TOKENS.value], _MEMORY_TOKENS.value)
        for name in implementations(case, kernels)
        if re.search(_ONLY.value, f"{name} {case.kernel} {case.direction}")
    ]
    peaks = bench_timing.peaks()
    print(f"matrix products {peaks[0]:.3g} FLOP/s, copies {peaks[1]:.3g} B/s", flush=True)
    lines: list[dict] = []
    for line in measured(rows, _REPEATS.value, peaks):
        lines.append(line)
        print(" ".join(f"{c}={line[c]}" for c in COLUMNS), flush=True)
        write(lines, pathlib.Path(_OUT.value), peaks)


if __name__ == "__main__":
    app.run(main)
