"""Queries and keys of a deep model with polynomial attention, trained on associative recall."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.common import optimizer
from experiments.recall_data import Segment, generate
from lowrank_attn.models.decoder import Decoder

BATCH = 256
EPOCH = 25  # batches that are drawn; training repeats them
PAIRS = 8  # of sequences of 64 tokens


class Heads(NamedTuple):
    """Queries and keys of n heads.

    Attributes:
        q, k: [n, N, D] float32, of mean square 1 in each head.
    """

    q: np.ndarray
    k: np.ndarray


def unit_scale(q: np.ndarray, k: np.ndarray) -> Heads:
    """The same up to one factor for each head, which changes no relative error."""

    def scaled(x):
        x = np.asarray(x, np.float32)
        return x / np.sqrt(np.mean(np.square(x), axis=(1, 2), keepdims=True))

    return Heads(scaled(q), scaled(k))


def read_heads(path: str, rows: int) -> Heads:
    """Queries and keys of another model: an .npz file with q, k [heads, tokens, D].

    Raises:
        ValueError: if an array is missing or has other axes, or has fewer than `rows` tokens.
    """
    with np.load(path) as arrays:
        missing = [name for name in "qk" if name not in arrays]
        if missing:
            raise ValueError(f"heads={path!r} lacks {', '.join(missing)}; it has {list(arrays)}.")
        q, k = arrays["q"], arrays["k"]
    if q.ndim != 3 or q.shape != k.shape or q.shape[1] < rows:
        raise ValueError(
            f"heads={path!r} has q {q.shape} and k {k.shape}, expected [heads, tokens, D] of both, "
            f"with at least {rows} tokens: half of them for the sketches, half held out."
        )
    return unit_scale(q[:, :rows], k[:, :rows])


def trained_heads(
    degree: int,
    layers: int,
    width: int,
    vocab_size: int,
    steps: int,
    learning_rate: float,
    chosen: list[int],
    rows: int,
) -> tuple[Heads, float]:
    """Train, and sample queries and keys of the chosen attention layers from new sequences.

    One short convolution, then `layers` layers of attention with scores (q . k)^degree, one head
    of the full width each, no MLPs and no positions. Projections to queries and keys begin as
    N(0, 1 / width), the other matrices as those of `Decoder`.

    Returns:
        The heads, `rows` tokens of each, and the accuracy of recall on new sequences.
    """
    rng = np.random.default_rng(degree)
    segment = Segment(64, PAIRS, BATCH * EPOCH)
    train = generate(rng, segment, vocab_size, True)
    test = generate(rng, segment._replace(examples=BATCH), vocab_size, True)
    model = Decoder(
        vocab_size,
        width,
        ("short_conv",) + ("linear",) * layers,
        {"linear": {"num_heads": 1, "kernel": "poly", "options": {"degree": degree}}},
        rngs=nnx.Rngs(degree),
    )
    for block in model.blocks:
        if hasattr(block.mixer, "query"):  # scores of order one, or their powers begin near zero
            for matrix in (block.mixer.query.kernel, block.mixer.key.kernel):
                matrix.set_value(matrix[...] * (width**-0.5 / 0.02))
    graph, params, *rest = nnx.split(model, nnx.Param, ...)
    batches = jax.tree.map(lambda x: jnp.asarray(x.reshape(EPOCH, BATCH, -1)), train)
    schedule = optimizer.learning_rate_schedule("cosine", learning_rate, steps // 10, steps)
    update = optimizer.adamw(schedule, weight_decay=0.1)

    def logits(model, rows):
        x, _ = model.hidden(rows.tokens)
        return model.logits(jnp.take_along_axis(x, rows.positions[..., None], axis=1))

    def loss(params, rows):
        scores = logits(nnx.merge(graph, params, *rest), rows)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, rows.targets))

    def step(carry, i):
        params, state = carry
        gradient = jax.grad(loss)(params, jax.tree.map(lambda x: x[i % EPOCH], batches))
        updates, state = update.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params):
        (params, _), _ = jax.lax.scan(step, (params, update.init(params)), jnp.arange(steps))
        return params

    model = nnx.merge(graph, run(params), *rest)
    right = nnx.jit(logits)(model, jax.tree.map(jnp.asarray, test)).argmax(-1) == test.targets
    q, k = _queries_and_keys(model, test.tokens[: max(4, rows // 16)], chosen)
    picked = [np.random.default_rng((degree, 1, side)).permutation(q.shape[1]) for side in range(2)]
    return unit_scale(q[:, picked[0][:rows]], k[:, picked[1][:rows]]), float(np.mean(right))


def _queries_and_keys(model, tokens, chosen):
    """[chosen, B T, D] of both."""

    @nnx.jit
    def read(model, tokens):
        x = model.embedding(tokens).astype(jnp.float32)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        found = []
        for block in model.blocks:
            h = block.mixer_norm(x)
            if hasattr(block.mixer, "query"):
                found.append((block.mixer.query(h), block.mixer.key(h)))
            x, _ = block(x, None, None, positions, None)
        return [jnp.stack([pair[side] for pair in found]) for side in range(2)]

    q, k = read(model, jnp.asarray(tokens))
    return [np.asarray(x)[chosen].reshape(len(chosen), -1, x.shape[-1]) for x in (q, k)]
