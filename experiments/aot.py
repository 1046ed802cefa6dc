"""The training step compiled for TPUs that are not there: what it needs, and whether it fits.

    python -m experiments.lm --aot=v5e:4x4 --mesh=data=4,fsdp=4 --model=based-360m
    python -m experiments.lra --aot=v5e:2x2 --task=listops

The whole step, with gradients and optimiser, goes through the real compiler, which libtpu has
(`pip install jax[tpu]`). No TPU is needed, and none is used where there is one.
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from experiments.collectives import collectives
from experiments.common.phase import Phase
from experiments.common.placement import make_mesh
from experiments.common.train_step import abstract_steps

GIB = 2**30


class Chip(NamedTuple):
    """A TPU generation.

    Attributes:
        hbm: bytes of memory of one device of JAX, from the maker's data sheets; a device is a chip,
            of v4 and tpu7x a core with half of a chip's memory.
        link: bytes per second of one link to a neighbour, one way, from "How to Scale Your Model"
            (jax-ml.github.io/scaling-book), where it has them.
    """

    hbm: int
    link: float | None


CHIPS = {
    "v4": Chip(16 * GIB, 4.5e10),
    "v5e": Chip(16 * GIB, 4.5e10),
    "v5p": Chip(95 * GIB, 9e10),
    "v6e": Chip(32 * GIB, 9e10),
    "tpu7x": Chip(96 * GIB, None),
}


def topology_devices(topology: str) -> Sequence[jax.Device]:
    """The devices of a slice that this process has not; it must not have used any others before.

    Args:
        topology: generation and shape, such as `v5e:4x4`.

    Raises:
        ValueError: for an unknown one.
        ImportError: without libtpu.
    """
    generation, _, shape = topology.partition(":")
    if generation not in CHIPS or not re.fullmatch(r"\d+(x\d+)+", shape):
        raise ValueError(
            f"aot={topology!r}, expected a generation ({', '.join(CHIPS)}) and a shape, such as "
            "v5e:4x4 or v5p:2x2x1."
        )
    # settings of libtpu, without which it looks for a TPU, a lock and other hosts
    os.environ |= {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_LOG_DIR": "disabled",
    }
    jax.config.update("jax_platforms", "cpu")
    try:
        import libtpu  # noqa: F401
    except ImportError as error:
        raise ImportError("compiling for TPUs needs libtpu: pip install 'jax[tpu]'.") from error
    # a host has 2 x 2 chips, or fewer where the slice has: not every libtpu sees that by itself
    sides = [int(side) for side in shape.split("x")]
    host = [min(side, 2) for side in sides[:2]] + [1]
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=topology, chips_per_host_bounds=host
        ).devices
    except Exception as error:  # jax raises bare runtime errors
        raise ValueError(f"aot={topology!r} is no topology of libtpu: {error}") from error


def topology_mesh(topology: str, mesh: str) -> Mesh:
    """The mesh of `--mesh` over the devices of `--aot`.

    Raises:
        ValueError, ImportError: see `topology_devices`, `placement.make_mesh`.
    """
    return make_mesh(mesh, list(topology_devices(topology)))


def report_step(phase: Phase, mesh: Mesh, topology: str) -> dict[str, Any]:
    """Compile one step of a phase, read off what it costs each device, and print that on stderr.

    Args:
        phase: the objective and the optimiser; its source needs one example.
        mesh: from `topology_mesh`.
        topology: the name of its devices.

    Returns:
        For JSON: `topology`, `devices`, `mesh`; `fits`, whether the compiler found room, and
        `hbm_bytes`, what there is. If it did, bytes of one device: `state_bytes` (parameters,
        moments and batch), `temporary_bytes`, `program_bytes`, `peak_bytes` (all together, without
        what is written in place); `flops` and `bytes_accessed` by the compiler's count, which has
        loops once and kernels not at all; `collectives`, kind -> number, payload and sent bytes. If
        not, `needed`, the compiler's words.
    """
    program, *arguments = abstract_steps(phase, mesh)
    report: dict[str, Any] = {
        "topology": topology,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "hbm_bytes": CHIPS[topology.partition(":")[0]].hbm,
    }
    lowered = program.lower(*arguments)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"[^\n]*\bhbm\b[^\n]*", str(error), re.IGNORECASE)
        if needed is None or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        report |= {"fits": False, "needed": needed.group()}
        print_report(report)
        return report
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    assert memory is not None and cost is not None and text is not None
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    report |= {
        "fits": True,
        "state_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "program_bytes": memory.generated_code_size_in_bytes,
        "peak_bytes": peak,
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
        "collectives": {kind: found._asdict() for kind, found in collectives(text).items()},
    }
    print_report(report)
    return report


def print_report(report: dict[str, Any]) -> None:
    """As lines for people, on stderr."""
    axes = " x ".join(f"{name} {size}" for name, size in report["mesh"].items() if size > 1)
    print(f"{report['topology']}: {report['devices']} devices, {axes or 'one'}", file=sys.stderr)
    hbm = f"{report['hbm_bytes'] / GIB:.0f} GiB"
    if "needed" in report:
        print(f"does not fit into {hbm}: {report['needed']}", file=sys.stderr)
        return
    state, temporary, peak = (
        f"{report[f'{name}_bytes'] / GIB:.2f}" for name in ("state", "temporary", "peak")
    )
    lines = [
        f"memory of a device: {peak} GiB ({state} state and batch, {temporary} temporary), fits "
        f"into {hbm}",
        f"operations of a device: {report['flops']:.3g}, {report['bytes_accessed']:.3g} bytes "
        "read and written (loops once, kernels not)",
    ]
    for kind, each in report["collectives"].items():
        lines.append(
            f"{kind}: {each['number']} of {each['payload'] / 2**20:.2f} MiB in all, a device sends "
            f"{each['sent'] / 2**20:.2f} MiB"
        )
    print("\n".join(lines), file=sys.stderr)
