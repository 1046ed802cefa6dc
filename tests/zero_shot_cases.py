"""Tiny models, a tokenizer and items for the tests of zero-shot evaluation."""

import functools
import json

import decoder_cases

from experiments.common.tokenizer import Tokenizer
from experiments.zero_shot_answers import Answers
from experiments.zero_shot_scorer import Scorer
from lowrank_attn.convert import build, read_checkpoint

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
CONFIG = decoder_cases.every_mixer(257)
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
    return decoder_cases.random_model(CONFIG)


def published_mamba(folder):
    """The model of tests/golden/mamba_lm, converted, and its answers to lm_eval's requests."""
    decoder_cases.write_published(folder, *decoder_cases.golden("mamba_lm")[:2])
    decoder, params, _ = read_checkpoint(folder)
    expected = json.loads((decoder_cases.GOLDEN / "zero_shot.json").read_text())
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
