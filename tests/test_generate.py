"""Generation: the same text whatever the padding, the batch and the parts of the prompt."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from decoder_cases import every_mixer, random_model
from flax import nnx

from lowrank_attn.models.decoder import Decoder
from lowrank_attn.models.decoder_configs import DecoderConfig
from lowrank_attn.models.generate import generate, prefill, stream
from lowrank_attn.models.sampling import Sampling, log_probabilities, sample

V = 30
PROMPTS = [[3], list(range(1, 20)), [7, 7, 2, 9, 11, 0]]


@functools.cache
def make():
    model = random_model(every_mixer(V))
    state = nnx.state(model)
    # ids 30 and 31 are padding of the table; one of them would win every time
    table = state["embedding"]["embedding"]
    table.set_value(table[...].at[V:].set(jnp.array([[100], [-100]]) * table[...][0]))
    nnx.update(model, state)
    return model


# With one size of the cache there is one compiled program for each number of rows.
write = functools.partial(generate, max_new_tokens=8, max_length=40)


def padded(side):
    T = 4 + max(map(len, PROMPTS))
    tokens, mask = np.full((3, T), 5), np.zeros((3, T), bool)
    for row, prompt in enumerate(PROMPTS):
        start = {"left": T - len(prompt), "right": 0, "both": (T - len(prompt)) // 2}[side]
        tokens[row, start : start + len(prompt)] = prompt
        mask[row, start : start + len(prompt)] = True
    return tokens, mask


def test_greedy_text_is_the_likeliest_of_the_whole_sequence():
    model = make()
    texts = write(model, PROMPTS)
    rows = [prompt + text for prompt, text in zip(PROMPTS, texts)]
    T = max(map(len, rows))
    tokens = np.array([row + [0] * (T - len(row)) for row in rows])
    logits, _ = nnx.jit(Decoder.__call__)(model, tokens)
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts)):
        at = np.arange(len(prompt) - 1, len(prompt) + 7)
        assert text == np.argmax(logits[row, at, :V], axis=-1).tolist()
        assert np.argmax(logits[row, at[0]]) >= V  # what must not be chosen
    assert len({tuple(text) for text in texts}) == 3 and len(set(texts[1])) > 2


def test_padding_changes_no_bit():
    model = make()
    expected, state = prefill(model, PROMPTS, max_length=40)
    text = write(model, PROMPTS)
    for side in ("left", "right", "both"):
        found, same = prefill(model, *padded(side), max_length=40)
        for a, b in zip(jax.tree.leaves((found, same)), jax.tree.leaves((expected, state))):
            assert np.array_equal(a, b)
        assert write(model, *padded(side)) == text


def test_a_batch_says_what_each_prompt_says_alone():
    model = make()
    texts = write(model, PROMPTS)
    assert write(model, PROMPTS[2:]) == texts[2:]


def test_prompts_in_parts_are_the_whole():
    model = make()
    prompts = [np.random.default_rng(0).integers(0, V, 70), [1, 2, 3]]
    expected, whole = prefill(model, prompts, max_length=80, chunk_size=128)
    for chunk_size in (8, 32):
        logits, state = prefill(model, prompts, max_length=80, chunk_size=chunk_size)
        assert_close(logits[:, :V], expected[:, :V])
        assert state.length.tolist() == whole.length.tolist() == [70, 3]
        found, of = jax.tree.map(lambda x: x.astype(jnp.float32), (state, whole))
        assert_close(found, of)


def test_memory_and_programs_do_not_grow_with_the_prompt():
    layers = tuple(name for name in every_mixer(V).layers if name != "softmax")
    config = DecoderConfig(V, 16, layers, every_mixer(V).mixers, mlp_width=32)
    model = nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    nnx.update(model, jax.tree.map(lambda x: jnp.full(x.shape, 0.1, x.dtype), state))

    def sizes(length):
        _, state = prefill(model, [np.zeros(length, int)], chunk_size=16)
        return [leaf.shape for leaf in jax.tree.leaves(state)]

    short = sizes(17)
    with jax.no_tracing():
        assert sizes(300) == short


def test_rows_end_with_their_stop_token():
    model = make()
    texts = write(model, PROMPTS)
    stop = texts[1][2]
    run = functools.partial(stream, model, max_new_tokens=8, max_length=40)
    steps = list(run(PROMPTS, stop_tokens=[stop, 1000]))
    ended = write(model, PROMPTS, stop_tokens=[stop, 1000])
    for text, whole in zip(ended, texts):
        end = whole.index(stop) + 1 if stop in whole else 8
        assert text == whole[:end]
    assert len(steps) == max(map(len, ended)) and len(ended[1]) < 8
    assert [row[1] for row in steps][len(ended[1]) :] == [-1] * (len(steps) - len(ended[1]))
    # when all have ended nothing more is made
    assert len(list(run(PROMPTS[2:], stop_tokens=[texts[2][3]]))) == texts[2].index(texts[2][3]) + 1
    assert write(model, PROMPTS, max_new_tokens=0) == [[], [], []]


def test_sampling_needs_its_key_and_repeats_with_it():
    model = make()
    call = functools.partial(write, model, PROMPTS)
    a, b, c = (call(sampling=Sampling(1.0, 20, 0.95), key=jax.random.key(i)) for i in (0, 0, 1))
    assert a == b != c
    assert max(max(text) for text in a) < V
    assert call(sampling=Sampling(1.0, top_k=1), key=jax.random.key(0)) == call()
    with pytest.raises(ValueError, match="key=None with temperature=1.0"):
        call(sampling=Sampling(1.0))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, 1.0), (0.5, 3, 1.0), (2.0, None, 0.6), (1.0, 4, 0.5), (1.0, 50, 1e-9)],
)
def test_sampling_follows_the_distribution(temperature, top_k, top_p):
    logits = np.array([[0.1, 2.0, -1.0, 1.9, 0.7, 2.0], [3.0, 0, 0, 0, 0, -np.inf]])
    expected = []
    for row in logits:
        p = np.exp(row / temperature) / np.sum(np.exp(row / temperature))
        order = np.argsort(-p, kind="stable")[: top_k or 6]
        p_kept = p[order] / p[order].sum()
        order = order[: int(np.sum(np.cumsum(p_kept) - p_kept < top_p))]
        expected.append(np.where(np.isin(np.arange(6), order), p, 0) / p[order].sum())
    sampling = Sampling(temperature, top_k, top_p)
    found = jax.nn.softmax(log_probabilities(jnp.asarray(logits), sampling), axis=-1)
    assert_close(found, np.array(expected), 1e-6)
    keys = jax.random.split(jax.random.key(0), 4000)
    draws = jax.vmap(lambda key: sample(jnp.asarray(logits), key, sampling))(keys)
    for row in range(2):
        share = np.bincount(draws[:, row], minlength=6) / 4000
        assert np.max(np.abs(share - expected[row])) < 0.04  # five standard deviations
    assert sample(jnp.asarray(logits), keys[0], Sampling()).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts is empty, expected at least one"),
        ({"prompts": [[1], []]}, r"prompts\[1\] is empty, expected a token to go on from"),
        ({"prompts": [[1, 30]]}, r"prompts\[0\] has ids from 1 to 30, expected 0 to 29"),
        ({"max_length": 10}, "a prompt of 8 tokens and max_new_tokens=3 are more than max_length="),
        ({"mask": np.ones((1, 3), bool)}, r"mask has shape \(1, 3\), expected \(1, 8\)"),
    ],
)
def test_prompts_that_cannot_be_are_refused_before_anything_is_computed(arguments, message):
    arguments = {"prompts": [[1] * 8], "max_new_tokens": 3} | arguments
    with pytest.raises(ValueError, match=message):
        stream(make(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0, expected 0 or more"),
        ({"top_k": 0}, "top_k=0, expected at least 1"),
        ({"top_p": 0.0}, "top_p=0.0, expected a number in"),
    ],
)
def test_sampling_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)
