"""Batches for training and evaluation, in an order that depends on the seed alone."""

import functools
from collections.abc import Iterator, Mapping
from typing import Protocol

import grain
import numpy as np

Batch = Mapping[str, np.ndarray]


class Source(Protocol):
    """Examples by number.

    `__getitem__(i)` gives one example as a dict of arrays of fixed shapes, `tokens` among them and,
    where examples are padded, `length`. A source may also have `take(indices)`, which gives the
    stacked arrays of several examples at once; it is used instead when it is there.

    Examples of different shapes need `take` and `sizes` [N], integers such that examples of one
    size have one shape and `take` gives the shape of the largest size among its examples. Batches
    are then made of examples of similar sizes.
    """

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        """One example."""
        ...


def take(source: Source, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Examples `indices` [B] of a source, stacked: each array is [B, ...]."""
    if hasattr(source, "take"):
        return dict(source.take(indices))
    examples = [source[int(i)] for i in indices]
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def batch_of_each_shape(source: Source, shape: tuple[int, ...]) -> Iterator[dict[str, np.ndarray]]:
    """For every shape that examples have, arrays [*shape, ...] with one such example throughout."""
    sizes = getattr(source, "sizes", np.zeros(len(source)))
    for i in np.unique(sizes, return_index=True)[1]:
        example = take(source, np.array([i]))
        yield {n: np.broadcast_to(x, shape + x.shape[1:]) for n, x in example.items()}


def train_iterator(
    source: Source,
    batch_size: int,
    steps_per_dispatch: int,
    seed: int,
    rows: np.ndarray | None = None,
) -> grain.DatasetIterator:
    """An endless iterator over shuffled batches.

    Every epoch is a new permutation of all the examples; epochs follow each other without a gap, so
    a batch may hold the end of one and the start of the next, and no example is ever left out.
    Where examples have `sizes`, the rows of up to 64 dispatches (an epoch, if that is less) are
    sorted by them, cut into dispatches, and these shuffled.
    Batches are prepared by a background thread, whose progress is not part of the state.

    Args:
        source: the examples.
        batch_size: B.
        steps_per_dispatch: K.
        seed: of the order, >= 0.
        rows: numbers of the rows of a batch that this process needs; None: all.

    Returns:
        An iterator over dicts of arrays [K, B, ...], or [K, len(rows), ...]. `get_state()` gives a
        small dict for JSON and `set_state` continues from one with exactly the batches that would
        have followed.

    Raises:
        ValueError: if the source is empty.
    """
    if len(source) == 0:
        raise ValueError("source has no examples.")

    sizes = getattr(source, "sizes", None)

    def gather(indices: np.ndarray) -> dict[str, np.ndarray]:
        indices = indices.reshape(steps_per_dispatch, batch_size)
        all_needed = rows is None or sizes is not None  # the largest decides on the shape
        indices = indices if all_needed else indices[:, rows]
        stacked = take(source, indices.reshape(-1))
        batches = {n: x.reshape(indices.shape + x.shape[1:]) for n, x in stacked.items()}
        if rows is None or not all_needed:
            return batches
        return {name: array[:, rows] for name, array in batches.items()}

    order = _Order(len(source), steps_per_dispatch * batch_size, seed, sizes)
    batches = grain.MapDataset.source(order).map(gather)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


class _Order:
    """The numbers of the examples of every dispatch.

    This is what Grain's range, shuffle, repeat and batch give together, but a dispatch at a time:
    theirs take 10 us of Python for every example. Raw bits are the same in every NumPy version.
    """

    def __init__(self, examples: int, rows: int, seed: int, sizes: np.ndarray | None):
        self._examples, self._rows, self._seed = examples, rows, seed
        self._sizes = sizes if sizes is not None and np.ptp(sizes) else None
        self._dispatches = min(max(examples // rows, 1), 64)  # that are sorted together
        self._epoch = functools.lru_cache(maxsize=2)(self._permutation)
        self._window = functools.lru_cache(maxsize=2)(self._sorted)

    def _permutation(self, epoch: int) -> np.ndarray:
        bits = np.random.PCG64((self._seed, epoch)).random_raw(self._examples)
        return np.argsort(bits, kind="stable")

    def __len__(self) -> int:
        return 2**62 // self._rows

    def __getitem__(self, dispatch: int) -> np.ndarray:
        if self._sizes is None:
            return self._shuffled(dispatch * self._rows, self._rows)
        window, place = divmod(dispatch, self._dispatches)
        return self._window(window)[place]

    def _shuffled(self, start: int, count: int) -> np.ndarray:
        epochs, places = np.divmod(np.arange(start, start + count), self._examples)
        return np.concatenate(
            [self._epoch(epoch)[places[epochs == epoch]] for epoch in np.unique(epochs).tolist()]
        )

    def _sorted(self, window: int) -> np.ndarray:
        """The dispatches of one window, [dispatches, rows]."""
        assert self._sizes is not None
        count = self._dispatches * self._rows
        rows = self._shuffled(window * count, count)
        rows = rows[np.argsort(self._sizes[rows], kind="stable")].reshape(-1, self._rows)
        bits = np.random.PCG64((self._seed, window, 1)).random_raw(self._dispatches)
        return rows[np.argsort(bits, kind="stable")]


def eval_batches(
    source: Source, batch_size: int, rows: np.ndarray | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Every example once, in order (where examples have `sizes`: in the order of these).

    Args:
        source: the examples.
        batch_size: B.
        rows: numbers of the rows of a batch that this process needs; None: all.

    Yields:
        Dicts of arrays [B, ...], or [len(rows), ...], with one more entry, `weight` [B] float32: 1
        for an example, 0 for the copies of the last example that fill up the last batch.

    Raises:
        ValueError: if the source is empty.
    """
    if len(source) == 0:
        raise ValueError("source has no examples.")
    sizes = getattr(source, "sizes", np.zeros(len(source)))
    order = np.argsort(sizes, kind="stable")
    for start in range(0, len(source), batch_size):
        places = np.arange(start, start + batch_size)
        batch = take(source, order[np.minimum(places, len(source) - 1)])
        batch["weight"] = (places < len(source)).astype(np.float32)
        yield batch if rows is None else {name: array[rows] for name, array in batch.items()}
