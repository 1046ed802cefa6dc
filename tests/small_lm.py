"""`experiments.lm` with a small model, as a script: `python tests/small_lm.py --data=...`."""

import json
import sys

from experiments import lm
from lowrank_attn.models.decoder_configs import CONFIGS, DecoderConfig

MIXERS = {
    "short_conv": {"expand": 2, "kernel_size": 3},
    "linear": {"num_heads": 2, "qk_dim": 4, "kernel": "taylor", "chunk_size": 8},
    "sliding_window": {"num_heads": 2, "window": 4},
}
SMALL = DecoderConfig(257, 16, tuple(MIXERS), MIXERS, mlp_width=32, vocab_multiple=8)


def write_text(folder):
    """A file of text that is easy to learn, in a new folder in this one."""
    lines = (json.dumps({"text": f"{i % 7} is a number. " * (1 + i % 3)}) for i in range(200))
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "text.jsonl").write_text("\n".join(lines))
    return folder / "text"


if __name__ == "__main__":
    CONFIGS["based-tiny"] = SMALL
    lm.main(sys.argv)
