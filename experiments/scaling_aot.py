"""How a training step scales to many TPUs, from programs compiled ahead of time; none is run.

    python -m experiments.scaling_aot --model=based-360m --rows=8 --remat=dots

Every slice has the same rows per device, so a step should cost each device what it costs one. Each
compilation is a process of its own, `experiments.lm --aot`. Writes `<out>.csv` and `<out>.md` after
each; rows that are in the CSV file already are not compiled again.
"""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys
from typing import Any

from experiments.aot import CHIPS, GIB
from experiments.common import flags
from experiments.common.flags import setting
from experiments.common.record import markdown_table, read_csv, write_csv, write_text
from experiments.flops import PEAK_FLOPS
from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.models.decoder import REMAT
from lowrank_attn.models.decoder_configs import CONFIGS

MFU = 0.4  # of the products, for times
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5p", "v6e": "TPU v6 lite"}
FSDP = 16  # most devices that parameters are cut over; the rest is along `data`
KEYS = ("model", "kernel", "rows", "length", "remat", "slice", "mesh")
COLUMNS = (
    *KEYS, "devices", "gib", "tflops", "flops_of_one", "bytes_of_one", "sent_mib", "ideal_mib",
    "compute_ms", "link_ms", "efficiency", "overlapped",
)  # fmt: skip
NOTES = f"""# A training step on many TPUs, by the compiler

Not measured on a TPU. Each line is a whole training step (gradients, AdamW, bfloat16), compiled by
libtpu for a slice, with `rows` rows of `length` tokens per device.

* `gib`: memory of a device. `does not fit`: the compiler found no room.
* `tflops`: operations of a device by formula (`experiments.flops`), in 10^12.
* `flops_of_one`, `bytes_of_one`: the compiler's count of operations, and of bytes read and written,
  of a device over those of the same step on one device; 1 is ideal. It has loops once and Pallas
  kernels not at all, on all lines alike.
* `sent_mib`: what a device sends along rings, all collectives of the step. `ideal_mib`, of P
  parameters: 3 (f - 1) / f of 2 P bytes for f devices along `fsdp` (bfloat16 parameters for both
  passes, gradients scattered), and 2 (d - 1) / d of 2 P / f bytes for d devices along `data`
  (gradients once).
* `compute_ms`: `tflops` at {MFU:.0%} of the peak. `link_ms`: `sent_mib` over two links, one in each
  direction of a ring along one axis of the torus, at their rates in "How to Scale Your Model".
  `efficiency`: compute over compute and link one after another; `overlapped`: if one hides the
  other. Latency, stragglers, input and links shared by several rings are left out.
"""


@dataclasses.dataclass(frozen=True)
class Config:
    """Compile the training step of a language model for slices of growing size."""

    model: str = setting("based-tiny", "shape", choices=tuple(CONFIGS))
    kernel: str = setting("llops", "of linear layers", choices=tuple(FEATURE_MAPS))
    slices: str = setting("v5e:1x1,v5e:2x2,v5e:4x4,v5e:8x8,v5e:16x16", "the first has one device")
    axes: str = setting("data,fsdp", f"data: all devices; fsdp: up to {FSDP}, the rest along data")
    rows: int = setting(8, "per device")
    length: int = setting(2048, "tokens of a row")
    remat: str = setting("none", "what of a block is computed again", choices=tuple(REMAT))
    out: str = setting("experiments/results/aot_scaling", "files to write, without suffix")

    def __post_init__(self) -> None:
        """Refuse slices and axes that the table has not.

        Raises:
            ValueError: naming the setting.
        """
        for slice_ in self.slices.split(","):
            if not re.fullmatch(rf"({'|'.join(KINDS)}):\d+(x\d+)+", slice_):
                raise ValueError(
                    f"slices={self.slices!r} has {slice_!r}, expected one of {', '.join(KINDS)} "
                    "and a shape, such as v5e:4x4."
                )
        if unknown := set(self.axes.split(",")) - {"data", "fsdp"}:
            raise ValueError(f"axes={self.axes!r} has {unknown}, expected data, fsdp.")


def compile_line(config: Config, slice_: str, mesh: str) -> dict[str, Any]:
    """Compile for one slice; what `experiments.lm --aot` says.

    Raises:
        RuntimeError: with its message, if it fails.
    """
    command = [
        sys.executable, "-m", "experiments.lm", f"--aot={slice_}", f"--mesh={mesh}",
        f"--model={config.model}", f"--kernel={config.kernel}", f"--length={config.length}",
        f"--batch_size={config.rows * devices(slice_)}", f"--remat={config.remat}",
        "--accumulate=1", "--dtype=bfloat16",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{slice_}, {mesh}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def devices(slice_: str) -> int:
    """The number of devices of a slice with one per chip, such as v5e:4x4."""
    return math.prod(int(size) for size in slice_.partition(":")[2].split("x"))


def line(report: dict[str, Any], one: dict[str, Any] | None) -> dict[str, Any]:
    """A line of the table from a report, and that of one device."""
    if not report["fits"]:
        return {"gib": "does not fit"}
    data, fsdp = (report["mesh"][axis] for axis in ("data", "fsdp"))
    gathered = 3 * (fsdp - 1) / fsdp + 2 * (data - 1) / data / fsdp
    generation = report["topology"].partition(":")[0]
    sent = sum(each["sent"] for each in report["collectives"].values())
    found: dict[str, Any] = {
        "gib": report["peak_bytes"] / GIB,
        "tflops": report["model_flops"] / 1e12,
        "sent_mib": sent / 2**20,
        "ideal_mib": gathered * 2 * report["parameters"] / 2**20,
        "compute_ms": 1e3 * report["model_flops"] / (MFU * PEAK_FLOPS[KINDS[generation]]),
        "link_ms": 1e3 * sent / (2 * (CHIPS[generation].link or 0)),
    }
    compute, link = found["compute_ms"], found["link_ms"]
    found |= {"efficiency": compute / (compute + link), "overlapped": compute / max(compute, link)}
    if one is not None and one["fits"]:
        found |= {
            "flops_of_one": report["flops"] / one["flops"],
            "bytes_of_one": report["bytes_accessed"] / one["bytes_accessed"],
        }
    return found


def write(lines: list[dict[str, str]], out: pathlib.Path) -> None:
    """Write the table as CSV and as markdown."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(f"{out}.csv", COLUMNS, lines)
    table = markdown_table(COLUMNS, ([each.get(name) or "" for name in COLUMNS] for each in lines))
    write_text(f"{out}.md", f"{NOTES}\n{table}\n")


def run(config: Config) -> None:
    """Compile what is not in the table yet."""
    out = pathlib.Path(config.out)
    lines = read_csv(f"{out}.csv", COLUMNS)
    one = None
    for slice_ in config.slices.split(","):
        for axis in config.axes.split(",") if devices(slice_) > 1 else ["data"]:
            fsdp = min(FSDP, devices(slice_)) if axis == "fsdp" else 1
            mesh = f"data={devices(slice_) // fsdp},fsdp={fsdp}"
            values = {**vars(config), "slice": slice_, "mesh": mesh}
            key = {name: str(values[name]) for name in KEYS}
            known = [{name: each[name] for name in KEYS} for each in lines]
            at = known.index(key) if key in known else len(lines)
            if at < len(lines) and devices(slice_) > 1:
                continue
            report = compile_line(config, slice_, mesh)
            one = report if devices(slice_) == 1 else one
            found = line(report, one)
            cells = {n: f"{x:.3g}" if isinstance(x, float) else str(x) for n, x in found.items()}
            new = {**key, "devices": str(devices(slice_)), **cells}
            lines[at : at + 1] = [new]
            write(lines, out)
            print(" ".join(f"{name}={x}" for name, x in new.items()), file=sys.stderr)


def main(argv: list[str]) -> None:
    """Run the command line."""
    config = flags.parse(Config, argv)
    try:
        run(config)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RuntimeError) else 2)


if __name__ == "__main__":
    main(sys.argv)
