"""Speed of the training step of a language model over meshes of all devices against one device.

    python -m experiments.scaling --model=based-360m --batch_size=16
    python -m experiments.scaling --batch_size=1 --length=524288 --remat=full --meshes=context=2

The work per device is the same everywhere: n devices along `data`, `fsdp` or `tensor` have n times
the rows, along `context` n times the tokens of a row. Efficiency is tokens per second over n times
those of one device. Rows are random tokens in documents of 500 on average. Prints lines as they
come, and writes `<out>.csv` and `<out>.md`.
"""

import dataclasses
import math
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments import lm
from experiments.common import flags
from experiments.common.data import take
from experiments.common.flags import setting
from experiments.common.placement import make_mesh, place
from experiments.common.record import markdown_table, write_csv, write_text
from experiments.common.train_step import jit_steps, new_state
from experiments.flops import peak_flops, training_flops
from experiments.lm_settings import Config as TrainConfig
from experiments.lm_settings import check_mesh
from experiments.lm_start import Start
from experiments.text_data.shards import TokenText
from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.models.decoder import REMAT
from lowrank_attn.models.decoder_configs import CONFIGS, DecoderConfig

ONE = "data=1"  # the mesh that others are compared with
DOCUMENT = 500  # tokens on average
COLUMNS = (
    "model", "kernel", "mesh", "devices", "rows", "length", "step_ms", "spread_ms",
    "tokens_per_second", "efficiency", "mfu", "gib_per_device", "loss", "device", "jax",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure the training step of a language model over meshes."""

    model: str = setting("based-360m", "shape", choices=tuple(CONFIGS))
    kernel: str | None = setting(
        None, "of linear layers; default: the model's", choices=tuple(FEATURE_MAPS)
    )
    meshes: str = setting(
        "", "with semicolons between; default: all devices along data; fsdp; tensor; context"
    )
    batch_size: int = setting(16, "rows per device")
    length: int = setting(2048, "tokens of a row per device along context")
    accumulate: int = setting(1, "parts of a batch, one after another")
    dtype: str = setting("bfloat16", "of the computation", choices=("float32", "bfloat16"))
    remat: str = setting("none", "what of a block is computed again", choices=tuple(REMAT))
    steps: int = setting(4, "per dispatch")
    repeats: int = setting(5, "dispatches that are timed, after one that is not")
    out: str = setting("scaling", "where the table goes, without .csv and .md")

    def __post_init__(self) -> None:
        """Refuse counts below 1.

        Raises:
            ValueError: naming the setting.
        """
        for name in ("batch_size", "length", "accumulate", "steps", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1.")


def random_text(tokens: int, vocab_size: int, seed: int = 0) -> TokenText:
    """So many random tokens in documents, as training and as validation data."""
    rng = np.random.default_rng(seed)
    eot = vocab_size - 1
    ids = rng.integers(0, eot, tokens).astype(np.uint16 if vocab_size < 2**16 else np.uint32)
    ids[rng.random(tokens) < 1 / DOCUMENT] = eot
    return TokenText(pathlib.Path(), {"train": [ids], "validation": [ids]}, eot, (), "random")


def training(config: Config, mesh: Mesh, text: str) -> tuple[TrainConfig, DecoderConfig]:
    """The settings of training with the work of all devices of a mesh.

    Raises:
        ValueError: if the mesh does not divide the model, or the kernel does not fit it.
    """
    rows = math.prod(mesh.shape[axis] for axis in ("data", "fsdp", "tensor"))
    settings = TrainConfig(
        data="random",
        tokenizer="bytes",
        model=config.model,
        kernel=config.kernel,
        batch_size=config.batch_size * rows,
        length=config.length * mesh.shape["context"],
        accumulate=config.accumulate,
        dtype=config.dtype,
        remat=config.remat,
        mesh=text,
    )
    decoder = CONFIGS[config.model]
    if config.kernel is not None:
        decoder = decoder.replace_mixer("linear", kernel=config.kernel, options={})
    return settings, decoder


def measure(config: Config, mesh: Mesh, text: str) -> dict[str, Any]:
    """Compile, run and time the step; a line of the table without its efficiency."""
    settings, decoder = training(config, mesh, text)
    tokens = settings.batch_size * settings.length
    phase, _ = lm.make_phase(
        settings, Start(decoder, None, None), random_text(tokens + 1, decoder.vocab_size)
    )
    state = new_state(phase, phase.init(jax.random.key(0), None), mesh)
    rows = take(phase.source, np.arange(settings.batch_size))
    batches = {n: np.broadcast_to(x, (config.steps, *x.shape)) for n, x in rows.items()}
    placed = place(batches, settings.batch_size, mesh, axis=1)
    steps = jit_steps(phase, mesh, jax.random.key(1), state).lower(state, placed).compile()
    memory = steps.memory_analysis()
    assert memory is not None
    seconds, metrics = [], None
    for _ in range(1 + config.repeats):
        began = time.perf_counter()
        state, metrics = steps(state, placed)
        losses = np.asarray(jax.block_until_ready(metrics)["loss"])
        seconds.append((time.perf_counter() - began) / config.steps)
    if not np.all(np.isfinite(losses)):
        raise RuntimeError(f"the loss is {losses[-1]}")
    seconds = seconds[1:]
    device = mesh.devices.flat[0].device_kind
    peak = peak_flops(device) if config.dtype == "bfloat16" else None
    speed = tokens / float(np.median(seconds))
    flops = training_flops(decoder, settings.length)
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return {
        "model": config.model,
        "kernel": config.kernel or "own",
        "mesh": text,
        "devices": mesh.size,
        "rows": settings.batch_size,
        "length": settings.length,
        "step_ms": float(np.median(seconds)) * 1e3,
        "spread_ms": (max(seconds) - min(seconds)) * 1e3,
        "tokens_per_second": speed,
        "mfu": peak and speed * flops / (peak * mesh.size),
        "gib_per_device": used / 2**30,
        "loss": float(losses[-1]),
        "device": device,
        "jax": jax.__version__,
    }


def write(lines: list[dict[str, Any]], out: pathlib.Path) -> None:
    """Write `<out>.csv` and `<out>.md`."""

    def cell(value):
        if value is None:
            return ""
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    table = markdown_table(COLUMNS, ([cell(line[name]) for name in COLUMNS] for line in lines))
    notes = (
        "Efficiency: tokens per second over those of one device times the number of devices, with "
        "the same work per device. `gib_per_device`: arguments and temporary memory as compiled.\n"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(f"{out}.csv", COLUMNS, lines)
    write_text(f"{out}.md", f"{notes}\n{table}\n")


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings end with exit code 2 and one message."""
    config = flags.parse(Config, argv)
    n = jax.device_count()
    texts = config.meshes or ";".join(
        f"{axis}={n}" for axis in ("data", "fsdp", "tensor", "context")
    )
    lines: list[dict[str, Any]] = []
    one = None  # tokens per second, if they could be measured
    try:
        meshes = {ONE: make_mesh(ONE, jax.devices()[:1])}
        meshes |= {text: make_mesh(text) for text in texts.split(";")}
        for text, mesh in meshes.items():
            check_mesh(*training(config, mesh, text), mesh)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for text, mesh in meshes.items():
        try:
            line = measure(config, mesh, text)
        except RuntimeError as error:  # such as out of memory
            print(f"left out, {text}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            continue
        own = line["tokens_per_second"] / mesh.size
        if text == ONE:
            one = own
        line["efficiency"] = one and own / one
        lines.append(line)
        print(" ".join(f"{name}={line[name]}" for name in COLUMNS), flush=True)
        write(lines, pathlib.Path(config.out))


if __name__ == "__main__":
    main(sys.argv)
