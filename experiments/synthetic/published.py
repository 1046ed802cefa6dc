"""SLAY's 22 synthetic tasks as the authors' code defines them, one function each.

Whatever a definition has that defeats its purpose is kept; `experiments.synthetic.repaired` lists
and repairs it.

Source: SLAY (arXiv 2602.04915), appendix on synthetic tasks, and the authors' benchmark of them.
"""

import numpy as np

from experiments.synthetic import chance
from experiments.synthetic.task import Examples, Task


def everywhere(tokens, targets):
    """Examples that ask for the targets of all positions."""
    return Examples(tokens, targets, np.ones(tokens.shape, bool))


def at(tokens, position, answers):
    """Examples that ask for one target each; position is a number or one for each sequence."""
    targets, asked = np.zeros(tokens.shape, int), np.zeros(tokens.shape, bool)
    rows = np.arange(len(tokens))
    targets[rows, position] = answers
    asked[rows, position] = True
    return Examples(tokens, targets, asked)


def copy(rng, B, L, V):
    """The token itself."""
    tokens = rng.integers(V, size=(B, L))
    return everywhere(tokens, tokens)


def sort(rng, B, L, V):
    """The tokens in ascending order."""
    tokens = rng.integers(V, size=(B, L))
    return everywhere(tokens, np.sort(tokens, axis=1))


def reverse(rng, B, L, V):
    """The tokens backwards."""
    tokens = rng.integers(V, size=(B, L))
    return everywhere(tokens, tokens[:, ::-1])


def retrieval(rng, B, L, V):
    """At the end: the needle, which is always the same token."""
    tokens = rng.integers(V - 2, size=(B, L))
    tokens[np.arange(B), rng.integers(L - 2, size=B)] = V - 1
    tokens[:, -1] = V - 2
    return at(tokens, -1, V - 1)


def kv_recall(rng, B, L, V):
    """Pairs of a key and a value, a separator, a key; at the end: its value."""
    N = (L - 2) // 2
    keys = rng.permuted(np.broadcast_to(np.arange(V - 1), (B, V - 1)), axis=1)[:, :N]
    values = rng.integers(V - 1, size=(B, N))
    tokens = np.full((B, L), V - 1)
    tokens[:, : 2 * N] = np.stack([keys, values], axis=-1).reshape(B, -1)
    rows, wanted = np.arange(B), rng.integers(N, size=B)
    tokens[:, -1] = keys[rows, wanted]
    return at(tokens, -1, values[rows, wanted])


def first_token(rng, B, L, V):
    """At the end: the first token."""
    tokens = rng.integers(V, size=(B, L))
    return at(tokens, -1, tokens[:, 0])


def selective_copy(rng, B, L, V):
    """From the middle on: the tokens that a marker preceded; 0 elsewhere.

    A quarter of the first half is markers. One may stand on the token that the marker before it
    asks for, which then is nowhere to be seen.
    """
    half = L // 2
    tokens = rng.integers(V - 1, size=(B, L))
    marked = np.sort(np.argsort(rng.random((B, half)), axis=1)[:, : max(1, half // 4)], axis=1)
    targets = np.zeros((B, L), int)
    wanted = np.take_along_axis(tokens, marked + 1, axis=1)
    targets[:, half : half + marked.shape[1]] = np.where(marked + 1 < half, wanted, 0)
    np.put_along_axis(tokens, marked, V - 1, axis=1)
    return everywhere(tokens, targets)


def distant_match(rng, B, L, V):
    """In the middle: the first token, unless it is 0."""
    tokens = rng.integers(V, size=(B, L))
    tokens, targets, asked = at(tokens, L // 2, tokens[:, 0])
    return Examples(tokens, targets, asked & (targets != 0))


def multihop(rng, B, L, V):
    """At the end: the token after the second of two pointers, each somewhere in its third."""
    tokens, rows = rng.integers(V - 2, size=(B, L)), np.arange(B)
    second = rng.integers(L // 3, 2 * L // 3, size=B)
    tokens[rows, rng.integers(L // 3, size=B)] = V - 2
    tokens[rows, second] = V - 1
    return at(tokens, -1, tokens[rows, second + 1])


def run_stack(values, wants_pop, wants_push):
    """What a stack machine does at each step: it pops, or else pushes, or else does nothing.

    Args:
        values: [B, L], what would be pushed.
        wants_pop, wants_push: [B, L] bool; an empty stack is not popped.

    Returns:
        pop, push: [B, L] bool; popped: [B, L], the values, 0 where nothing is popped.
    """
    B, L = values.shape
    rows, depth = np.arange(B), np.zeros(B, int)
    memory, popped = np.zeros((B, L), int), np.zeros((B, L), int)
    pop, push = np.zeros((B, L), bool), np.zeros((B, L), bool)
    for t in range(L):
        pop[:, t] = wants_pop[:, t] & (depth > 0)
        push[:, t] = wants_push[:, t] & ~pop[:, t]
        depth -= pop[:, t]
        popped[:, t] = np.where(pop[:, t], memory[rows, depth], 0)
        memory[rows[push[:, t]], depth[push[:, t]]] = values[push[:, t], t]
        depth += push[:, t]
    return pop, push, popped


def stack(rng, B, L, V):
    """The value that is popped, 0 elsewhere; the values that are pushed are not to be seen."""
    values, others = rng.integers(V - 2, size=(2, B, L))
    pop, push, popped = run_stack(values, rng.random((B, L)) < 0.3, rng.random((B, L)) < 0.5)
    return everywhere(np.where(pop, V - 1, np.where(push, V - 2, others)), popped)


def induction(rng, B, L, V):
    """A token of the first half is the last but one; at the end: the token that followed it."""
    tokens, rows = rng.integers(V, size=(B, L)), np.arange(B)
    trigger = rng.integers(1, L // 2, size=B)
    tokens[:, -2] = tokens[rows, trigger]
    return at(tokens, -1, tokens[rows, trigger + 1])


def pattern(rng, B, L, V):
    """The next token of a sequence that repeats itself every four tokens."""
    tokens = np.tile(rng.integers(V, size=(B, 4)), (1, L // 4 + 1))
    return everywhere(tokens[:, :L], tokens[:, 1 : L + 1])


def counting(rng, B, L, V):
    """At the end: how often 0 occurs, among 10 tokens."""
    tokens = rng.integers(min(V, 10), size=(B, L))
    return at(tokens, -1, np.minimum(np.sum(tokens == 0, axis=1), V - 1))


def parity(rng, B, L, V):
    """At the end: whether the number of ones is odd."""
    tokens = rng.integers(2, size=(B, L))
    return at(tokens, -1, np.sum(tokens, axis=1) % 2)


def addition(rng, B, L, V):
    """At the end: the number of ones."""
    tokens = rng.integers(2, size=(B, L))
    return at(tokens, -1, np.sum(tokens, axis=1) % V)


def modular(rng, B, L, V):
    """At the end: the sum modulo 7."""
    tokens = rng.integers(7, size=(B, L))
    return at(tokens, -1, np.sum(tokens, axis=1) % 7)


def bigram_table(V):
    """A fixed token for each token."""
    return np.random.default_rng(0).integers(V, size=V)


def bigram(rng, B, L, V):
    """A fixed function of the token itself."""
    tokens = rng.integers(V, size=(B, L))
    return everywhere(tokens, bigram_table(V)[tokens])


def counts(tokens, N):
    """How often each of the first N tokens occurs: [B, N]."""
    return np.sum(tokens[:, :, None] == np.arange(N), axis=1)


def majority(rng, B, L, V):
    """At the end: the most frequent of 5 tokens, the least of equals."""
    tokens = rng.integers(min(V, 5), size=(B, L))
    return at(tokens, -1, np.argmax(counts(tokens, 5), axis=1))


def noisy_copy(rng, B, L, V):
    """The first half's tokens at their own positions; 0 in the second half, which has noise."""
    half = L // 2
    tokens = rng.integers(V - 1, size=(B, L))
    tokens[:, half:][rng.random((B, L - half)) < 0.3] = V - 1
    return everywhere(tokens, np.where(np.arange(L) < half, tokens, 0))


def runs(rng, B, L, V):
    """Tokens in runs of 1 to 3: [B, L]."""
    ends = np.cumsum(rng.integers(1, 4, size=(B, L)), axis=1)
    run = np.sum(ends[:, None, :] <= np.arange(L)[:, None], axis=-1)
    return np.take_along_axis(rng.integers(V, size=(B, L)), run, axis=1)


def compression(rng, B, L, V):
    """The token of each run at the run's number, zeros after them."""
    tokens = runs(rng, B, L, V)
    return everywhere(tokens, chance.run_values(tokens)[0])


def histogram(rng, B, L, V):
    """How often each of 5 tokens occurs, in the first 5 positions; 0 elsewhere."""
    N = min(5, V)
    tokens = rng.integers(N, size=(B, L))
    targets = np.zeros((B, L), int)
    targets[:, :N] = np.minimum(counts(tokens, N), V - 1)
    return everywhere(tokens, targets)


PUBLISHED_TASKS = {
    "copy": Task("basic", 32, 32, copy),
    "sort": Task("basic", 16, 32, sort, chance.sort),
    "reverse": Task("basic", 32, 32, reverse, chance.reverse),
    "retrieval": Task("memory", 64, 64, retrieval),
    "kv_recall": Task("memory", 22, 64, kv_recall),
    "first_token": Task("memory", 64, 32, first_token),
    "selective_copy": Task("memory", 64, 32, selective_copy, chance.selective_copy),
    "long_copy": Task("long_range", 256, 32, copy),
    "distant_match": Task("long_range", 128, 32, distant_match),
    "multihop": Task("long_range", 64, 32, multihop),
    "stack": Task("reasoning", 32, 32, stack, chance.stack),
    "induction": Task("reasoning", 64, 64, induction, chance.induction),
    "pattern": Task("reasoning", 32, 16, pattern, chance.pattern),
    "counting": Task("arithmetic", 32, 32, counting),
    "parity": Task("arithmetic", 32, 2, parity),
    "addition": Task("arithmetic", 16, 32, addition),
    "modular": Task("arithmetic", 16, 8, modular),
    "bigram": Task("pattern", 32, 32, bigram),
    "majority": Task("pattern", 32, 8, majority),
    "noisy_copy": Task("robustness", 64, 32, noisy_copy),
    "compression": Task("robustness", 32, 16, compression, chance.compression),
    "histogram": Task("pattern", 32, 16, histogram, chance.histogram),
}
