"""What the TPU compiler makes of the Pallas kernels, without a TPU: cycles, memory, spills.

The causal operation is compiled ahead of time by libtpu, which writes its instruction schedule to a
folder; the schedule's length gives a time. Times are the compiler's plan, not measurements.

    python tpu_scripts/static_report.py --chip=v5e:2x2 --job=fused2     # one job, as JSON
    python tpu_scripts/static_report.py --table=experiments/results/tpu_static.md
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CHIPS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
CLOCK_GHZ = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}
HBM_GB_PER_S = {"v4": 615, "v5e": 820, "v5p": 1230, "v6e": 1640, "tpu7x": 3700}  # per core
# Name -> (factors of the LLoPS map, or None for features that are given; normaliser).
JOBS = {
    "scan": (None, "none"),
    "fused2": (2, "none"),
    "fused4": (4, "none"),
    "fused2_rms": (2, "rms"),
}
B, T, H, D, M, P = 1, 16384, 16, 128, 256, 128


def compile_job(chip: str, job: str, direction: str):
    """Compile one job for one chip; returns its text and (grid steps, inner trips, bytes in all).

    Arguments have the layout [B, H, T, X], as a projection can produce it at no cost.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding

    from lowrank_attn import features, ops
    from lowrank_attn.ops import pallas_tpu
    from lowrank_attn.ops.block_sizes import tpu_blocks

    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices
    sharding = SingleDeviceSharding(devices[0])

    def array(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    factors, normalize = JOBS[job]
    feature_map = params = None
    width = M
    if factors is not None:
        feature_map, width = features.llops(factors, M), D
        params = jax.eval_shape(lambda: feature_map.init(jax.random.key(0), D, H)[0])
        params = jax.tree.map(lambda x: array(x.shape, x.dtype), params)

    def forward(q, k, v, params):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        y, state = ops.causal(
            q, k, v, features=feature_map, params=params, normalize=normalize,
            implementation="pallas_tpu",
        )  # fmt: skip
        return y.swapaxes(1, 2), state

    def backward(q, k, v, params, cotangents):
        return jax.vjp(forward, q, k, v, params)[1](cotangents)

    x = array((B, H, T, width))
    arguments = [x, x, array((B, H, T, P)), params]
    with jax.sharding.use_abstract_mesh(Mesh(np.array(devices[:1]), ("x",)).abstract_mesh):
        sizes = tpu_blocks()
        if direction == "backward":
            state = ops.State(array((B, H, M, P), jnp.float32), None)
            arguments.append((array((B, H, T, P)), state))
        function = forward if direction == "forward" else backward
        traced = jax.jit(function).trace(*arguments)
        text = traced.lower().compile().as_text()
    grid = re.findall(r"grid=\(([\d, ]+)\)", str(traced.jaxpr))[-1]  # of the last kernel
    steps = math.prod(map(int, grid.split(",")))
    chunks = pallas_tpu.plan_chunks(sizes, T, 128)
    trips = chunks.span // chunks.backward_chunk if direction == "backward" else 1
    columns = 2 * width + 2 * P if direction == "forward" else 4 * width + 3 * P
    return text, (steps, trips, 2 * B * H * T * columns)


def read_schedule(folder: Path, kernel: str, trips: int) -> dict:
    """Cycles of one grid step of the kernel, fraction of the matrix units' slots in use, spills.

    The loop over the grid is the longest one. Loops inside count `trips` times; short branches,
    which initialise and write out, do not count. `mxu_busy` is None where there are inner loops,
    because the table of units says nothing about them.
    """

    def newest(suffix):
        return max(folder.glob(f"*{kernel}*-{suffix}.txt"), key=os.path.getmtime).read_text()

    loops, forward, end = [], [], 0
    for line in newest("[0-9]*-packed-bundles-post-ra").splitlines():
        address = re.match(r"\s*(0x[0-9a-f]+|0)\s+(?:LB|LH|LE|PB|PF|CT)?\s*:", line)
        if not address:
            continue
        at = int(address.group(1), 16)
        end = max(end, at + 1)
        for target in re.findall(r"sbr\.rel \(!?%p\d+_p\d+\) target bundleno = (\d+)", line):
            branch = sorted((at, int(target)))
            (loops if int(target) <= at else forward).append(branch)
    grid = max(loops, key=lambda loop: loop[1] - loop[0], default=[0, end])
    cycles = grid[1] - grid[0] + 1
    for low, high in forward:
        holds_another = any(low <= a and b <= high and (a, b) != (low, high) for a, b in forward)
        if not holds_another and high - low < 0.5 * (grid[1] - grid[0]):
            cycles -= max(0, high - low - 4)
    inner = [loop for loop in loops if loop != grid]
    cycles += sum((trips - 1) * (high - low + 1) for low, high in inner)

    lines = newest("*pre-delay_hlo-static-per-bundle-utilization").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("== CAPAC"))
    names = [name.strip() for name in lines[start + 1].split(",")]
    capacity = [int(c) for c in lines[start + 2].split()]
    rows = [[int(c) for c in line.split()] for line in lines[start + 3 :]
            if re.fullmatch(r"[\d ]+", line)]  # fmt: skip
    used = dict(zip(names, map(sum, zip(*rows))))
    slots = dict(zip(names, capacity))
    mxu = "MXU" if "MXU" in names else "MATMUL"
    return {
        "cycles": cycles,
        "mxu_busy": None if inner else used[mxu] / (slots[mxu] * cycles),
        "spills": used["VSTORE:SPILL"],
    }


def run_job(chip: str, job: str, direction: str) -> dict:
    """Compile and read one job. Call it once per process: libtpu reads its settings once."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "TPU_LOG_DIR": "disabled",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        text, (steps, trips, total_bytes) = compile_job(chip, job, direction)
        result = read_schedule(Path(folder), f"causal_attention_{direction}", trips)
    generation = chip.split(":")[0]
    clock = CLOCK_GHZ[generation]
    memory_cycles = total_bytes / steps / HBM_GB_PER_S[generation] * clock
    used = re.findall(r'"used_scoped_memory_configs":\[\{[^]]*"size":"?(\d+)', text)
    return result | {
        "steps": steps,
        "memory_cycles": round(memory_cycles),
        "ms": steps * max(result["cycles"], memory_cycles) / clock / 1e6,
        "vmem_mib": max(map(int, used)) / 2**20,
    }


def write_table(path: Path):
    """Run every job for every chip, each in a process of its own, and write a markdown table."""
    import importlib.metadata

    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("jax", "libtpu"))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    lines = [
        "# Static schedules of the TPU kernels",
        "",
        "Not measured on a TPU: cycles are the length of the compiler's schedule, times the grid "
        "steps, over the clock, or the memory traffic at full bandwidth where that takes longer.",
        f"B * H = {B * H}, T = {T}, D = {D}, M = {M}, P = {P}, bfloat16, one core, additive rule. "
        "`scan` takes features; `fusedp` maps them in the kernel by the default LLoPS map with p "
        "factors, QK norm and constants; `backward` is the one kernel for all gradients. "
        "Spills are vector registers stored per pass through the code.",
        f"Commit {commit}, {versions}. Made by "
        "`python tpu_scripts/static_report.py --table=experiments/results/tpu_static.md`.",
        "",
        "| chip | job | direction | ms | cycles / step | HBM cycles / step | steps | MXU busy "
        "| spills | VMEM MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for chip in CHIPS:
        for job in JOBS:
            for direction in ("forward", "backward"):
                command = [sys.executable, __file__, f"--chip={chip}", f"--job={job}"]
                done = subprocess.run(
                    [*command, f"--direction={direction}"], capture_output=True, text=True
                )
                if done.returncode:
                    raise RuntimeError(f"{chip} {job} {direction}: {done.stderr[-2000:]}")
                r = json.loads(done.stdout.splitlines()[-1])
                busy = "" if r["mxu_busy"] is None else f"{r['mxu_busy']:.0%}"
                lines.append(
                    f"| {chip.split(':')[0]} | {job} | {direction} | {r['ms']:.3f} | {r['cycles']} "
                    f"| {r['memory_cycles']} | {r['steps']} | {busy} | {r['spills']} "
                    f"| {r['vmem_mib']:.1f} |"
                )
                print(lines[-1], flush=True)
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=CHIPS, default="v5e:2x2")
    parser.add_argument("--job", choices=JOBS, default="fused2")
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--table", type=Path, help="write all jobs to this markdown file")
    options = parser.parse_args()
    if options.table:
        write_table(options.table)
    else:
        print(json.dumps(run_job(options.chip, options.job, options.direction)))
