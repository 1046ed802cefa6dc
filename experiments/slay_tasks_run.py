"""Training of many small models at once, for `experiments.slay_tasks`.

Models of one kernel, for several tasks and seeds, are one program: their sequences are padded to a
common length and their vocabularies to a common size, neither of which a model can see, as it is
causal and the logits of other tokens are left out. Numbers are drawn on the host, a few steps
ahead of the device.
"""

import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.common.module import PureModule
from experiments.common.optimizer import leaf_names
from experiments.synthetic import Examples, Task
from lowrank_attn.layers.nnx import LinearAttention

VOCABULARY = 64  # of every model, the largest of a task
WIDTH, HEADS, LAYERS = 64, 4, 2
_STEPS = 100  # of one dispatch, at most


class Cell(NamedTuple):
    """One model to train: a task by name, and a seed."""

    name: str
    task: Task
    seed: int


class Result(NamedTuple):
    """What a trained model reaches on new sequences: accuracy and mean loss."""

    accuracy: float
    loss: float


class TaskModel(nnx.Module):
    """The authors' model: h = token + position, twice h += attention(h), logits = h W + b.

    No MLP and no LayerNorm. Matrices and biases begin as PyTorch's, uniform within fan_in^(-1/2),
    embeddings as N(0, 1). All projections have biases, as those of the authors' SLAY and Performer
    have (their softmax attention has none).

    Args:
        length: the longest sequence.
        kernel, options: see `LinearAttention`.
        rngs: key stream `params`.
    """

    def __init__(self, length: int, kernel: str, options: dict[str, Any], *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(1.0)
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, embedding_init=normal, rngs=rngs)
        self.position = nnx.Param(normal(rngs.params(), (length, WIDTH)))
        self.attention = nnx.List(
            LinearAttention(
                WIDTH,
                HEADS,
                kernel=kernel,
                options=options,
                causal=True,
                implementation="xla",
                rngs=rngs,
            )
            for _ in range(LAYERS)
        )
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        state = nnx.state(self, nnx.Param)
        for path, variable in nnx.to_flat_state(state):
            if path[-1] in ("kernel", "bias"):  # all of them read WIDTH numbers
                bound = WIDTH**-0.5
                draw = jax.random.uniform(rngs.params(), variable.shape, minval=-1, maxval=1)
                variable.set_value(bound * draw)
        nnx.update(self, state)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [B, T, VOCABULARY] of tokens [B, T]."""
        h = self.embedding(tokens) + self.position[...]
        for layer in self.attention:
            y, _ = layer(h)
            h = h + y
        return self.head(h)


class Program(NamedTuple):
    """Compiled functions over models, all stacked along a first axis.

    Attributes:
        init: keys -> parameters and the optimizer's state.
        train: (parameters, state, vocabulary sizes, batches [cells, steps, B, T]) -> the same
            after so many steps.
        evaluate: (parameters, vocabulary sizes, batches) -> accuracy and loss.
    """

    init: Any
    train: Any
    evaluate: Any


def program(length: int, kernel: str, options: dict[str, Any], learning_rate: float) -> Program:
    """How models with one kernel are trained: AdamW, weight decay 0.01 of everything trained."""
    model = PureModule(lambda rngs: TaskModel(length, kernel, options, rngs=rngs))

    def labels(params):
        names = ["frozen" if model.is_constant(n) else "trained" for n in leaf_names(params)]
        return jax.tree.unflatten(jax.tree.structure(params), names)

    optimizer = optax.partition(
        {"trained": optax.adamw(learning_rate, weight_decay=0.01), "frozen": optax.set_to_zero()},
        labels,
    )

    def init(key):
        params = model.init(key)
        return params, optimizer.init(params)

    def measure(params, vocabulary, batch):
        tokens, targets, asked = batch
        logits = model.module(params)(tokens.astype(jnp.int32))
        logits = jnp.where(jnp.arange(VOCABULARY) < vocabulary, logits, -1e9)
        targets = targets.astype(jnp.int32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        right = jnp.argmax(logits, axis=-1) == targets
        return jnp.sum(losses * asked), (jnp.sum(right & asked), jnp.sum(asked))

    def loss(params, vocabulary, batch):
        total, (_, count) = measure(params, vocabulary, batch)
        return total / count

    def train(params, state, vocabulary, batches):
        def step(carry, batch):
            params, state = carry
            updates, state = optimizer.update(
                jax.grad(loss)(params, vocabulary, batch), state, params
            )
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), batches)[0]

    def evaluate(params, vocabulary, batches):
        totals, (right, count) = jax.lax.map(
            functools.partial(measure, params, vocabulary), batches
        )
        return jnp.sum(right) / jnp.sum(count), jnp.sum(totals) / jnp.sum(count)

    return Program(
        jax.jit(jax.vmap(init)),
        jax.jit(jax.vmap(train), donate_argnums=(0, 1)),
        jax.jit(jax.vmap(evaluate)),
    )


def draw(cells: Sequence[Cell], part: int, steps: int, batch_size: int, length: int) -> Examples:
    """Batches [cells, steps, batch_size, length], a function of each cell and of `part`."""

    def of_cell(cell):
        rng = np.random.default_rng([zlib.crc32(cell.name.encode()), cell.seed, part])
        examples = cell.task.examples(rng, steps * batch_size)
        padding = ((0, 0), (0, length - cell.task.length))
        return [np.pad(x, padding).reshape(steps, batch_size, length) for x in examples]

    tokens, targets, asked = (np.stack(arrays) for arrays in zip(*map(of_cell, cells)))
    return Examples(tokens.astype(np.uint8), targets.astype(np.uint8), asked)


def key(cell: Cell) -> jax.Array:
    """The key of a cell's parameters; of the kind whose draws compile fastest."""
    (number,) = np.random.SeedSequence([zlib.crc32(cell.name.encode()), cell.seed]).generate_state(
        1
    )
    return jax.random.key(number, impl="rbg")


def parts(steps: int) -> Iterator[int]:
    """The steps of each dispatch."""
    yield from [_STEPS] * (steps // _STEPS)
    if steps % _STEPS:
        yield steps % _STEPS


def run_cells(
    cells: Sequence[Cell],
    length: int,
    kernel: str,
    options: dict[str, Any],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    eval_rows: int,
) -> list[Result]:
    """Train a model for each cell and evaluate it on `eval_rows` sequences (a multiple of B)."""
    compiled = program(length, kernel, options, learning_rate)
    vocabulary = jnp.array([cell.task.vocab_size for cell in cells])
    params, state = compiled.init(jnp.stack([key(cell) for cell in cells]))
    for part, count in enumerate(parts(steps), start=1):
        batches = draw(cells, part, count, batch_size, length)
        params, state = compiled.train(params, state, vocabulary, batches)
    batches = draw(cells, 0, eval_rows // batch_size, batch_size, length)
    accuracies, losses = jax.device_get(compiled.evaluate(params, vocabulary, batches))
    return [Result(float(a), float(loss)) for a, loss in zip(accuracies, losses)]
