"""How often the best guess is right where a causal model cannot know a target of SLAY's tasks.

One function a task of `experiments.synthetic.published`, of the same name; see `Task.chance`.
"""

import numpy as np
from scipy.stats import binom


def run_values(tokens):
    """The token of each run of equal tokens, then zeros; and the number of runs so far: [B, L]."""
    changes = np.concatenate([np.ones((len(tokens), 1), bool), np.diff(tokens) != 0], axis=1)
    number = np.cumsum(changes, axis=1)
    values = np.zeros_like(tokens)
    np.put_along_axis(values, number - 1, tokens, axis=1)
    return values, number


def sort(tokens, V):
    """The mode of the order statistic, given the tokens so far."""
    B, L = tokens.shape
    below = np.cumsum(tokens[:, :, None] <= np.arange(V), axis=1)  # [B, L, V]
    chance = np.empty((B, L))
    for t in range(L):  # target <= v means that more than t of all tokens are <= v
        missing = np.arange(t + 2)
        table = binom.sf(missing[:, None] - 1, L - t - 1, (np.arange(V) + 1) / V)
        cumulative = table[np.maximum(t + 1 - below[:, t], 0), np.arange(V)]
        chance[:, t] = np.max(np.diff(cumulative, axis=1, prepend=0.0), axis=1)
    return chance


def reverse(tokens, V):
    """The first half asks for tokens that come later."""
    L = tokens.shape[1]
    seen = 2 * np.arange(L) >= L - 1
    return np.broadcast_to(np.where(seen, 1.0, 1 / V), tokens.shape)


def selective_copy(tokens, V):
    """Tokens under a marker are unknown."""
    half = tokens.shape[1] // 2
    marker = tokens[:, :half] == V - 1
    hidden = marker & np.pad(marker[:, 1:], ((0, 0), (0, 1)))
    N = marker[0].sum()
    chance = np.ones(tokens.shape)
    chance[:, half : half + N] = np.where(hidden[marker].reshape(-1, N), 1 / (V - 1), 1.0)
    return chance


def stack(tokens, V):
    """Popped values are unknown."""
    return np.where(tokens == V - 1, 1 / (V - 2), 1.0)


def induction(tokens, V):
    """The trigger may occur several times in the first half; all are equally likely."""
    half = tokens.shape[1] // 2
    same = tokens[:, 1:half] == tokens[:, -2:-1]
    followed = tokens[:, 2 : half + 1, None] == np.arange(V)
    votes = np.sum(same[:, :, None] & followed, axis=1)
    best = np.max(votes, axis=1) / np.sum(same, axis=1)
    return np.broadcast_to(best[:, None], tokens.shape)


def pattern(tokens, V):
    """The first three positions ask for tokens that come later."""
    return np.broadcast_to(np.where(np.arange(tokens.shape[1]) < 3, 1 / V, 1.0), tokens.shape)


def compression(tokens, V):
    """The target of position t is known if t + 1 runs have begun; else it is a later run's, or 0.

    A hidden state r says how many tokens of what was drawn as one run are still to come. Two drawn
    runs are one if their tokens are equal, with probability 1 / V.
    """
    B, L = tokens.shape
    # more[t][r, n]: the probability of at least n changes after position t
    more = np.zeros((L, 3, L + 1))
    more[..., 0] = 1
    for t in range(L - 2, -1, -1):
        after = more[t + 1]
        more[t, 1:] = after[:-1]
        begun = after.mean(axis=0)
        more[t, 0, 1:] = begun[1:] / V + begun[:-1] * (1 - 1 / V)
    again = np.zeros(L + 1)  # the probability that the n-th run from here has this run's token
    for n in range(1, L + 1):
        again[n] = 0.0 if n == 1 else (1 - again[n - 1]) / (V - 1)
    state = np.full((B, 3), 1 / 3)  # of r, given the tokens so far
    number, chance = run_values(tokens)[1], np.ones((B, L))
    for t in range(L):
        if t:
            ended = state[:, :1]
            same = np.concatenate([state[:, 1:], np.zeros((B, 1))], axis=1) + ended / (3 * V)
            same /= same.sum(axis=1, keepdims=True)
            changed = (tokens[:, t] != tokens[:, t - 1])[:, None]
            state = np.where(changed, 1 / 3, same)
        n = np.maximum(t + 1 - number[:, t], 0)
        exists = np.sum(state * more[t].T[n], axis=1)
        this, other = again[n], (1 - again[n]) / (V - 1)
        is_zero = tokens[:, t] == 0
        zero = 1 - exists + exists * np.where(is_zero, this, other)
        not_zero = exists * np.where(is_zero, other, np.maximum(this, other))
        chance[:, t] = np.where(n == 0, 1.0, np.maximum(zero, not_zero))
    return chance


def histogram(tokens, V):
    """Most of the tokens that are counted come later; V - 1, the most, is far from the mode."""
    L, N = tokens.shape[1], min(5, V)
    modes = [np.max(binom.pmf(np.arange(L), L - t - 1, 1 / N)) for t in range(N)]
    return np.broadcast_to(np.concatenate([modes, np.ones(L - N)]), tokens.shape)
