"""The grammar of ListOps: tokens, evaluation and fast random trees.

A tree is a digit or an operator over 2 to 10 trees, in prefix form: `[MAX 2 [MIN 4 7 ] 0 ]`.

Source: Nangia and Bowman, "ListOps" (2018), as drawn by the generator of Long Range Arena (Tay et
al. 2020). We draw from the same distribution, but level by level for thousands of trees at once and
from other random numbers, so the trees themselves are not those of the published files.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from experiments.tasks.base import Split

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
DIGITS = tuple("0123456789")
VOCABULARY = ("<pad>", "<mask>", *OPERATORS, "]", *DIGITS)
"""Token of each id. The order is part of the data: a model trained on it depends on it."""

MIN_LENGTH = 501
MAX_LENGTH = 1999
PADDED_LENGTH = 2000
MAX_DEPTH = 10
MAX_ARGUMENTS = 10
TREES_PER_BLOCK = 4096

_IDS = {token: i for i, token in enumerate(VOCABULARY)}
_FIRST_OPERATOR = _IDS[OPERATORS[0]]
_FIRST_DIGIT = _IDS[DIGITS[0]]
_CLOSE = _IDS["]"]
_MASK = _IDS["<mask>"]
_VALUE_OF = {digit: int(digit) for digit in DIGITS}


def tokenize(source: str) -> list[str]:
    """Split the written form: parentheses go, `[OP`, digits and `]` stay.

    `( ( ( [MAX 2 ) 9 ) ] )` gives `["[MAX", "2", "9", "]"]`. Long Range Arena also renames `]` to
    `X`, for the sake of its tokenizer only; we keep `]`.
    """
    return source.replace("(", "").replace(")", "").split()


def encode(tokens: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Give the ids, uint8 [T], of T tokens.

    Raises:
        ValueError: if a token is not in `VOCABULARY`.
    """
    try:
        return np.fromiter((_IDS[token] for token in tokens), np.uint8, len(tokens))
    except KeyError as error:
        known = " ".join((*OPERATORS, "]", *DIGITS))
        raise ValueError(f"unknown token {error.args[0]!r}, expected one of: {known}") from None


def decode(ids: npt.ArrayLike) -> list[str]:
    """Give the tokens of integer ids [T]; the inverse of `encode`."""
    return [VOCABULARY[i] for i in np.asarray(ids).tolist()]


def _apply(operator: str, values: list[int]) -> int:
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    ordered = sorted(values)
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2


def evaluate(tokens: Sequence[str]) -> int:
    """Give the value 0..9 of one expression.

    `[MED` of an even number of values is the mean of the middle two without its fraction; `[SM` is
    the sum modulo 10.

    Raises:
        ValueError: if the tokens are not exactly one complete expression.
    """
    operators: list[str] = []
    values: list[int] = []
    outer: list[list[int]] = []
    for token in tokens:
        if token in _VALUE_OF:
            values.append(_VALUE_OF[token])
        elif token == "]":
            if not operators:
                raise ValueError("unbalanced brackets: a `]` without its operator")
            if not values:
                raise ValueError(f"operator `{operators[-1]}` without arguments")
            result = _apply(operators.pop(), values)
            values = outer.pop()
            values.append(result)
        elif token in OPERATORS:
            operators.append(token)
            outer.append(values)
            values = []
        else:
            raise ValueError(f"token {token!r} cannot be evaluated")
    if operators:
        raise ValueError(f"unbalanced brackets: {len(operators)} operators without their `]`")
    if len(values) != 1:
        raise ValueError(f"{len(values)} expressions in a row, expected exactly one")
    return values[0]


def prune(ids: npt.ArrayLike, levels: int) -> npt.NDArray[Any]:
    """Keep the top of a balanced expression, ids [T]: its outer `levels` levels of operators.

    Each operator below them becomes, with all that belongs to it, one `<mask>`. With one level
    `[SM 1 [MAX 2 [MIN 3 4 ] ] ]` becomes `[SM 1 <mask> ]`.
    """
    ids = np.asarray(ids)
    opens, closes = (ids >= _FIRST_OPERATOR) & (ids < _CLOSE), ids == _CLOSE
    level = np.cumsum(opens) - np.cumsum(closes) + closes
    hole = opens & (level == levels + 1)
    return np.where(hole, _MASK, ids)[hole | (level <= levels)]


class _Level(NamedTuple):
    """The nodes of one depth in all trees, in the order of their parents."""

    tree: npt.NDArray[np.int32]
    arity: npt.NDArray[np.int32]  # 0 for a digit
    symbol: npt.NDArray[np.uint8]  # a digit's value, or an operator's index

    def where(self, keep: npt.NDArray[np.bool_]) -> "_Level":
        return _Level(self.tree[keep], self.arity[keep], self.symbol[keep])


def _grow(bits: np.random.PCG64) -> tuple[list[_Level], npt.NDArray[np.int64]]:
    """Draw `TREES_PER_BLOCK` trees; those that get too long stop growing.

    Of each node's 64-bit word the two highest bits say operator (probability 1/4) or digit, bits 32
    and 33 which operator, and the low 32 bits which digit or how many arguments. Only raw words are
    drawn because numpy keeps those, unlike its distributions, the same in all versions.
    """
    lengths = np.zeros(TREES_PER_BLOCK, np.int64)
    tree = np.arange(TREES_PER_BLOCK, dtype=np.int32)
    levels = []
    for depth in range(1, MAX_DEPTH + 1):
        words = bits.random_raw(len(tree))
        low = words.astype(np.uint32)
        is_operator = words < 2**62 if depth < MAX_DEPTH else np.zeros(len(tree), bool)
        arity = np.where(is_operator, 2 + low % (MAX_ARGUMENTS - 1), 0).astype(np.int32)
        symbol = np.where(is_operator, words >> 32 & 3, low % 10).astype(np.uint8)
        levels.append(_Level(tree, arity, symbol))
        lengths += np.bincount(tree, minlength=TREES_PER_BLOCK)
        lengths += np.bincount(tree[is_operator], minlength=TREES_PER_BLOCK)
        tree = np.repeat(tree, np.where(lengths[tree] <= MAX_LENGTH, arity, 0))
    return levels, lengths


def _combine(
    operator: npt.NDArray[np.uint8],
    arity: npt.NDArray[np.int32],
    values: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Evaluate operators [K] over their arguments, `values` [sum of arity] in order."""
    first = np.cumsum(arity) - arity
    owner = np.repeat(np.arange(len(arity)), arity)
    ordered = np.sort(owner * 16 + values) & 15
    low, high = ordered[first + (arity - 1) // 2], ordered[first + arity // 2]
    choices = [
        ordered[first],
        ordered[first + arity - 1],
        (low + high) // 2,
        np.add.reduceat(values, first) % 10,
    ]
    return np.choose(operator, choices)


def generate_block(seed: int, block: int) -> Split:
    """Draw `TREES_PER_BLOCK` trees and return those of 501 to 1999 tokens (about one in twelve).

    A node at depth 1..9 is an operator with probability 1/4, one at depth 10 never; operators,
    their 2..10 arguments and digits are uniform. The result is a pure function of the arguments.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(block,)))
    levels, tree_lengths = _grow(bits)
    accepted = (tree_lengths >= MIN_LENGTH) & (tree_lengths <= MAX_LENGTH)
    levels = [level.where(accepted[level.tree]) for level in levels]
    tree_lengths = tree_lengths[accepted]

    values: list[npt.NDArray[np.int64]] = []
    sizes: list[npt.NDArray[np.int64]] = []
    for level in reversed(levels):
        value = level.symbol.astype(np.int64)
        size = np.ones(len(value), np.int64)
        is_operator = level.arity > 0
        if is_operator.any():
            arity = level.arity[is_operator]
            value[is_operator] = _combine(level.symbol[is_operator], arity, values[-1])
            size[is_operator] = 2 + np.add.reduceat(sizes[-1], np.cumsum(arity) - arity)
        values.append(value)
        sizes.append(size)

    tokens = np.empty(tree_lengths.sum(), np.uint8)
    position = np.cumsum(tree_lengths) - tree_lengths
    for level, size, child_size in zip(levels, sizes[::-1], [*sizes[-2::-1], None]):
        is_operator = level.arity > 0
        tokens[position] = level.symbol + np.where(is_operator, _FIRST_OPERATOR, _FIRST_DIGIT)
        tokens[(position + size - 1)[is_operator]] = _CLOSE
        if child_size is not None and len(child_size):
            arity = level.arity[is_operator]
            before = np.cumsum(child_size) - child_size
            start = position[is_operator] + 1 - before[np.cumsum(arity) - arity]
            position = np.repeat(start, arity) + before
    lengths, labels = tree_lengths.astype(np.int32), values[-1].astype(np.int32)
    return Split(tokens, lengths, labels, PADDED_LENGTH)
