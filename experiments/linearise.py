r"""Replaces softmax attention by linear attention: new features, fitted layer by layer, then tuned.

    python -m experiments.linearise --checkpoint=FOLDER --kernel=llops --data=FOLDER \
        --tokenizer=FOLDER --out=FOLDER

The checkpoint is a Llama of Hugging Face (config.json and *.safetensors), or a model of ours with
the same layers. Every layer's features, and its queries and keys, are fitted to the outputs of the
attention that they replace, on sample text; then `experiments.lm` trains the whole model. The last
line on standard output is one JSON object with the perplexities before, after the fit and after
tuning; `<out>/fitted` and `<out>/tuned/model` are models for `experiments.lm --checkpoint=` and
`experiments.zero_shot`. Started again, the same command continues where it was stopped.
"""

import dataclasses
import json
import pathlib
import shutil
import sys
import time
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from experiments import lm
from experiments.common import flags
from experiments.common.checkpoint import CheckpointError, describe, open_run
from experiments.common.data import take
from experiments.common.flags import setting
from experiments.common.phase import NonFiniteError
from experiments.common.record import read_json, write_json, write_result
from experiments.common.tokenizer import load_tokenizer
from experiments.linearise_fit import LayerFitter, calibrated_options, first_sample, with_fitted
from experiments.lm_start import Start
from experiments.text_data.rows import Rows
from experiments.text_data.shards import TextSettings, TokenText, load_text
from lowrank_attn.convert import read_checkpoint, with_kernel
from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.models.decoder import REMAT
from lowrank_attn.models.decoder_configs import DecoderConfig
from lowrank_attn.models.folder import Arrays, build, load_decoder, save_decoder


@dataclasses.dataclass(frozen=True)
class Config(TextSettings):
    """Replace the softmax attention of a checkpoint by linear attention."""

    checkpoint: str = setting("", "folder of a Llama of Hugging Face, or of a model of ours")
    kernel: str = setting("llops", "instead of softmax", choices=tuple(FEATURE_MAPS))
    kernel_options: str = setting("", "of that kernel, such as num_features=256")
    out: str = setting("", "folder of everything that is written", changes_result=False)
    seed: int = setting(0, "of features and of the order of rows")
    dtype: str = setting("float32", "of the computation", choices=("float32", "bfloat16"))
    length: int = setting(1024, "tokens of a row", group="data")
    validation_rows: int = setting(500, "at most, for a perplexity", group="data")

    fit_rows: int = setting(128, "rows that layers are fitted on", group="fit")
    held_rows: int = setting(8, "validation rows that errors of layers are of", group="fit")
    fit_steps: int = setting(300, "for each layer", group="fit")
    fit_batch: int = setting(8, "rows of a step", group="fit")
    fit_rate: float = setting(0.03, "highest, relative to each array", group="fit")

    steps: int = setting(1000, "of tuning", group="tuning")
    batch_size: int = setting(32, "rows of a step", group="tuning")
    accumulate: int = setting(1, "parts of a batch, one after another", group="tuning")
    learning_rate: float = setting(1e-4, "highest", group="tuning")
    eval_every: int = setting(500, "steps between evaluations", group="tuning")
    remat: str = setting(
        "none", "what of a block is computed again for its gradient", group="tuning",
        choices=tuple(REMAT),
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check what can be checked without reading.

        Raises:
            ValueError: naming the setting.
        """
        TextSettings.__post_init__(self)
        for name in ("checkpoint", "out"):
            if not getattr(self, name):
                raise ValueError(f"--{name}=FOLDER is needed.")
        for name in ("length", "fit_rows", "held_rows", "fit_steps", "fit_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1.")
        if self.fit_batch > self.fit_rows:
            raise ValueError(f"fit_batch={self.fit_batch} is more than fit_rows={self.fit_rows}.")
        flags.parse_options("kernel_options", self.kernel_options)
        self.tuning()

    def tuning(self) -> lm.Config:
        """The settings of tuning."""
        shared = {field.name for field in dataclasses.fields(lm.Config)} & vars(self).keys()
        return lm.Config(
            **{name: getattr(self, name) for name in shared - {"kernel", "kernel_options"}}
            | {
                "checkpoint": str(pathlib.Path(self.out) / "fitted"),
                "run_dir": str(pathlib.Path(self.out) / "tuned"),
            }
        )


def read_teacher(folder: str) -> tuple[DecoderConfig, Arrays, dict[str, Any] | None]:
    """The model with softmax attention, its parameters by path, and where they come from.

    Raises:
        ConvertError: see `read_checkpoint`.
        ValueError: if its layers are others.
    """
    ours = (pathlib.Path(folder) / "decoder.json").exists()
    decoder, params, source = load_decoder(folder) if ours else read_checkpoint(folder)
    mixer = decoder.mixers.get("linear", {})
    if set(decoder.layers) != {"linear"} or mixer.get("kernel") != "softmax":
        raise ValueError(
            f"{folder} has the layers {', '.join(sorted(set(decoder.layers)))} with the kernel "
            f"{mixer.get('kernel')}, expected `linear` ones with softmax, as a Llama has."
        )
    return decoder, params, source


def fit_layers(
    config: Config, text: TokenText, decoder: DecoderConfig, params: Arrays
) -> tuple[DecoderConfig, dict[str, Any], list[dict[str, float]]]:
    """The linear model with fitted layers, and the errors of each layer.

    A layer is written when it is done, and read when that was before.
    """
    folder = pathlib.Path(config.out) / "layers"
    folder.mkdir(exist_ok=True)
    teacher = build(decoder, params, dtype=config.dtype)
    rows = Rows(text.splits["train"], config.length, config.fit_rows)
    held = Rows(text.splits["validation"], config.length, config.held_rows)
    sample, held_sample = (
        first_sample(teacher, take(source, np.arange(len(source)))["tokens"], text.eot)
        for source in (rows, held)
    )
    options = flags.parse_options("kernel_options", config.kernel_options)
    options = calibrated_options(config.kernel, options, teacher, sample)
    student, changed = with_kernel(decoder, params, config.kernel, options, seed=config.seed)
    fitter = LayerFitter(
        teacher,
        build(student, changed, dtype=config.dtype),
        config.fit_steps,
        config.fit_batch,
        config.fit_rate,
    )
    errors = []
    for layer in tqdm(range(len(decoder.layers)), desc="layers", file=sys.stderr):
        path = folder / f"{layer}.npz"
        if not path.exists():
            key = jax.random.fold_in(jax.random.key(config.seed), layer)
            fitted = fitter.fit(layer, sample, held_sample, key)
            _write_arrays(path, fitted.params | {"errors": np.array(fitted.errors)})
        arrays = dict(np.load(path))
        before, after = arrays.pop("errors").tolist()
        errors.append({"before": before, "after": after})
        changed = with_fitted(changed, layer, arrays)
        sample, held_sample = (fitter.next_sample(layer, x) for x in (sample, held_sample))
    return student, changed, errors


def perplexity(config: Config, text: TokenText, decoder: DecoderConfig, params: Arrays) -> float:
    """On the validation rows of tuning."""
    nested = nnx.to_pure_dict(nnx.state(build(decoder, params)))
    tuning = config.tuning()
    phase, _ = lm.make_phase(tuning, Start(decoder, nested, None), text)
    return float(np.exp(lm.validate(tuning, phase, nested)["loss"]))


def run(config: Config) -> dict[str, Any]:
    """Convert, fit, tune, and write the results.

    Returns:
        The summary that `main` prints.
    """
    began = time.time()
    out = pathlib.Path(config.out)
    tokenizer = load_tokenizer(config.tokenizer)
    decoder, params, source = read_teacher(config.checkpoint)
    tokenizer.check_fits(decoder.vocab_size)
    text = load_text(config, tokenizer)
    described = flags.to_dict(config, changes_result=True) | {"data": text.fingerprint}
    started = open_run(out, describe(described, tokenizer.fingerprint))
    before = out / "before.json"
    if not before.exists():
        write_json(before, perplexity(config, text, decoder, params))
    if not (out / "fitted" / "decoder.json").exists():
        shutil.rmtree(out / "fitted", ignore_errors=True)
        student, changed, errors = fit_layers(config, text, decoder, params)
        write_json(out / "layers.json", errors)
        save_decoder(out / "fitted", student, changed, source)
    tuned = lm.run(config.tuning())
    assert tuned is not None  # this is the only process
    metrics: dict[str, Any] = {
        "perplexity_before": read_json(before),
        "perplexity_fitted": float(np.exp(tuned["validation_loss_before"])),
        "perplexity_tuned": tuned["validation_perplexity"],
        "layers": read_json(out / "layers.json"),
        "tokens": config.fit_rows * config.length,
        "data": text.fingerprint,
    }
    write_result(out / "result.json", config, metrics, started=started, seconds=time.time() - began)
    names = ("perplexity_before", "perplexity_fitted", "perplexity_tuned")
    return {
        "checkpoint": config.checkpoint,
        "kernel": config.kernel,
        **{name: metrics[name] for name in names},
        "model": str(out / "tuned" / "model"),
    }


def _write_arrays(path, arrays):
    """Write an .npz that is there when it is complete."""
    unfinished = path.with_name("unfinished.npz")
    np.savez(unfinished, **arrays)
    unfinished.replace(path)


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings and files end with exit code 2 and one message."""
    config = flags.parse(Config, argv)
    try:
        summary = run(config)
    except (CheckpointError, NonFiniteError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(summary))


if __name__ == "__main__":
    main(sys.argv)
