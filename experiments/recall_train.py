"""Training of associative recall: several learning rates and seeds of one model at once.

The data live on the device, an epoch is one dispatch, and runs are `vmap`ped: models of this size
leave a GPU idle one by one.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.common import optimizer
from experiments.recall_data import Mix, Rows, Segment, draw
from experiments.recall_model import RecallModel
from lowrank_attn.features import FeatureMap, effective_rank

NOT_DECAYED = (*optimizer.NOT_DECAYED, "bias")
EVAL_PARTS = 8  # the test segments are read in so many parts
RANKED = 32  # sequences whose keys the effective rank is taken of
REPEATS = 10  # forward passes in a row that are timed
# Products as the libraries do them: a search for the fastest takes longer than these runs.
GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


class Batches(NamedTuple):
    """Data on the device, one `Rows` per length.

    Attributes:
        train: arrays [batches, batch, ...].
        test: arrays [parts, N / parts, ...].
        segments: of the test, in order.
    """

    train: list[Rows]
    test: list[Rows]
    segments: tuple[Segment, ...]

    def evaluated(self) -> tuple[list[Rows], Any]:
        """The test, and the longest training sequences with most pairs, for the effective rank."""
        return self.test, self.train[-1].tokens[-1, :RANKED]


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How every cell is trained.

    Attributes:
        epochs: passes over the training data, at most.
        share: of the mix's training examples that are used.
        batch: sequences per step.
        vocab_size: V.
        dropout: of the embedding.
        dtype: of the computation.
        stop_at: training ends when every seed has a rate with this mean accuracy.
    """

    epochs: int
    share: float
    batch: int
    vocab_size: int
    dropout: float
    dtype: str
    stop_at: float


class Run(NamedTuple):
    """One of the runs of a cell."""

    learning_rate: float
    seed: int


class Programs(NamedTuple):
    """What `compile_cell` returns: compiled for a number of runs, leaves of which lead with it.

    Attributes:
        init: from keys [R] to parameters, constants and the optimizer's state.
        epoch: one pass over the training data; donates parameters and state.
        evaluate: accuracies [R, segments] and effective ranks [R].
        forward: `REPEATS` forward passes of the attention layer of the first run, each of as many
            tokens as a step of the longest sequences.
        seconds: of compilation.
    """

    init: Any
    epoch: Any
    evaluate: Any
    forward: Any
    seconds: float


def place(mix: Mix, protocol: Protocol, seed: int) -> Batches:
    """Draw the data of a mix and put them on the device."""
    B = protocol.batch
    train = [
        segment._replace(examples=max(int(segment.examples * protocol.share) // B, 1) * B)
        for segment in mix.train
    ]
    rng = np.random.default_rng((seed, 0))
    made = draw(rng, train, protocol.vocab_size, mix.noise)
    rng = np.random.default_rng((seed, 1))
    tests = draw(rng, mix.test, protocol.vocab_size, mix.noise)

    def cut(rows, parts):
        return Rows(*(jnp.asarray(x.reshape(parts, -1, *x.shape[1:])) for x in rows))

    return Batches(
        [cut(rows, len(rows.tokens) // B) for rows in made],
        [cut(rows, EVAL_PARTS) for rows in tests],
        mix.test,
    )


def compile_cell(
    width: int,
    qk_dim: int,
    kernel: str,
    options: dict,
    protocol: Protocol,
    runs: int,
    data: Batches,
) -> Programs:
    """Compile everything that a cell needs; threads may do this while others train.

    Raises:
        ValueError: for kernels and options that do not fit.
    """
    began = time.perf_counter()

    def build(key):
        dtype = jnp.dtype(protocol.dtype)
        rngs = nnx.Rngs(params=key)
        return RecallModel(
            protocol.vocab_size, width, qk_dim, kernel, options, dtype=dtype, rngs=rngs
        )

    graph, *_ = nnx.split(nnx.eval_shape(build, jax.random.key(0)), nnx.Param, ...)
    merge = functools.partial(nnx.merge, graph)

    def init(key):
        _, params, constants = nnx.split(build(key), nnx.Param, ...)
        return params, constants, _adamw(0.0).init(params)

    def loss(params, constants, kept, rows):
        model = merge(params, constants)
        logits = model.logits(_at_labels(model.hidden(rows.tokens, kept), rows))
        real = rows.targets >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows.targets * real)
        return jnp.sum(losses * real) / jnp.sum(real)

    def step(lr, constants, carry, rows):
        params, state, key = carry
        key, own = jax.random.split(key)
        kept = None
        if protocol.dropout:
            shape = (*rows.tokens.shape, width)
            kept = jax.random.bernoulli(own, 1 - protocol.dropout, shape) / (1 - protocol.dropout)
        value, gradient = jax.value_and_grad(loss)(params, constants, kept, rows)
        updates, state = _adamw(lr).update(gradient, state, params)
        return (optax.apply_updates(params, updates), state, key), value

    def epoch(params, state, constants, key, lr, train):
        losses = []
        for rows in train:
            one = functools.partial(step, lr, constants)
            (params, state, key), values = jax.lax.scan(one, (params, state, key), rows)
            losses.append(values)
        return params, state, jnp.mean(jnp.concatenate(losses))

    def evaluate(params, constants, test, ranked):
        model = merge(params, constants)

        def part(rows):
            logits = model.logits(_at_labels(model.hidden(rows.tokens), rows))
            right = (jnp.argmax(logits, axis=-1) == rows.targets) & (rows.targets >= 0)
            return jnp.sum(right, axis=1) / jnp.sum(rows.targets >= 0, axis=1)

        accuracy = jnp.concatenate([jax.lax.map(part, rows).reshape(-1) for rows in test])
        ends = np.cumsum([segment.examples for segment in data.segments])
        means = [jnp.mean(each) for each in jnp.split(accuracy, ends[:-1])]
        rank = jnp.nan
        if isinstance(model.attention.attend.kernel, FeatureMap):
            _, x = model.before_attention(ranked)
            phi = model.attention.key_features(x)[:, :, 0]
            rank = effective_rank(phi.reshape(-1, phi.shape[-1]))
        return jnp.stack(means), rank

    def forward(params, constants, x):
        attention = merge(*jax.tree.map(lambda leaf: leaf[0], (params, constants))).attention
        return jax.lax.fori_loop(0, REPEATS, lambda _, x: attention(x)[0].astype(x.dtype), x)

    keys = jax.vmap(jax.random.key)(jnp.zeros(runs, jnp.int32))
    lr = jax.ShapeDtypeStruct((runs,), jnp.float32)
    x = jax.ShapeDtypeStruct((*data.train[-1].tokens.shape[1:], width), protocol.dtype)
    params, constants, state = jax.eval_shape(jax.vmap(init), keys)
    all_epochs = jax.vmap(epoch, (0, 0, 0, 0, 0, None))
    compiled = [
        jax.jit(f, donate_argnums=donated).lower(*args).compile(_options())
        for f, donated, args in (
            (jax.vmap(init), (), (keys,)),
            (all_epochs, (0, 1), (params, state, constants, keys, lr, data.train)),
            (jax.vmap(evaluate, (0, 0, None, None)), (), (params, constants, *data.evaluated())),
            (forward, (), (params, constants, x)),
        )
    ]
    seconds = time.perf_counter() - began
    return Programs(*compiled, seconds=seconds)  # type: ignore[arg-type,misc]


def train(
    programs: Programs, protocol: Protocol, runs: Sequence[Run], data: Batches
) -> Iterator[dict[str, Any]]:
    """Train all runs of a cell, and yield after every epoch what was measured, one row per run.

    Epoch 0 is the untrained model. The rate of an epoch is that of half a cosine, as published.
    """
    rates = jnp.asarray([run.learning_rate for run in runs], jnp.float32)
    keys = jax.vmap(jax.random.key)(jnp.asarray([run.seed for run in runs]))
    params, constants, state = programs.init(keys)
    loss = np.full(len(runs), np.nan)
    evaluated = data.evaluated()
    steps = sum(len(rows.tokens) for rows in data.train)
    x = jnp.ones((*data.train[-1].tokens.shape[1:], params.embedding.embedding.shape[-1]))
    forward_ms = _milliseconds(programs.forward, params, constants, x.astype(protocol.dtype))
    for epoch in range(protocol.epochs + 1):
        began = time.perf_counter()
        if epoch:
            factor = (1 + np.cos(np.pi * (epoch - 1) / protocol.epochs)) / 2
            own = jax.vmap(jax.random.fold_in, (0, None))(keys, epoch)
            params, state, loss = programs.epoch(
                params, state, constants, own, rates * factor, data.train
            )
        accuracies, ranks = (
            np.asarray(x) for x in programs.evaluate(params, constants, *evaluated)
        )
        seconds = time.perf_counter() - began
        means = np.mean(accuracies, axis=1)
        for run, *measured in zip(runs, np.asarray(loss), means, accuracies, ranks):
            names = ("loss", "accuracy", "accuracies", "rank")
            row = {"learning_rate": run.learning_rate, "seed": run.seed, "epoch": epoch}
            yield (
                row
                | dict(zip(names, measured))
                | {
                    "step": epoch * steps,
                    "seconds": seconds,
                    "forward_ms": forward_ms,
                }
            )
        best: dict[int, float] = {}
        for run, mean in zip(runs, means):
            best[run.seed] = max(best.get(run.seed, 0.0), float(mean))
        if min(best.values()) >= protocol.stop_at:
            break


def _adamw(lr):
    return optimizer.adamw(
        lr,
        weight_decay=0.1,
        no_decay=lambda name: name.split("/")[-1] in NOT_DECAYED,
        clip="none",
    )


def _at_labels(x, rows):
    return jnp.take_along_axis(x, rows.positions[..., None], axis=1)


def _options():
    return GPU_OPTIONS if jax.default_backend() == "gpu" else None


def _milliseconds(forward, *args):
    """The least time of one of the `REPEATS` passes, of three tries after the first."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        jax.block_until_ready(forward(*args))
        times.append(time.perf_counter() - began)
    return min(times[1:]) / REPEATS * 1e3
