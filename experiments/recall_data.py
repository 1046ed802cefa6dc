"""Multi-query associative recall: sequences of key-value pairs whose keys are asked for later.

    k_1 v_1 ... k_n v_n | slots of two tokens, n of which begin with a key that was seen

The label at a key that comes again is its value. Source: Zoology (arXiv 2312.04927) and BASED
(arXiv 2402.18668), generator and mix of lengths as in their published code.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Segment(NamedTuple):
    """Sequences of one kind.

    Attributes:
        length: L, tokens, even.
        pairs: n, key-value pairs, 4 n <= L.
        examples: how many.
    """

    length: int
    pairs: int
    examples: int


class Mix(NamedTuple):
    """What a model is trained and tested on.

    Attributes:
        train, test: segments; training sees them in this order in every epoch, unshuffled.
        noise: whether tokens that are neither pairs nor queries are random, else they are 0.
    """

    train: tuple[Segment, ...]
    test: tuple[Segment, ...]
    noise: bool = True


class Rows(NamedTuple):
    """Sequences of one length.

    Attributes:
        tokens: [N, L] int32.
        positions: [N, n] int32, where labels are.
        targets: [N, n] int32, the labels; -1: no label, of sequences with fewer than others.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray


MIXES = {
    "mix": Mix(  # figures 2 and 3 of BASED
        (Segment(64, 4, 100_000), Segment(128, 8, 20_000))
        + tuple(Segment(256, n, 20_000) for n in (16, 32, 64)),
        tuple(Segment(64, n, 1000) for n in (4, 8, 16))
        + (Segment(128, 32, 1000), Segment(256, 64, 1000))
        + (Segment(512, 128, 1000), Segment(1024, 256, 1000)),
    ),
    # one length each, figure 2 of Zoology
    "64": Mix((Segment(64, 4, 100_000),), (Segment(64, 4, 3000),), noise=False),
    "128": Mix((Segment(128, 8, 100_000),), (Segment(128, 8, 3000),), noise=False),
    "256": Mix((Segment(256, 16, 100_000),), (Segment(256, 16, 3000),), noise=False),
    # minutes on a CPU
    "quick": Mix((Segment(32, 4, 2048),), (Segment(32, 4, 200), Segment(64, 8, 200))),
}
POWER = 0.01  # a: slot i is drawn with weight a i^(a - 1)


def assemble(keys: np.ndarray, values: np.ndarray, slots: np.ndarray, length: int) -> Rows:
    """Sequences from what was drawn, with 0 at all other tokens.

    Args:
        keys, values: [N, n], in order.
        slots: [N, n], the slot of each key's query, from 0 to (length - 2 n) / 2 - 1.
        length: L.
    """
    N, n = keys.shape
    tokens = np.zeros((N, length), np.int32)
    tokens[:, : 2 * n : 2] = keys
    tokens[:, 1 : 2 * n : 2] = values
    positions = (2 * (n + slots)).astype(np.int32)
    np.put_along_axis(tokens, positions, keys.astype(np.int32), axis=1)
    return Rows(tokens, positions, values.astype(np.int32))


def distinct(rng: np.random.Generator, count: int, n: int, rows: int) -> np.ndarray:
    """[rows, n] numbers below `count`, distinct and uniform in each row (Floyd's algorithm)."""
    chosen = np.empty((rows, n), np.int64)
    for i, last in enumerate(range(count - n, count)):
        drawn = rng.integers(0, last + 1, rows)
        again = np.any(chosen[:, :i] == drawn[:, None], axis=1)
        chosen[:, i] = np.where(again, last, drawn)
    return rng.permuted(chosen, axis=1)


def draw_slots(rng: np.random.Generator, count: int, n: int, rows: int) -> np.ndarray:
    """[rows, n] slots below `count`, drawn one after another without replacement.

    Their weights are a i^(a - 1), i = 1, 2, ...; the n first of exponential times with these rates
    have that law.
    """
    weights = POWER * np.arange(1.0, count + 1) ** (POWER - 1)
    times = rng.standard_exponential((rows, count)) / weights
    return np.argsort(times, axis=1)[:, :n]


def generate(rng: np.random.Generator, segment: Segment, vocab_size: int, noise: bool) -> Rows:
    """Draw the sequences of a segment.

    Keys are among 1 .. V/2 - 1, values among V/2 .. V - 1, both distinct in a sequence. Noise is
    uniform over all V tokens, so that a few of its tokens are keys or values, as published.

    Raises:
        ValueError: if length, pairs and vocabulary do not fit.
    """
    L, n, rows = segment
    half = vocab_size // 2
    if L % 2 or 4 * n > L or vocab_size <= L or n > half - 1:
        raise ValueError(
            f"length={L}, pairs={n}, vocab_size={vocab_size}: expected an even length of at least "
            "4 pairs, below vocab_size, and at most vocab_size / 2 - 1 pairs."
        )
    keys = 1 + distinct(rng, half - 1, n, rows)
    values = half + distinct(rng, vocab_size - half, n, rows)
    made = assemble(keys, values, draw_slots(rng, (L - 2 * n) // 2, n, rows), L)
    if not noise:
        return made
    random = rng.integers(0, vocab_size, made.tokens.shape, dtype=np.int32)
    return made._replace(tokens=np.where(made.tokens == 0, random, made.tokens))


def draw(
    rng: np.random.Generator, segments: Sequence[Segment], vocab_size: int, noise: bool
) -> list[Rows]:
    """All segments in their order, neighbours of the same length as one."""
    joined: list[Rows] = []
    for segment in segments:
        rows = generate(rng, segment, vocab_size, noise)
        if joined and joined[-1].tokens.shape[1] == segment.length:
            joined[-1] = _join(joined[-1], rows)
        else:
            joined.append(rows)
    return joined


def _join(a: Rows, b: Rows) -> Rows:
    n = max(a.targets.shape[1], b.targets.shape[1])

    def padded(x, value):
        return np.pad(x, ((0, 0), (0, n - x.shape[1])), constant_values=value)

    return Rows(
        np.concatenate([a.tokens, b.tokens]),
        np.concatenate([padded(a.positions, 0), padded(b.positions, 0)]),
        np.concatenate([padded(a.targets, -1), padded(b.targets, -1)]),
    )
