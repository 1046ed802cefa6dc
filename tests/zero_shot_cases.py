"""Tiny models, a tokenizer and items for the tests of zero-shot evaluation."""

import functools
import json
import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from experiments.common.tokenizer import Tokenizer
from experiments.zero_shot_answers import Answers
from experiments.zero_shot_scorer import Scorer
from lowrank_attn.convert import build, read_checkpoint
from lowrank_attn.convert.safetensors import write_safetensors
from lowrank_attn.models.decoder_configs import DecoderConfig

GOLDEN = pathlib.Path(__file__).parent / "golden"
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
CONFIG = DecoderConfig(
    257,
    16,
    ("short_conv", "linear", "sliding_window", "softmax", "mamba"),
    {
        "linear": {"num_heads": 2, "qk_dim": 4, "kernel": "taylor"},
        "sliding_window": {"num_heads": 2, "window": 6},
        "softmax": {"num_heads": 2},
        "mamba": {"state_size": 4},
    },
    mlp_width=32,
    vocab_multiple=8,
)
# one item of each task, as local files have them
ITEMS = {
    "piqa": {"query": "Question: How?\n", "choices": ["so", "no"], "gold": 1},
    "arc_easy": {"query": "Question: Why?", "choices": ["a", "b", "c"], "gold": 2},
    "arc_challenge": {"query": "Question: Why?", "choices": ["a", "b", "c"], "gold": 2},
    "hellaswag": {"query": "Cooking: A man", "choices": ["eats.", "sits."], "gold": 0},
    "winogrande": {"context_options": ["He", "It"], "continuation": "ran.", "gold": 0},
    "lambada_openai": {"context": "Once upon a", "continuation": "time"},
    "fda": {"text": " K12\nnumber:", "value": " 12"},
    "swde": {"text": "page title:", "value": "A"},
    "squad_completion": {"text": "France's capital is", "value": "Paris"},
}


def _encode(text):
    return [CHARACTERS.index(character) for character in text]


def _decode(ids):
    return "".join(CHARACTERS[i] for i in ids)


characters = Tokenizer("characters", 97, 96, _encode, _decode, "characters")


@functools.cache
def every_mixer():
    """A model of bytes with all mixers and random parameters."""
    return random_model(CONFIG)


def random_model(config):
    """A model, made without compiling its draws."""
    model = nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(0)))
    random = np.random.default_rng(1)
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        draw = 0.3 * random.normal(size=variable.shape) + (path[-1] == "scale")
        variable.set_value(jnp.asarray(draw, variable.dtype))
    nnx.update(model, state)
    return model


def published_mamba(folder):
    """The model of tests/golden/mamba_lm, converted, and its answers to lm_eval's requests."""
    arrays = np.load(GOLDEN / "mamba_lm.npz")
    weights = {}
    for key in arrays.files:
        if key.startswith("param.") and key != "param.meta":
            array = arrays[key]
            array = array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
            weights[key.removeprefix("param.")] = array.astype(np.float32)
    shapes = {name: (array.shape, array.dtype) for name, array in weights.items()}
    config = {
        "d_model": 48,
        "n_layer": 3,
        "vocab_size": 97,
        "pad_vocab_size_multiple": 1,
        "ssm_cfg": {"d_state": 16, "d_conv": 4, "expand": 2, "dt_rank": 3},
        "rms_norm": True,
        "tie_embeddings": True,
    }
    write_safetensors(folder / "model.safetensors", shapes, iter(weights.items()))
    (folder / "config.json").write_text(json.dumps(config))
    decoder, params, _ = read_checkpoint(folder)
    expected = json.loads((GOLDEN / "zero_shot.json").read_text())
    scorer = Scorer(
        build(decoder, params),
        characters,
        Answers(folder / "answers.jsonl"),
        "mamba",
        max_length=expected["max_length"],
        batch_tokens=expected["max_length"],
        batch_size=1,
    )
    return scorer, expected
