"""Classifiers of `experiments.extreme`: scores of labels by kernels, and their training."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.common.optimizer import adamw
from experiments.extreme_data import Examples
from experiments.extreme_metrics import KS
from lowrank_attn.features import (
    FeatureMap,
    elu,
    favor,
    favor_relu,
    hedgehog,
    llops,
    polysketch,
    relu,
    slay,
    slay_auto,
)
from lowrank_attn.features.unit_rows import unit_rows

LEAST_SCORE = 1e-9  # before the logarithm
EPSILON = 1e-4  # of the exact kernel
# Maps whose scores are never negative, of M features a head where M can be chosen.
MAPS: dict[str, Callable[[int], FeatureMap]] = {
    "slay_paper": lambda M: slay(2, 16, M // 32, 1e-6, frequencies="iid", scaled=False),
    "slay": lambda M: slay(1, 32, M // 32),
    "slay_pairs": lambda M: slay(1, None, M, fusion="pairs"),
    "slay_auto": slay_auto,
    "llops_p2": lambda M: llops(2, M, squared=True),
    "llops_p4": lambda M: llops(4, M, squared=True),
    "favor_relu": favor_relu,
    "favor": favor,
    "polysketch": lambda M: polysketch(math.isqrt(M)),
    "performer_paper": lambda M: favor_relu(64),
    "hedgehog": lambda M: hedgehog(),
    "elu": lambda M: elu(),
    "relu": lambda M: relu(),
}
EXACT = ("linear", "yat_spherical")
KERNELS = (*MAPS, *EXACT)


class Model(NamedTuple):
    """One kind of scores: `init(key)` -> (trained, constant), `logits(trained, constant, bags)`.

    Attributes:
        features: of all heads together; None for exact scores.
    """

    init: Callable
    logits: Callable
    features: int | None


def model(kernel: str, num_features: int, num_labels: int, width: int, heads: int, M: int) -> Model:
    """Labels are keys, an example is a query, and there are no values.

        q = unit(mean of the embeddings of the example's features)   [width]
        logit_l = log max(sum_h phi_h(q_h) . phi_h(w_l,h), 1e-9)

    with a trained vector w_l for each label and q_h, w_l,h the parts of `heads` equal parts.
    `linear` has the logits q . w_l, `yat_spherical` the exact kernel of whole vectors for the sum.
    Embeddings and w begin as Gaussian numbers of variance 1 / width.
    """
    D = width // heads
    feature_map = MAPS[kernel](M) if kernel in MAPS else None

    def init(key):
        keys = jax.random.split(key, 3)
        shapes = {"embedding": (num_features, width), "w": (num_labels, width)}
        trained = {
            name: width**-0.5 * jax.random.normal(k, shape)
            for (name, shape), k in zip(shapes.items(), keys[:2], strict=True)
        }
        if feature_map is None:
            return trained, {}
        of_map, constant = feature_map.init(keys[2], D, heads)
        return trained | {"map": dict(of_map)}, dict(constant)

    def phi(params, x, is_query):
        """[n, heads * features], scores sum over both."""
        rows = x.reshape(1, -1, heads, D)
        return feature_map(params, rows, is_query=is_query).reshape(len(x), -1)

    def logits(trained, constant, bags):
        q, w = unit_rows(bags @ trained["embedding"]), trained["w"]
        if kernel == "linear":
            return q @ w.T
        if feature_map is None:
            x = jnp.clip(q @ unit_rows(w).T, -1.0, 1.0)
            scores = jnp.square(x) / (2.0 + EPSILON - 2.0 * x)
        else:
            params = trained["map"] | constant
            scores = phi(params, q, True) @ phi(params, w, False).T
        return jnp.log(jnp.maximum(scores, LEAST_SCORE))

    return Model(jax.jit(init), logits, None if feature_map is None else heads * feature_map.dim(D))


class Batch(NamedTuple):
    """Examples of one size as lists of (row, feature) and (row, label), weight 0 where padded."""

    feature_rows: np.ndarray
    features: np.ndarray
    feature_weights: np.ndarray
    label_rows: np.ndarray
    labels: np.ndarray
    label_weights: np.ndarray


def batches(data: Examples, order: np.ndarray, size: int) -> Iterator[Batch]:
    """Batches in an order of examples, the last one filled up with empty rows.

    Weights are 1 / (features of the example) and 1 / (labels): values of features do not count, as
    in the authors' code.
    """

    def most(starts):
        return int(np.sort(np.diff(starts))[::-1][:size].sum())

    longest = most(data.feature_starts), most(data.label_starts)

    def gather(rows, starts, values, length):
        counts = np.diff(starts)[rows]
        where = np.concatenate(
            [np.arange(starts[row], starts[row + 1]) for row in rows] or [np.zeros(0, int)]
        )
        padding = (0, length - len(where))
        weights = np.repeat(1 / np.maximum(counts, 1), counts)
        return (
            np.pad(np.repeat(np.arange(len(rows)), counts).astype(np.int32), padding),
            np.pad(values[where], padding),
            np.pad(weights.astype(np.float32), padding),
        )

    for first in range(0, len(order), size):
        rows = order[first : first + size]
        yield Batch(
            *gather(rows, data.feature_starts, data.features, longest[0]),
            *gather(rows, data.label_starts, data.labels, longest[1]),
        )


def train(
    it: Model, data: Examples, test: Examples, key: jax.Array, *,
    epochs: int, batch_size: int, learning_rate: float, seed: int,
) -> tuple[np.ndarray, float]:  # fmt: skip
    """Train by softmax cross-entropy with the labels' equal shares; Adam, gradients clipped to 1.

    Returns:
        The five best labels of every test example, and the mean loss of the last epoch.
    """
    optimizer, step, best = _programs(
        it, data.num_features, data.num_labels, batch_size, learning_rate
    )
    trained, constant = it.init(key)
    state = optimizer.init(trained)
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        losses = []
        for batch in batches(data, rng.permutation(len(data)), batch_size):
            trained, state, value = step(trained, state, constant, batch)
            losses.append(value)
    ordered = batches(test, np.arange(len(test)), batch_size)
    top = np.concatenate([np.asarray(best(trained, constant, batch)) for batch in ordered])
    return top[: len(test)], float(np.mean(losses))


@functools.cache
def _programs(it, num_features, num_labels, batch_size, learning_rate):
    """The optimizer, a step, and the best labels of a batch, compiled once for all seeds."""
    optimizer = adamw(learning_rate)

    def logits(trained, constant, batch):
        rows = batch.feature_rows, batch.features, batch.feature_weights
        return it.logits(trained, constant, _dense(batch_size, num_features, *rows))

    def loss(trained, constant, batch):
        rows = batch.label_rows, batch.labels, batch.label_weights
        targets = _dense(batch_size, num_labels, *rows)
        found = logits(trained, constant, batch)
        return jnp.mean(optax.softmax_cross_entropy(found, targets))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(trained, state, constant, batch):
        value, gradient = jax.value_and_grad(loss)(trained, constant, batch)
        updates, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, value

    @jax.jit
    def best(trained, constant, batch):
        return jax.lax.top_k(logits(trained, constant, batch), max(KS))[1]

    return optimizer, step, best


def _dense(num_rows, num_columns, rows, columns, weights):
    return jnp.zeros((num_rows, num_columns)).at[rows, columns].add(weights)
