"""SLAY's language models: one shape, one text, one protocol, and only the kernel differs.

    python -m experiments.slay_lm --data=FOLDER --tokenizer=r50k_base.tiktoken --steps=2000
    python -m experiments.slay_lm --quick

Trains a model of the shape of GPT-2 small by `experiments.lm` for every kernel. Kernels with a
choice have equally many features (the paper gives its baselines 4 to 30 times fewer than SLAY), so
that states are of equal size; ELU and cosFormer have none, and their sizes are in the table. Every
run is a folder of its own under --runs and goes on where it was stopped. `<out>.csv`, `.md` and
`.png` are written after each.
"""

import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments import lm
from experiments.common import flags
from experiments.common.checkpoint import CheckpointError
from experiments.common.flags import setting
from experiments.common.phase import NonFiniteError
from experiments.common.plot import read_rows
from experiments.common.record import markdown_table, read_json, write_csv, write_text
from experiments.lm_settings import EXACT
from experiments.lm_settings import Config as RunConfig
from lowrank_attn.layers import AttentionMethod
from lowrank_attn.layers.attend import make_kernel, resolve_normalize
from lowrank_attn.models.decoder_configs import CONFIGS
from lowrank_attn.ops.normalize import needs_denominator

# The options of kernels for M features and rows of T tokens. With M = 256 `slay` is the paper's:
# two nodes, 8 anchors, 16 random features, independent draws.
KERNELS: dict[str, Callable[[int, int], str]] = {
    "softmax": lambda M, T: "",
    "yat_spherical": lambda M, T: "",
    "slay": lambda M, T: (
        f"num_nodes=2,num_anchors=8,num_random={M // 16},frequencies=iid,scaled=False"
    ),
    "slay_auto": lambda M, T: f"num_features={M}",
    "elu": lambda M, T: "",
    "cosformer": lambda M, T: f"horizon={T}",
    "favor": lambda M, T: f"num_features={M}",
    "llops": lambda M, T: f"num_features={M}",
}
# Loss and perplexity on WikiText-2 as printed, after 2.5 billion tokens of FineWeb.
PUBLISHED = {
    "softmax": (4.6417, 103.7),
    "yat_spherical": (4.7180, 112.0),
    "slay": (4.6760, 107.4),
    "elu": (5.0884, 162),
    "cosformer": (5.1983, 181),
    "favor": (5.4524, 233),
}
COLUMNS = (
    "kernel", "features", "state", "parameters", "tokens", "loss", "perplexity",
    "tokens_per_second", "published_loss", "published_perplexity",
)  # fmt: skip
QUICK = {
    "tokenizer": "bytes", "model": "gpt2-tiny", "features": 32, "steps": 8, "batch_size": 2,
    "accumulate": 1, "length": 64, "learning_rate": 3e-3, "eval_every": 4, "validation_rows": 8,
    "dtype": "float32",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """Train language models that differ in their kernel only."""

    data: str = setting("", "folder of text; --quick makes one if this is not given")
    tokenizer: str = setting("", "see experiments.lm")
    validation_files: str = setting("", "of the folder; default: documents are drawn from all")
    kernels: str = setting(",".join(KERNELS), "names")
    out: str = setting("experiments/results/slay_lm", "files to write, without suffix")
    runs: str = setting("runs/slay_lm", "folder of the runs, and of shards")
    quick: bool = setting(False, "a tiny model and a few steps, for a CPU")

    model: str = setting("gpt2-small", "its shape", choices=("gpt2-small", "gpt2-tiny"))
    features: int = setting(256, "M, of kernels that have a choice; a multiple of 16")
    length: int = setting(1024, "tokens of a row, T")
    steps: int = setting(2000, "of training")
    batch_size: int = setting(128, "rows")
    accumulate: int = setting(4, "parts of a batch, one after another")
    # the paper's rate of 1e-4, from a warm-up down to 0 along a line
    learning_rate: float = setting(1e-4, "highest")
    warmup_steps: int = setting(200, "at most a tenth of the steps is taken")
    eval_every: int = setting(250, "steps between evaluations")
    validation_rows: int = setting(256, "at most, for an evaluation")
    dtype: str = setting("bfloat16", "of the computation", choices=("float32", "bfloat16"))
    seed: int = setting(0, "of parameters and the order of rows")

    def __post_init__(self) -> None:
        """Check what `experiments.lm` does not.

        Raises:
            ValueError: naming the setting.
        """
        unknown = [name for name in names(self.kernels) if name not in KERNELS]
        if unknown or not names(self.kernels):
            raise ValueError(
                f"kernels={self.kernels!r}: {', '.join(unknown) or 'nothing'} is unknown; known: "
                f"{', '.join(KERNELS)}."
            )
        if self.features < 16 or self.features % 16:
            raise ValueError(f"features={self.features}, expected a multiple of 16, such as 256.")
        if not self.data and not self.quick:
            raise ValueError("--data=FOLDER is needed: a folder of text; or --quick.")


def names(text: str) -> list[str]:
    """The names of a list with commas."""
    return [name for name in text.split(",") if name]


def generated_text(folder: pathlib.Path) -> str:
    """A folder of text in which some words follow others, the same every time."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 8))) for _ in range(100)]
    followers = rng.integers(100, size=(100, 3))
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        chain = [int(rng.integers(100))]
        while len(chain) < 200:
            chain.append(int(rng.choice(followers[chain[-1]])))
        write_text(folder / f"{number}.txt", " ".join(words[i] for i in chain))
    return str(folder)


def run_config(config: Config, kernel: str) -> RunConfig:
    """The settings of the run of one kernel.

    AdamW with betas (0.9, 0.95), decay 0.01, gradients clipped to 1, a linear fall of the rate, as
    in the paper; not in it: batches of one size from the first step, no dropout.
    """
    made = RunConfig(
        data=config.data or generated_text(pathlib.Path(config.runs) / "text"),
        tokenizer=config.tokenizer,
        validation_files=config.validation_files,
        validation_share=0.1 if config.quick else 0.01,
        cache_dir=str(pathlib.Path(config.runs) / "shards"),
        model=config.model,
        kernel=kernel,
        kernel_options=KERNELS[kernel](config.features, config.length),
        samples=False,
        recipe="published",
        length=config.length,
        validation_rows=config.validation_rows,
        dtype=config.dtype,
        remat="dots" if kernel in EXACT else "none",  # T x T scores of all layers are too many
        steps=config.steps,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        learning_rate=config.learning_rate,
        last_rate=0.0,
        schedule="linear",
        warmup_steps=config.warmup_steps,
        weight_decay=0.01,
        eval_every=config.eval_every,
        seed=config.seed,
    )
    folder = pathlib.Path(config.runs) / f"{kernel}-{flags.config_hash(made)}"
    return dataclasses.replace(made, run_dir=str(folder))


def state_size(kernel: str, options: str, model: str) -> tuple[int | None, int | None]:
    """M, and the numbers of a head's state: M (P + 1), or M P without a sum; None without either.

    P is the head size of the model.
    """
    made = make_kernel(kernel, flags.parse_options("kernel_options", options))
    if isinstance(made, AttentionMethod):
        return None, None
    decoder = CONFIGS[model]
    P = decoder.width // decoder.mixers["linear"]["num_heads"]
    M = made.dim(P)
    return M, M * (P + needs_denominator(resolve_normalize(made, None)))


def row_of(kernel: str, made: RunConfig, model: str) -> dict[str, Any]:
    """Train one model, or what is left of it; a row of the table."""
    features, state = state_size(kernel, made.kernel_options, model)
    row: dict[str, Any] = {"kernel": kernel, "features": features, "state": state}
    row["published_loss"], row["published_perplexity"] = PUBLISHED.get(kernel, (None, None))
    try:
        lm.run(made)
    except NonFiniteError as error:
        print(f"{kernel}: {error}", file=sys.stderr)
        return row | {"loss": math.nan}
    metrics = read_json(pathlib.Path(str(made.run_dir)) / "result.json")["metrics"]
    return row | {
        "parameters": metrics["parameters"],
        "tokens": metrics["tokens"],
        "loss": metrics["validation_loss"],
        "perplexity": metrics["validation_perplexity"],
        "tokens_per_second": metrics["timing"]["tokens_per_second"],
    }


def write(rows: Sequence[dict[str, Any]], out: pathlib.Path) -> None:
    """Write the table as CSV (exact numbers) and as markdown."""
    write_csv(f"{out}.csv", COLUMNS, rows)

    def cell(value):
        if isinstance(value, float):
            return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"
        return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    table = markdown_table(COLUMNS, ([cell(row.get(name)) for name in COLUMNS] for row in rows))
    notes = (
        "Validation loss and perplexity of models that differ in their kernel only, sorted; "
        "`features`: M of a head; `state`: numbers of a head's state, which grows with the text "
        "where there is none. Published: the paper's, of another text, after 2.5 billion tokens, "
        "where ELU, cosFormer and FAVOR+ have states 4 or more times smaller than SLAY's.\n"
    )
    order = compared(rows)
    write_text(f"{out}.md", "\n".join([notes, *([order, ""] if order else []), table]) + "\n")


def compared(rows: Sequence[dict[str, Any]]) -> str:
    """One line on the order of kernels, ours and the paper's."""
    both = [row for row in rows if row["published_loss"] and not math.isnan(row["loss"])]
    orders = [
        " < ".join(row["kernel"] for row in sorted(both, key=lambda row: row[column]))
        for column in ("loss", "published_loss")
    ]
    if len(both) < 2:
        return ""
    agree = "as in the paper" if orders[0] == orders[1] else f"in the paper {orders[1]}"
    return f"Order of losses: {orders[0]}; {agree}."


def plot(runs: dict[str, pathlib.Path], path: pathlib.Path) -> None:
    """Validation loss against steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    for kernel, folder in runs.items():
        path_of_curve = folder / "train_eval.csv"
        curve = read_rows(path_of_curve) if path_of_curve.exists() else []
        axis.plot([row["step"] for row in curve], [row["loss"] for row in curve], label=kernel)
    axis.set(xlabel="step", ylabel="validation loss")
    axis.legend()
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings and data end with exit code 2 and one message."""
    config = flags.parse(Config, argv, lambda config: QUICK if config.quick else {})
    out = pathlib.Path(config.out)
    rows, runs = [], {}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = {kernel: run_config(config, kernel) for kernel in names(config.kernels)}
        for kernel, settings in made.items():
            rows.append(row_of(kernel, settings, config.model))
            rows.sort(key=lambda row: (math.isnan(row["loss"]), row["loss"]))
            write(rows, out)
            runs[kernel] = pathlib.Path(str(settings.run_dir))
            plot(runs, out.with_suffix(".png"))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv)
