"""Evaluation."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.common.data import Source, eval_batches
from experiments.common.placement import make_mesh, own_rows, place

# (params, batch, key) -> {name: (total, weight)}, two scalars each
EvalFn = Callable[[Any, Mapping[str, jax.Array], jax.Array], Mapping[str, tuple]]


def evaluate(
    eval_fn: EvalFn,
    params: Any,
    source: Source,
    batch_size: int,
    key: jax.Array,
    stop: Callable[[], bool] = lambda: False,
    mesh: Mesh | None = None,
) -> dict[str, float] | None:
    """Metrics over every example of a source, each counted once for any batch size.

    Args:
        eval_fn: `eval_fn(params, batch, key)` gives, by name, a total over the batch and the
            weight of that total (the number of examples or tokens); the metric is the sum of the
            totals over the sum of the weights. It must leave out examples with
            `batch["weight"] == 0`. Best jitted.
        params: a pytree.
        source: the examples.
        batch_size: B.
        key: batch i sees `fold_in(key, i)`.
        stop: asked before each batch whether to give up.
        mesh: over which devices batches are cut; None: over all, by rows.

    Returns:
        The metrics by name, or None if it gave up.

    Raises:
        ValueError: if the source is empty or the weights of a metric are all 0.
    """
    mesh = make_mesh() if mesh is None else mesh
    sums: dict[str, np.ndarray] = {}
    pending: Mapping[str, tuple] = {}
    rows = own_rows(batch_size, mesh)
    for i, batch in enumerate(eval_batches(source, batch_size, rows)):
        if stop():
            return None
        computed = eval_fn(params, place(batch, batch_size, mesh), jax.random.fold_in(key, i))
        _add(sums, pending)
        pending = computed
    _add(sums, pending)
    for name, (_, weight) in sums.items():
        if weight == 0:
            raise ValueError(
                f"eval_fn gave {name!r} a weight of 0 over all {len(source)} examples."
            )
    return {name: float(total / weight) for name, (total, weight) in sums.items()}


def at_chance(accuracy: float, chance: float, examples: int) -> bool:
    """Whether an accuracy cannot be told from that of always saying the most frequent label.

    True up to 3 standard errors above `chance`: chance + 3 sqrt(chance (1 - chance) / examples).
    """
    return accuracy <= chance + 3 * math.sqrt(chance * (1 - chance) / examples)


def _add(sums: dict[str, np.ndarray], totals: Mapping[str, tuple]) -> None:
    """Add a batch's totals and weights in float64; it waits for the batch to be computed."""
    for name, pair in totals.items():
        sums[name] = sums.get(name, np.zeros(2)) + np.array(jax.device_get(pair), np.float64)
