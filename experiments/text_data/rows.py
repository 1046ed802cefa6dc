"""Rows of T tokens with documents packed one after another."""

from collections.abc import Sequence

import numpy as np

from experiments.tasks.base import DataError


class Rows:
    """A random-access source for `experiments.common.data`: a split of a `TokenText` in rows.

    Row i has tokens i T to i T + T - 1 of all shards together as `tokens` [T] and the next token of
    each as `targets` [T], in the dtype of the shards; what does not fill a row at the end is left
    out. So every token but the first is predicted once. A document begins at its end-of-text id:
    that id is the target of the last token of the document before, and what predicts the first
    token of its own. One that does not end in a row goes on in the next as if it began there.

    Args:
        shards: arrays [n] of ids; they may be memory-mapped.
        length: T.
        limit: at most so many rows, evenly spread; None: all.

    Raises:
        DataError: if there is not a single row.
    """

    def __init__(self, shards: Sequence[np.ndarray], length: int, limit: int | None = None):
        """Count the rows."""
        self._shards, self.length = shards, length
        self._ends = np.cumsum([len(shard) for shard in shards])
        count = (int(self._ends[-1]) - 1) // length
        if count < 1:
            raise DataError(
                f"a part of the text has {self._ends[-1]} tokens, less than a row",
                tried=[],
                expected=f"at least length + 1 = {length + 1} tokens",
                remedy="take more text, a smaller --length, or a larger --validation_share.",
            )
        rows = np.arange(count)
        self._rows = rows if limit is None or limit >= count else rows[:: -(-count // limit)]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One row."""
        row = self._read(self._rows[index] * self.length)
        return {"tokens": row[:-1], "targets": row[1:]}

    def _read(self, start: int) -> np.ndarray:
        """T + 1 tokens from here on, from as many shards as it takes."""
        stop, parts = start + self.length + 1, []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[shard])
            tokens = self._shards[shard]
            first = end - len(tokens)
            parts.append(tokens[start - first : min(stop, end) - first])
            start, shard = end, shard + 1
        return np.concatenate(parts)
