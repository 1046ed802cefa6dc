"""SLAY's synthetic tasks, repaired: every target follows from earlier tokens, and none is trivial.

What was wrong with the published definitions, for causal models:

* copy, long_copy, noisy_copy, bigram: the target is (a function of) the token at its own position,
  which the residual carries to the head without any attention.
* sort, reverse, compression, histogram: targets come before the tokens that decide them.
* retrieval: the target is the same in all sequences.
* selective_copy, compression, stack, histogram: most targets are a constant 0.
* selective_copy: some of the wanted tokens are overwritten. stack: the pushed values are not shown.
* multihop: the answer stands beside its pointer, there is one hop.
* induction: the trigger may occur several times. pattern: the first three targets are unknown.

Here inputs come first, and the answers are asked for at later positions, which hold a blank, the
last token of the vocabulary. The other tasks are as published. One function a task.
"""

import numpy as np

from experiments.synthetic import published
from experiments.synthetic.chance import run_values
from experiments.synthetic.published import PUBLISHED_TASKS, at
from experiments.synthetic.task import Examples, Task


def then_blanks(inputs, answers, V, asked=None):
    """Inputs [B, N], then a blank for each answer [B, K]; all of them are asked for by default."""
    blanks = np.full(answers.shape, V - 1)
    targets = np.concatenate([np.zeros_like(inputs), answers], axis=1)
    asked = np.ones(answers.shape, bool) if asked is None else asked
    asked = np.concatenate([np.zeros(inputs.shape, bool), asked], axis=1)
    return Examples(np.concatenate([inputs, blanks], axis=1), targets, asked)


def copy(rng, B, L, V):
    """The first half, token for token."""
    inputs = rng.integers(V - 1, size=(B, L // 2))
    return then_blanks(inputs, inputs, V)


def sort(rng, B, L, V):
    """The tokens of the first half in ascending order."""
    inputs = rng.integers(V - 1, size=(B, L // 2))
    return then_blanks(inputs, np.sort(inputs, axis=1), V)


def reverse(rng, B, L, V):
    """The first half backwards."""
    inputs = rng.integers(V - 1, size=(B, L // 2))
    return then_blanks(inputs, inputs[:, ::-1], V)


def retrieval(rng, B, L, V):
    """At the end: the token after the needle."""
    tokens, rows = rng.integers(V - 2, size=(B, L)), np.arange(B)
    needle = rng.integers(L - 2, size=B)
    tokens[rows, needle] = V - 1
    tokens[:, -1] = V - 2
    return at(tokens, -1, tokens[rows, needle + 1])


def selective_copy(rng, B, L, V):
    """The tokens that a marker preceded, a quarter of the inputs being markers."""
    N = L // 5
    inputs = rng.integers(V - 2, size=(B, 4 * N))
    places = np.sort(np.argsort(rng.random((B, 3 * N)), axis=1)[:, :N], axis=1)
    marked = places + np.arange(N)  # never side by side
    np.put_along_axis(inputs, marked, V - 2, axis=1)
    wanted = np.take_along_axis(inputs, marked + 1, axis=1)
    return then_blanks(inputs, wanted, V)


def distant_match(rng, B, L, V):
    """In the middle: the first token."""
    tokens = rng.integers(V, size=(B, L))
    return at(tokens, L // 2, tokens[:, 0])


def multihop(rng, B, L, V):
    """Tokens point to positions; at the end: what is two steps from the last token."""
    tokens, rows = rng.integers(L - 1, size=(B, L)), np.arange(B)
    return at(tokens, -1, tokens[rows, tokens[rows, tokens[:, -1]]])


def stack(rng, B, L, V):
    """At each POP: the value that is popped, every other token being a value that is pushed."""
    values = rng.integers(V - 1, size=(B, L))
    pop, _, popped = published.run_stack(values, rng.random((B, L)) < 0.5, np.ones((B, L), bool))
    return Examples(np.where(pop, V - 1, values), popped, pop)


def induction(rng, B, L, V):
    """A token that occurred once in the first half comes last; the token that followed it."""
    trigger, rows = rng.integers(V, size=B), np.arange(B)
    tokens = (trigger[:, None] + rng.integers(1, V, size=(B, L))) % V  # all others
    position = rng.integers(1, L // 2, size=B)
    tokens[rows, position] = tokens[:, -1] = trigger
    return at(tokens, -1, tokens[rows, position + 1])


def pattern(rng, B, L, V):
    """The next token of a sequence that repeats itself, once it has begun to."""
    tokens, targets, asked = published.pattern(rng, B, L, V)
    return Examples(tokens, targets, asked & (np.arange(L) >= 3))


def bigram(rng, B, L, V):
    """A fixed function of the token before."""
    tokens = rng.integers(V, size=(B, L))
    targets = published.bigram_table(V)[np.roll(tokens, 1, axis=1)]
    return Examples(tokens, targets, np.broadcast_to(np.arange(L) > 0, (B, L)))


def noisy_copy(rng, B, L, V):
    """The first half, token for token, with random tokens on three tenths of the blanks."""
    tokens, targets, asked = copy(rng, B, L, V)
    noise = rng.integers(V - 1, size=(B, L))
    return Examples(np.where(asked & (rng.random((B, L)) < 0.3), noise, tokens), targets, asked)


def compression(rng, B, L, V):
    """The token of each run of equal tokens of the first half."""
    inputs = published.runs(rng, B, L // 2, V - 1)
    values, number = run_values(inputs)
    return then_blanks(inputs, values, V, np.arange(L // 2) < number[:, -1:])


def histogram(rng, B, L, V):
    """How often each of 5 tokens occurs before."""
    inputs = rng.integers(5, size=(B, L - 5))
    return then_blanks(inputs, np.minimum(published.counts(inputs, 5), V - 1), V)


REPAIRED_TASKS = PUBLISHED_TASKS | {
    "copy": Task("basic", 64, 33, copy),
    "sort": Task("basic", 32, 33, sort),
    "reverse": Task("basic", 64, 33, reverse),
    "retrieval": Task("memory", 64, 64, retrieval),
    "selective_copy": Task("memory", 40, 33, selective_copy),
    "long_copy": Task("long_range", 256, 33, copy),
    "distant_match": Task("long_range", 128, 32, distant_match),
    "multihop": Task("long_range", 32, 32, multihop),
    "stack": Task("reasoning", 32, 32, stack),
    "induction": Task("reasoning", 64, 64, induction),
    "pattern": Task("reasoning", 32, 16, pattern),
    "bigram": Task("pattern", 32, 32, bigram),
    "noisy_copy": Task("robustness", 64, 33, noisy_copy),
    "compression": Task("robustness", 64, 17, compression),
    "histogram": Task("pattern", 37, 17, histogram),
}
