"""Fits the linear attention of one layer to the softmax attention that it replaces."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lowrank_attn.features.slay_plan import cosine_histogram
from lowrank_attn.models.decoder import Decoder, count_positions


class Sample(NamedTuple):
    """What a layer reads.

    Attributes:
        x: [R, T, E] float32, the sum of what the layers before have written.
        segment_ids, positions: [R, T] int32.
    """

    x: jax.Array
    segment_ids: jax.Array
    positions: jax.Array


class Fitted(NamedTuple):
    """A layer that was fitted.

    Attributes:
        params: the trained leaves of its mixer by path.
        errors: before and after, of its heads' outputs on rows that were held out.
    """

    params: dict[str, np.ndarray]
    errors: tuple[float, float]


def first_sample(model: Decoder, tokens: np.ndarray, eot: int) -> Sample:
    """What the first layer reads of rows [R, T] of packed documents, each beginning with `eot`."""
    ids = jnp.asarray(tokens, jnp.int32)
    segments = jnp.cumsum(ids == eot, axis=1)
    x = model.embedding(ids).astype(jnp.float32)
    return Sample(x, segments, count_positions(ids, None, segments))


def calibrated_options(
    kernel: str, options: Mapping[str, Any], teacher: Decoder, sample: Sample
) -> dict[str, Any]:
    """Options of a kernel by what the teacher's queries and keys are.

    `slay_auto` is given the histogram of their cosines, the mean over layers and key heads.
    """
    if kernel != "slay_auto" or "histogram" in options:
        return dict(options)
    histograms = []
    project = nnx.jit(lambda block, x, at: block.mixer.project(block.mixer_norm(x), at)[:2])
    through = nnx.jit(lambda block, x, s, at: block(x, None, s, at, None)[0])
    x, segments, at = jax.tree.map(lambda x: x[:1], sample)
    for block in teacher.blocks:
        q, k = (np.asarray(y[0], np.float32) for y in project(block, x, at))
        group = q.shape[1] // k.shape[1]
        histograms += [cosine_histogram(q[:, h], k[:, h // group]) for h in range(q.shape[1])]
        x = through(block, x, segments, at)
    return {**options, "histogram": np.mean(histograms, axis=0).tolist()}


class LayerFitter:
    """Programs that are compiled once and serve all layers of a model.

    The outputs of each head, before the output projection, are brought close to those of the
    teacher on the teacher's own inputs:

        error = mean over heads of sum |y - y_teacher|^2 / sum |y_teacher|^2

    Trained are the feature map, the projections of queries and keys, and the gain, which begins
    where the error is least. A step changes a leaf by about `learning_rate` times the root mean
    square of its elements (Adam, with a cosine decay to 0).

    Args:
        teacher: the model with softmax attention in `linear` layers.
        student: the same model with other kernels there.
        steps: updates for each layer.
        batch_size: rows of an update.
        learning_rate: of the first step.

    Source: Hedgehog (arXiv 2402.04347) and LoLCATs (arXiv 2410.10254, its attention transfer) fit
    maps layer by layer; they train the maps only.
    """

    def __init__(
        self, teacher: Decoder, student: Decoder, steps: int, batch_size: int, learning_rate: float
    ):
        self._teacher, self._student = teacher, student
        self._steps, self._batch_size = steps, batch_size
        self._block, _ = nnx.split(teacher.blocks[0])
        self._mixer = nnx.split(student.blocks[0].mixer, _is_fitted, ...)[0]
        self._optimizer = optax.chain(
            optax.scale_by_adam(),
            optax.scale_by_param_block_rms(),
            optax.scale_by_learning_rate(optax.cosine_decay_schedule(learning_rate, steps)),
        )
        self._start = jax.jit(self._with_gain)
        self._run = jax.jit(self._train)
        self._measure = jax.jit(self._errors)
        self._next = jax.jit(self._through)

    def fit(self, layer: int, sample: Sample, held: Sample, key: jax.Array) -> Fitted:
        """Fit one layer on the rows of `sample`; the errors are those on the rows of `held`."""
        block = nnx.split(self._teacher.blocks[layer])[1]
        mixer = self._student.blocks[layer].mixer
        _, *states = nnx.split(mixer, _is_fitted, ...)
        fitted, rest = states
        first = jax.tree.map(lambda x: x[: self._batch_size], sample)
        fitted = self._start(fitted, rest, block, first)
        before = self._measure(fitted, rest, block, held)
        fitted = self._run(fitted, rest, block, sample, key)
        after = self._measure(fitted, rest, block, held)
        leaves = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(fitted)}
        params = {name: np.asarray(leaf[...]) for name, leaf in leaves.items()}
        return Fitted(params, (float(jnp.mean(before)), float(jnp.mean(after))))

    def next_sample(self, layer: int, sample: Sample) -> Sample:
        """What the teacher's next layer reads."""
        block = nnx.split(self._teacher.blocks[layer])[1]
        parts = [
            self._next(block, jax.tree.map(lambda x, i=i: x[i : i + self._batch_size], sample))
            for i in range(0, len(sample.x), self._batch_size)
        ]
        return sample._replace(x=jnp.concatenate(parts))

    def _through(self, block, sample):
        module = nnx.merge(self._block, block)
        return module(sample.x, None, sample.segment_ids, sample.positions, None)[0]

    def _outputs(self, fitted, rest, block, sample):
        """The outputs [B, T, Hq, P] of the teacher's heads and of the student's."""
        teacher = nnx.merge(self._block, block)
        student = nnx.merge(self._mixer, fitted, rest)
        x = teacher.mixer_norm(sample.x)
        return [
            layer.attend(
                *layer.project(x, sample.positions),
                segment_ids=sample.segment_ids,
                positions=sample.positions,
            )[0].astype(jnp.float32)
            for layer in (teacher.mixer, student)
        ]

    def _with_gain(self, fitted, rest, block, sample):
        """With the gain, if there is one, of the least squared error."""
        if "attend" in fitted and "gain" in fitted["attend"]:
            y, found = self._outputs(fitted, rest, block, sample)
            total = functools.partial(jnp.sum, axis=(0, 1))
            gain = fitted["attend"]["gain"]
            best = gain[...] * total(y * found) / total(jnp.square(found))
            gain.set_value(best.astype(gain.dtype))
        return fitted

    def _errors(self, fitted, rest, block, sample):
        """The relative squared error of each head, [Hq]."""
        y, found = self._outputs(fitted, rest, block, sample)
        total = functools.partial(jnp.sum, axis=(0, 1, 3))
        return total(jnp.square(found - y)) / total(jnp.square(y))

    def _train(self, fitted, rest, block, sample, key):
        def loss(fitted, rows):
            return jnp.mean(self._errors(fitted, rest, block, rows))

        def step(carry, key):
            fitted, state = carry
            rows = jax.random.choice(key, len(sample.x), (self._batch_size,), replace=False)
            gradient = jax.grad(loss)(fitted, jax.tree.map(lambda x: x[rows], sample))
            updates, state = self._optimizer.update(gradient, state, fitted)
            return (optax.apply_updates(fitted, updates), state), None

        start = (fitted, self._optimizer.init(fitted))
        return jax.lax.scan(step, start, jax.random.split(key, self._steps))[0][0]


def _is_fitted(path: tuple, variable: Any) -> bool:
    return isinstance(variable, nnx.Param) and path[0] in ("attend", "query", "key")


def with_fitted(params: Mapping[str, Any], layer: int, fitted: Mapping[str, Any]) -> dict[str, Any]:
    """A model's parameters with the trained leaves of one layer."""
    return {**params} | {f"blocks/{layer}/mixer/{name}": leaf for name, leaf in fitted.items()}
