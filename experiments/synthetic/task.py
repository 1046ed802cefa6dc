"""What a synthetic task is, and how well one can do without a model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_SAMPLES = 2**14


class Examples(NamedTuple):
    """Sequences with what is asked about them.

    Attributes:
        tokens: [B, L] int64.
        targets: [B, L] int64, less than the task's vocabulary.
        asked: [B, L] bool, the positions whose targets count in loss and accuracy.
    """

    tokens: np.ndarray
    targets: np.ndarray
    asked: np.ndarray


def certain(tokens: np.ndarray, V: int) -> np.ndarray:
    """The chance of a right guess where every target follows from tokens up to its position."""
    return np.ones(tokens.shape)


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        category: the heading in the paper's table.
        length: L.
        vocab_size: V, tokens and targets are less than it.
        draw: `draw(rng, B, L, V)` gives examples.
        chance: `chance(tokens, V)` [B, L] is the probability with which the best guess is right
            that knows the definition of the task and tokens up to each position: an upper bound
            of the expected accuracy of every causal model.
    """

    category: str
    length: int
    vocab_size: int
    draw: Callable[[np.random.Generator, int, int, int], Examples]
    chance: Callable[[np.ndarray, int], np.ndarray] = certain

    def examples(self, rng: np.random.Generator, B: int) -> Examples:
        """Draw B sequences."""
        return self.draw(rng, B, self.length, self.vocab_size)


@functools.cache
def baselines(task: Task) -> tuple[float, float]:
    """The ceiling and the majority baseline of a task, from 16,384 sequences.

    The ceiling is the mean of `chance` over what is asked. The majority baseline answers the most
    frequent target of each position without looking at the tokens; it is chosen on one half of the
    sequences and measured on the other.
    """
    tokens, targets, asked = task.examples(np.random.default_rng(0), _SAMPLES)
    ceiling = np.mean(task.chance(tokens, task.vocab_size)[asked])
    first, second = np.arange(_SAMPLES) % 2 == 0, np.arange(_SAMPLES) % 2 == 1
    answers = np.zeros(task.length, int)
    for position in np.flatnonzero(asked.any(axis=0)):
        seen = targets[first & asked[:, position], position]
        answers[position] = np.argmax(np.bincount(seen, minlength=1))
    majority = np.mean((targets == answers)[second][asked[second]])
    return float(ceiling), float(majority)
