"""Queries, keys and values of a language model on text, for `experiments.slay_kernel --heads`.

python -m experiments.heads --checkpoint=FOLDER --data=FOLDER --tokenizer=FOLDER --out=heads.npz
"""

import dataclasses
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.common import flags
from experiments.common.flags import setting
from experiments.common.tokenizer import load_tokenizer
from experiments.linearise import read_teacher
from experiments.linearise_fit import first_sample
from experiments.text_data.rows import Rows
from experiments.text_data.shards import TextSettings, load_text
from lowrank_attn.models.decoder import Decoder
from lowrank_attn.models.folder import build


@dataclasses.dataclass(frozen=True)
class Config(TextSettings):
    """Write the queries, keys and values of every head of a model with softmax attention."""

    checkpoint: str = setting("", "folder of a Llama of Hugging Face, or of a model of ours")
    length: int = setting(512, "tokens of the row of validation text that it reads", group="data")
    out: str = setting("heads.npz", "file to write")


def heads(model: Decoder, tokens: np.ndarray, eot: int) -> tuple[np.ndarray, ...]:
    """Arrays q, k, v [layers * heads, T, D] for tokens [T]; keys that heads share are repeated."""
    sample = first_sample(model, tokens[None], eot)
    x, segments, at = sample

    @nnx.jit
    def layer(block, x):
        q, k, v = block.mixer.project(block.mixer_norm(x), at)
        k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
        return (q, k, v), block(x, None, segments, at, None)[0]

    found = []
    for block in model.blocks:
        projected, x = layer(block, x)
        found.append([np.moveaxis(np.asarray(y[0], np.float32), 1, 0) for y in projected])
    return tuple(np.concatenate(each) for each in zip(*found, strict=True))


def run(config: Config) -> None:
    """Read the model and one row, and write the file.

    Raises:
        ValueError: see `read_teacher`, `load_text`.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    decoder, params, _ = read_teacher(config.checkpoint)
    tokenizer.check_fits(decoder.vocab_size)
    text = load_text(config, tokenizer)
    row = Rows(text.splits["validation"], config.length, 1)[0]
    q, k, v = heads(build(decoder, params), row["tokens"], text.eot)
    out = pathlib.Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(out, q=q, k=k, v=v)
    print(f"{out}: {len(q)} heads, {q.shape[1]} tokens, D = {q.shape[2]}", file=sys.stderr)


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings and files end with exit code 2 and one message."""
    config = flags.parse(Config, argv)
    try:
        run(config)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv)
