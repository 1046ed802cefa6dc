"""Precision and propensity-scored precision at k of extreme multi-label classification."""

from collections.abc import Mapping

import numpy as np

from experiments.extreme_data import Examples

KS = (1, 3, 5)
# A and B of the propensity model that the extreme classification repository takes for a data set.
PROPENSITIES: Mapping[str, tuple[float, float]] = {
    name: constants
    for constants, names in {
        (0.55, 1.5): "generated Eurlex-4K Bibtex Delicious Mediamill RCV1-2K AmazonCat-13K "
        "Wiki10-31K Delicious-200K LF-WikiSeeAlsoTitles-320K LF-WikiSeeAlso-320K",
        (0.5, 0.4): "WikiLSHTC-325K Wikipedia-500K LF-Wikipedia-500K LF-WikiTitles-500K",
        (0.6, 2.6): "Amazon-670K Amazon-3M LF-Amazon-131K LF-AmazonTitles-131K "
        "LF-AmazonTitles-1.3M",
    }.items()
    for name in names.split()
}


def propensities(train: Examples, A: float, B: float) -> np.ndarray:
    """The probability that a label which applies is observed, [num_labels].

        p_l = 1 / (1 + C (N_l + B)^(-A)),  C = (log N - 1) (B + 1)^A

    with N training examples, of which N_l have label l. Source: Jain et al., Extreme multi-label
    loss functions (KDD 2016), equation of section 4.
    """
    counts = np.bincount(train.labels, minlength=train.num_labels)
    C = (np.log(len(train)) - 1) * (B + 1) ** A
    return 1 / (1 + C * (counts + B) ** -A)


def evaluate(top: np.ndarray, test: Examples, p: np.ndarray) -> dict[str, float]:
    """Metrics of ranked predictions.

        P@k = mean_i (1/k) sum_{l in top k} y_il
        PSP@k = sum_i sum_{l in top k} y_il / p_l  /  sum_i max_{k labels} sum_l y_il / p_l

    as the repository's evaluation has them: an example without labels counts as 0 in P@k. `raw@k`
    is the same numerator over k times the number of examples, which may exceed 1; the authors of
    SLAY report it as PSP@k.

    Args:
        top: [examples, at least 5] labels, best first.
        test: the examples.
        p: `propensities` of the training examples.
    """
    hits = np.zeros((len(test), max(KS)))
    gains, best = np.zeros_like(hits), np.zeros_like(hits)
    for i in range(len(test)):
        labels = test.labels[slice(*test.label_starts[i : i + 2])]
        predicted = top[i, : max(KS)]
        hits[i] = np.isin(predicted, labels)
        gains[i] = hits[i] / p[predicted]
        ideal = np.sort(1 / p[labels])[::-1][: max(KS)]
        best[i, : len(ideal)] = ideal
    found = {}
    for k in KS:
        found[f"P@{k}"] = float(hits[:, :k].sum() / (k * len(test)))
        reachable = best[:, :k].sum()
        found[f"PSP@{k}"] = float(gains[:, :k].sum() / reachable) if reachable else 0.0
        found[f"raw@{k}"] = float(gains[:, :k].sum() / (k * len(test)))
    return found


def most_frequent(train: Examples, count: int) -> np.ndarray:
    """The prediction [count, 5] that is the same for all: the labels seen most often."""
    counts = np.bincount(train.labels, minlength=train.num_labels)
    return np.tile(np.argsort(-counts, kind="stable")[: max(KS)], (count, 1))


def ceiling(test: Examples, p: np.ndarray) -> dict[str, float]:
    """What predicting the rarest of the true labels first would reach; PSP@k is 1 by definition."""
    top = np.zeros((len(test), max(KS)), np.int64)
    for i in range(len(test)):
        labels = test.labels[slice(*test.label_starts[i : i + 2])]
        ranked = labels[np.argsort(p[labels], kind="stable")]
        wrong = np.setdiff1d(np.arange(test.num_labels)[: max(KS) + len(labels)], labels)
        top[i] = np.concatenate([ranked, wrong])[: max(KS)]
    return evaluate(top, test, p)
