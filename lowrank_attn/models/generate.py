"""Text from a decoder, token by token, with memory that does not grow with what has been read.

    for tokens in stream(model, prompts, max_new_tokens=100, sampling=Sampling(0.8, top_p=0.95)):
        ...  # one token for each prompt

Prompts are read in parts of equal length, then every token is one call of the model. The state is
that of the mixers; only `softmax` layers keep a cache, for the longest text.
"""

import functools
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lowrank_attn.models.decoder import Decoder, DecoderState
from lowrank_attn.models.sampling import Sampling, sample

GREEDY = Sampling()
Prompts = Sequence[Sequence[int]] | np.ndarray


def stream(
    model: Decoder,
    prompts: Prompts,
    mask: np.ndarray | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    key: jax.Array | None = None,
    stop_tokens: Collection[int] = (),
    max_length: int | None = None,
    chunk_size: int = 2048,
) -> Iterator[np.ndarray]:
    """Continue a batch of prompts of any lengths, one token at a time.

    While a token is handed out, the next one is being computed already.

    Args:
        model: the model.
        prompts: token ids, at least one in each row; or with a mask, an array [B, T].
        mask: [B, T] bool, false at padding, before or after the tokens. Where padding is does not
            matter, not in a single bit.
        max_new_tokens: how many tokens to generate at most.
        sampling: how to choose them.
        key: for temperatures above 0.
        stop_tokens: a row ends with the first of these.
        max_length: most tokens of a prompt and its continuation; None: no limit. `softmax` layers
            make their cache for it, else for the longest of this batch.
        chunk_size: tokens that are read at once. Memory grows with it, not with the prompt; only
            `softmax` layers hold chunk_size x max_length scores for each head.

    Yields:
        [B] int32, the next token of each row; -1 in rows that have ended. It ends when all have.

    Raises:
        ValueError: for an empty prompt, ids that the model has not, a prompt that is too long for
            max_length, or a missing key.
    """
    _, real = pad(prompts, mask, model.vocab_size)
    prompt_length = int(real.sum(axis=1).max())
    longest = prompt_length + max_new_tokens
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"a prompt of {prompt_length} tokens and max_new_tokens={max_new_tokens} are more than "
            f"max_length={max_length}: shorten one of them."
        )
    if sampling.temperature > 0 and key is None:
        raise ValueError(f"key=None with temperature={sampling.temperature}, expected a jax key.")
    start = functools.partial(
        prefill, model, prompts, mask, max_length=max_length or longest, chunk_size=chunk_size
    )
    key = jax.random.key(0) if key is None else key
    return _stream(model, start, max_new_tokens, sampling, key, tuple(stop_tokens))


def generate(
    model: Decoder, prompts: Prompts, mask: np.ndarray | None = None, **arguments
) -> list[list[int]]:
    """The continuation of each prompt, with the stop token if it ended with one.

    The arguments are those of `stream`.
    """
    rows = list(stream(model, prompts, mask, **arguments))
    return [[int(token) for token in row if token >= 0] for row in zip(*rows)] or [
        [] for _ in prompts
    ]


def prefill(
    model: Decoder,
    prompts: Prompts,
    mask: np.ndarray | None = None,
    *,
    max_length: int = 0,
    chunk_size: int = 2048,
) -> tuple[jax.Array, DecoderState]:
    """Read prompts in parts: constant memory, and one compiled program for all long prompts.

    Args:
        model: the model.
        prompts, mask: see `stream`.
        max_length: see `Decoder.empty_state`.
        chunk_size: tokens that are read at once.

    Returns:
        Logits [B, V] after the last real token of each row, float32, -inf for ids beyond the
        vocabulary, and the state there.

    Raises:
        ValueError: see `stream`.
    """
    tokens, mask = pad(prompts, mask, model.vocab_size)
    B, T = tokens.shape
    # short prompts come in a few lengths, so that few programs are compiled
    width = min(chunk_size, 1 << (T - 1).bit_length())
    fill = ((0, 0), (-T % width, 0))
    tokens, mask = np.pad(tokens, fill), np.pad(mask, fill)
    read, state = _reader(model), model.empty_state(B, max_length)
    logits = None
    for start in range(0, tokens.shape[1], width):
        part = slice(start, start + width)
        logits, state = read(tokens[:, part], mask[:, part], state)
    assert logits is not None
    return logits, state


def pad(
    prompts: Prompts, mask: np.ndarray | None, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] with the prompts at the end of the rows, and the mask of real tokens.

    So there is one form of a batch, whatever padding it comes with.

    Raises:
        ValueError: see `stream`.
    """
    rows = [np.asarray(prompt) for prompt in prompts]
    if mask is not None:
        if np.shape(mask) != np.shape(prompts):
            raise ValueError(f"mask has shape {np.shape(mask)}, expected {np.shape(prompts)}.")
        rows = [row[real] for row, real in zip(rows, np.asarray(mask, bool))]
    if not rows:
        raise ValueError("prompts is empty, expected at least one prompt.")
    T = max(row.size for row in rows)
    for i, row in enumerate(rows):
        if not row.size:
            raise ValueError(
                f"prompts[{i}] is empty, expected a token to go on from, such as end-of-text."
            )
        if row.min() < 0 or row.max() >= vocab_size:
            raise ValueError(
                f"prompts[{i}] has ids from {row.min()} to {row.max()}, expected 0 to "
                f"{vocab_size - 1}: was another tokenizer used?"
            )
    tokens = np.stack([np.pad(row, (T - row.size, 0)) for row in rows]).astype(np.int32)
    return tokens, np.stack([np.arange(T) >= T - row.size for row in rows])


def _stream(model, start, steps, sampling, key, stop_tokens):
    """Compute step after step, and hand out each one when the next is under way."""
    (logits, state), read = start(), _reader(model)
    ended = jnp.zeros((len(logits),), bool)
    waiting = None
    for step in range(steps):
        token, shown, ended = _choose(logits, key, step, ended, sampling, stop_tokens)
        if step + 1 < steps:
            logits, state = read(token[:, None], ~ended[:, None], state)
        if waiting is not None:
            yield np.asarray(waiting)
        waiting = shown
        if stop_tokens and np.all(np.asarray(ended)):
            break
    if waiting is not None:
        yield np.asarray(waiting)


def _reader(model):
    """`read(tokens, mask, state)` -> logits after the last token of each row, and the state.

    Flax takes a model apart in Python, milliseconds for a large one, so that is done once.
    """
    graph, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    return functools.partial(_reading_program(graph, tree), leaves)


@functools.lru_cache(maxsize=8)
def _reading_program(graph, tree):
    @functools.partial(jax.jit, donate_argnums=3)
    def read(leaves, tokens, mask, state):
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        x, state = model.hidden(tokens, mask, state=state)
        logits = model.logits(x[:, -1])
        # rows of the table beyond the vocabulary are padding
        return jnp.where(jnp.arange(logits.shape[-1]) < model.vocab_size, logits, -jnp.inf), state

    return read


@functools.partial(jax.jit, static_argnums=(4, 5))
def _choose(logits, key, step, ended, sampling, stop_tokens):
    """The next token of each row, the same with -1 in ended rows, and which rows have ended."""
    token = sample(logits, jax.random.fold_in(key, step), sampling)
    stops = functools.reduce(jnp.logical_or, [token == stop for stop in stop_tokens], ended)
    return token, jnp.where(ended, -1, token), stops
