"""Turns a folder of text into shards of tokens, and says what is in them.

    python -m experiments.prepare_text --data=FOLDER --tokenizer=r50k_base.tiktoken

`experiments.lm` does this by itself; ahead of time it can run where there is no accelerator. FOLDER
has .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet files at any depth, such as SlimPajama-6B:

    --files='data/train-*' --validation_files='data/validation-*'

The shards are in `<cache_dir>/tokens-...`, which --data takes as well, there or on another machine.
Stopped at any time, the same command continues after the last whole shard.
"""

import dataclasses
import signal
import sys
from typing import NoReturn

import numpy as np

from experiments.common import flags
from experiments.common.tokenizer import load_tokenizer
from experiments.text_data.documents import BadText
from experiments.text_data.shards import TextSettings, TokenText, load_text


@dataclasses.dataclass(frozen=True)
class Config(TextSettings):
    """Turn a folder of text into shards of tokens."""


def describe(text: TokenText) -> str:
    """What is in the shards: documents and tokens of each split, fingerprint, what was left out."""
    lines = []
    for name, shards in text.splits.items():
        documents = sum(int(np.count_nonzero(shard == text.eot)) for shard in shards)
        tokens = sum(len(shard) for shard in shards)
        lines.append(f"{name + ':':<12}{documents:,} documents, {tokens:,} tokens")
    lines += [f"left out:   {message}" for message in text.skipped]
    lines += [f"data:       {text.fingerprint}", f"folder:     {text.folder}"]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings and data end with exit code 2 and one message."""
    config = flags.parse(Config, argv)
    signal.signal(signal.SIGTERM, _exit)  # unwinds, so that nothing half-written stays
    try:
        text = load_text(config, load_tokenizer(config.tokenizer))
    except (BadText, ValueError, OSError, ImportError) as error:
        hint = " --skip_bad_shards leaves it out." if isinstance(error, BadText) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        sys.exit(2)
    print(describe(text))


def _exit(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)


if __name__ == "__main__":
    main(sys.argv)
