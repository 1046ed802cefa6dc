"""Data of extreme multi-label classification: the text format of its repository, and a generator.

A file has a header line and one line an example, labels and features counted from 0:

    3 5 4
    0,2 1:0.5 4:1.25
    3 0:1
     2:0.75

that is 3 examples of 5 features and 4 labels, of which the last has no label.
"""

import dataclasses
import math
import pathlib

import numpy as np

from experiments.common.record import write_text


@dataclasses.dataclass(frozen=True)
class Examples:
    """Sparse rows: row i has labels[label_starts[i] : label_starts[i + 1]], features likewise.

    Attributes:
        num_features, num_labels: how many there are.
        label_starts, feature_starts: int64 [examples + 1].
        labels, features: int32.
        values: float32, one for each feature.
    """

    num_features: int
    num_labels: int
    label_starts: np.ndarray
    labels: np.ndarray
    feature_starts: np.ndarray
    features: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.label_starts) - 1


def examples(num_features: int, num_labels: int, rows: list[tuple]) -> Examples:
    """Examples from rows of (labels, features, values)."""

    def joined(column, dtype):
        return np.concatenate([np.zeros(0, dtype), *(np.asarray(r[column], dtype) for r in rows)])

    def starts(column):
        return np.cumsum([0, *(len(row[column]) for row in rows)])

    return Examples(
        num_features, num_labels, starts(0), joined(0, np.int32), starts(1), joined(1, np.int32),
        joined(2, np.float32),
    )  # fmt: skip


def read(path: str | pathlib.Path) -> Examples:
    """Read a file.

    Raises:
        OSError: if it cannot be read.
        ValueError: as `file:line: what is wrong`.
    """
    rows = []
    with open(path, encoding="utf-8") as file:
        header = file.readline().split()
        if len(header) != 3 or not all(text.isdecimal() for text in header):
            raise ValueError(
                f"{path}:1: {' '.join(header)[:80]!r}, expected a header of three numbers: "
                "examples, features, labels."
            )
        count, num_features, num_labels = map(int, header)
        for number, line in enumerate(file, 2):
            try:
                rows.append(_parse(line.rstrip("\r\n"), num_features, num_labels))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if len(rows) != count:
        raise ValueError(
            f"{path}:{len(rows) + 1}: the file ends after {len(rows)} examples, its header says "
            f"{count}."
        )
    return examples(num_features, num_labels, rows)


def _parse(line, num_features, num_labels):
    first, _, rest = line.partition(" ")
    if ":" in first:
        raise ValueError("a line without labels must begin with a space.")
    labels = [_number(text, "label", num_labels) for text in first.split(",")] if first else []
    features, values = [], []
    for pair in rest.split():
        name, colon, value = pair.partition(":")
        if not colon:
            raise ValueError(f"{pair!r}, expected feature:value.")
        features.append(_number(name, "feature", num_features))
        try:
            values.append(float(value))
        except ValueError:
            raise ValueError(f"{pair!r}, expected a number after the colon.") from None
        if not math.isfinite(values[-1]):
            raise ValueError(f"{pair!r}, expected a finite value.")
    for what, found in (("label", labels), ("feature", features)):
        if len(set(found)) < len(found):
            raise ValueError(f"a {what} is given twice.")
    return labels, features, values


def _number(text, what, below):
    if not text.isdecimal() or int(text) >= below:
        raise ValueError(f"{what} {text!r}, expected a number from 0 to {below - 1}.")
    return int(text)


def write(path: pathlib.Path, data: Examples) -> None:
    """Write a file that `read` reads."""
    lines = [f"{len(data)} {data.num_features} {data.num_labels}"]
    for i in range(len(data)):
        of_labels = slice(*data.label_starts[i : i + 2])
        of_features = slice(*data.feature_starts[i : i + 2])
        labels = ",".join(map(str, data.labels[of_labels]))
        pairs = zip(data.features[of_features], data.values[of_features], strict=True)
        lines.append(" ".join([labels, *(f"{name}:{value:.6g}" for name, value in pairs)]))
    write_text(path, "\n".join(lines) + "\n")


def generate(
    seed: int, num_examples: int, num_features: int, num_labels: int, words: int = 300
) -> Examples:
    """Documents whose words come from those of their labels, half of them, or from all.

    Labels, and words, have frequencies that fall as 1 / (9 + rank). An example has a first label,
    and on average 4.3 more, 7 of 10 from the 20 labels around it. Each label has 40 words of its
    own. Values are 1 + log(count).

    Args:
        seed: of everything.
        num_examples, num_features, num_labels: the sizes; Eurlex-4K has 15,539 (and 3,809 for
            tests), 5,000 and 3,993, with 5.3 labels and 237 features an example.
        words: drawn for an example, repetitions included.
    """
    rng = np.random.default_rng(seed)

    def zipf(count):
        weights = 1 / (10 + np.arange(count))
        return rng.permutation(weights / weights.sum())

    label_weights, word_weights = zipf(num_labels), zipf(num_features)
    own = rng.choice(num_features, (num_labels, 40), p=word_weights)
    first = rng.choice(num_labels, num_examples, p=label_weights)
    more = rng.poisson(4.3, num_examples)
    around = (np.repeat(first, more) // 20 * 20 + rng.integers(0, 20, more.sum())) % num_labels
    elsewhere = rng.choice(num_labels, more.sum(), p=label_weights)
    others = np.split(np.where(rng.random(more.sum()) < 0.7, around, elsewhere), np.cumsum(more))
    of_all = rng.choice(num_features, (num_examples, words - words // 2), p=word_weights)
    rows = []
    for i in range(num_examples):
        labels = np.unique([first[i], *others[i]])
        of_labels = own[rng.choice(labels, words // 2), rng.integers(0, 40, words // 2)]
        features, counts = np.unique(np.concatenate([of_labels, of_all[i]]), return_counts=True)
        rows.append((labels, features, 1 + np.log(counts)))
    return examples(num_features, num_labels, rows)


def split(data: Examples, first: int) -> tuple[Examples, Examples]:
    """The first examples, and the rest."""

    def part(begin, end):
        labels, features = data.label_starts[begin : end + 1], data.feature_starts[begin : end + 1]
        return dataclasses.replace(
            data,
            label_starts=labels - labels[0],
            labels=data.labels[labels[0] : labels[-1]],
            feature_starts=features - features[0],
            features=data.features[features[0] : features[-1]],
            values=data.values[features[0] : features[-1]],
        )

    return part(0, first), part(first, len(data))
