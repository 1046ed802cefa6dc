"""The ListOps grammar against golden cases, and its random trees against exact distributions."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.tasks import listops_grammar as grammar

GOLDEN = json.loads((Path(__file__).parent / "golden/listops.json").read_text())["examples"]


def sequence(split, i):
    return split.tokens[split.offsets[i] : split.offsets[i + 1]]


@pytest.fixture(scope="module")
def blocks():
    return [grammar.generate_block(3, block) for block in range(10)]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["note"][:40])
def test_golden(case):
    tokens = grammar.tokenize(case["source"])
    assert tokens == case["tokens"].split()
    assert len(tokens) == case["num_tokens"]
    decoded = grammar.decode(grammar.encode(tokens))
    assert decoded == tokens
    assert grammar.evaluate(decoded) == case["target"]


def test_parentheses_go_and_brackets_stay():
    assert grammar.tokenize("( ( ( [MAX 2 ) 9 ) ] )") == ["[MAX", "2", "9", "]"]


def test_vocabulary_is_fixed():
    expected = "<pad> <mask> [MIN [MAX [MED [SM ] 0 1 2 3 4 5 6 7 8 9"
    assert " ".join(grammar.VOCABULARY) == expected


def test_encode_names_the_unknown_token():
    with pytest.raises(ValueError, match=r"unknown token '\[FIRST'.*\[MIN"):
        grammar.encode(["[FIRST", "1", "]"])


def test_prune():
    tokens = grammar.tokenize("[SM 1 [MAX 2 [MIN 3 4 ] ] [MED 5 6 ] 7 ]")
    ids = grammar.encode(tokens)
    assert grammar.decode(grammar.prune(ids, 1)) == grammar.tokenize("[SM 1 <mask> <mask> 7 ]")
    expected = grammar.tokenize("[SM 1 [MAX 2 <mask> ] [MED 5 6 ] 7 ]")
    assert grammar.decode(grammar.prune(ids, 2)) == expected
    assert grammar.decode(grammar.prune(ids, 3)) == tokens


def test_every_label_is_the_value_of_its_tokens(blocks):
    for block in blocks[:3]:
        for i in range(len(block)):
            assert grammar.evaluate(grammar.decode(sequence(block, i))) == block.labels[i]


def test_trees_have_ten_levels_and_two_to_ten_arguments(blocks):
    arities = set()
    for i in range(len(blocks[0])):
        counts, deepest = [0], 0
        for token in grammar.decode(sequence(blocks[0], i)):
            if token == "]":
                arities.add(counts.pop())
            else:
                counts[-1] += 1
                deepest = max(deepest, len(counts))
                if token in grammar.OPERATORS:
                    counts.append(0)
        assert deepest <= 10
    assert arities == set(range(2, 11))


def exact_length_probabilities():
    """Probability of each length 0..1999 of a drawn tree, by recursion over the depth."""

    def multiply(a, b):
        return np.convolve(a, b)[:2000]

    tree = np.zeros(2000)
    tree[1] = 1.0
    for _ in range(9):
        power, arguments = tree, np.zeros(2000)
        for _ in range(2, 11):
            power = multiply(power, tree)
            arguments += power / 9
        tree = np.zeros(2000)
        tree[1] = 0.75
        tree[2:] += 0.25 * arguments[:-2]
    return tree


def test_lengths_have_the_exact_distribution(blocks):
    """Acceptance within 5 standard deviations, lengths within the DKW bound for one in 10^6."""
    accepted = exact_length_probabilities()[501:]
    rate = accepted.sum()
    assert rate == pytest.approx(0.0828, abs=1e-4)
    lengths = np.sort(np.concatenate([block.lengths for block in blocks]))
    drawn = len(blocks) * grammar.TREES_PER_BLOCK
    assert abs(len(lengths) / drawn - rate) < 5 * np.sqrt(rate * (1 - rate) / drawn)
    assert lengths[0] >= 501 and lengths[-1] <= 1999
    empirical = np.searchsorted(lengths, np.arange(501, 2000), side="right") / len(lengths)
    distance = np.abs(empirical - np.cumsum(accepted) / rate).max()
    assert distance < np.sqrt(np.log(2e6) / (2 * len(lengths)))


def test_symbols_and_labels_have_the_right_frequencies(blocks):
    """Operators and digits are uniform whatever the shape; 5 standard deviations."""
    tokens = np.concatenate([block.tokens for block in blocks])
    counts = np.bincount(tokens, minlength=17)
    for ids in (range(2, 6), range(7, 17)):
        n, p = counts[ids].sum(), 1 / len(ids)
        assert (np.abs(counts[ids] / n - p) < 5 * np.sqrt(p * (1 - p) / n)).all()
    assert counts[6] == counts[2:6].sum()
    labels = np.bincount(np.concatenate([block.labels for block in blocks])) / sum(map(len, blocks))
    error = 5 * np.sqrt(0.17 * 0.83 / sum(map(len, blocks)))
    np.testing.assert_allclose(labels[[0, 9]], 0.17, atol=error)
    np.testing.assert_allclose(labels[1:9], 0.083, atol=0.013 + error)


def test_a_seed_gives_the_same_trees_for_ever():
    digest = hashlib.sha256(grammar.generate_block(0, 0).tokens).hexdigest()
    assert digest == "ba52b0dc84213f9c5f9a899f5bb785b84e88fdd350cd43b3ab12fe39b73595af"


def test_blocks_and_seeds_differ():
    drawn = [grammar.generate_block(*key).lengths for key in ((0, 0), (0, 1), (1, 0))]
    assert len({lengths.tobytes() for lengths in drawn}) == 3
