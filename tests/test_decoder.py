"""The causal language model and its mixers: states, packed documents, padding, dtypes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from decoder_cases import random_model
from flax import nnx

from lowrank_attn.models.decoder import REMAT, count_positions
from lowrank_attn.models.decoder_configs import CONFIGS, DecoderConfig

B, T, V = 2, 40, 30
MIXERS = {
    "short_conv": ("short_conv", {}),
    "taylor": ("linear", {"num_heads": 2, "qk_dim": 4, "kernel": "taylor", "chunk_size": 16}),
    "llops": ("linear", {"num_heads": 2, "options": {"num_features": 12}, "use_rotary": True}),
    "gated_delta": ("linear", {"num_heads": 2, "kernel": "elu", "rule": "gated_delta"}),
    "sliding_window": ("sliding_window", {"num_heads": 2, "window": 5}),
    "wide_window": ("sliding_window", {"num_heads": 2, "window": 300}),
    "softmax": ("softmax", {"num_heads": 2, "rotary_fraction": 0.5}),
    "mamba": ("mamba", {"state_size": 4}),
}
every = pytest.mark.parametrize("name", [name for name in MIXERS if name != "wide_window"])


@functools.cache
def make(name, **arguments):
    """A model with numbers that matter everywhere, which the initial ones of 0.02 do not."""
    mixer, options = MIXERS[name]
    config = DecoderConfig(V, 16, (mixer,), {mixer: options}, mlp_width=32, vocab_multiple=8)

    return random_model(config, 0, 0.2, ("scale", "b", "gain"), **arguments)


@nnx.jit
def run(model, *args, **keywords):
    return model(*args, **keywords)


def tokens(seed=0, shape=(B, T)):
    return np.random.default_rng(seed).integers(0, V, shape)


@pytest.mark.parametrize("name", MIXERS)
def test_parts_and_single_tokens_are_the_whole(name):
    """In batches with junk on either side of the tokens, whose rows stop at different times."""
    model = make(name)
    ids = tokens()
    whole, none = run(model, ids)
    assert none is None and whole.shape == (B, T, 32) and whole.dtype == jnp.float32

    # Row 0 reads 9 and 12 tokens, row 1 reads 15 and 2.
    left = np.stack([np.concatenate([tokens(1, (6,)), ids[0, :9]]), ids[1, :15]])
    right = np.stack([ids[0, 9:24], np.concatenate([ids[1, 15:17], tokens(2, (13,))])])
    state = model.empty_state(B, T)
    _, state = run(model, left, np.arange(15) >= np.array([[6], [0]]), state=state)
    logits, state = run(model, right, np.arange(15) < np.array([[15], [2]]), state=state)
    assert_close(logits[0], whole[0, 9:24])
    assert_close(logits[1, :2], whole[1, 15:17])
    assert state.length.tolist() == [24, 17]
    # One more token for row 1 alone: the state of row 0 stays.
    for reads, start in [((False, True), (0, 17)), ((True, True), (24, 18))]:
        one = np.stack([ids[row, at : at + 1] for row, at in enumerate(start)])
        logits, state = run(model, one, np.array(reads)[:, None], state=state)
        assert_close(logits[1, 0], whole[1, start[1]])
    assert_close(logits[0, 0], whole[0, 24])


@every
def test_packed_documents_are_read_apart(name):
    """Each is read as if it were alone, and the state is that of the last one."""
    model = make(name)
    lengths = np.array([13, 2, 25])
    alone = tokens(shape=(3, T))
    row = np.concatenate([document[:n] for document, n in zip(alone, lengths)])[None]
    segments = np.repeat(np.array([4, 9, 4]), lengths)[None]
    packed, _ = run(model, row, segment_ids=segments)
    expected, _ = run(model, alone)
    expected = np.concatenate([logits[:n] for logits, n in zip(expected, lengths)])
    assert_close(packed[0], expected)

    # A call goes on with the first document's last token, and stops after one of the last document.
    _, state = run(model, row[:, :12], state=model.empty_state(1, T))
    mask = np.arange(12, T)[None] < 16
    logits, state = run(model, row[:, 12:], mask, segment_ids=segments[:, 12:], state=state)
    assert_close(logits[0, :4], expected[12:16])
    assert state.length.tolist() == [1]
    logits, _ = run(model, row[:, 16:20], state=state)
    assert_close(logits[0], expected[16:20])


@every
def test_nothing_reaches_back_or_across_documents(name):
    """Inside its own document a token has influence on the next ones."""
    graph, state = nnx.split(make(name))
    segments = jnp.repeat(jnp.arange(2), 20)[None]
    ids = tokens(shape=(1, T))

    def loss(state, embedded):
        model = nnx.merge(graph, state)
        model.embed = lambda tokens: embedded
        hidden, _ = model.hidden(ids, segment_ids=segments)
        return jnp.sum(hidden[:, 30] ** 2)

    influence = jax.jit(jax.grad(loss, 1))(state, state["embedding"]["embedding"][...][ids])
    influence = jnp.max(jnp.abs(influence), axis=(0, 2))
    nearest = {"short_conv": 2, "sliding_window": 5}.get(name, 10)
    assert jnp.all(influence[30 - nearest : 31] > 0)
    # Sums of log decays are subtracted, and in gradients that leaves their rounding.
    limit = 1e-6 * jnp.max(influence) if name == "gated_delta" else 0
    assert jnp.all(influence[:20] <= limit) and jnp.all(influence[31:] <= limit)


def test_remat_changes_no_gradient():
    ids = tokens()

    def program(remat):
        graph, state = nnx.split(make("short_conv", remat=remat))

        def loss(state):
            logits, _ = nnx.merge(graph, state)(ids)
            return -jnp.mean(jax.nn.log_softmax(logits)[:, :-1, 3])

        return jax.jit(jax.grad(loss)).trace(state), state

    programs = {remat: program(remat) for remat in REMAT}
    products = {
        remat: str(traced.jaxpr).count("dot_general") for remat, (traced, _) in programs.items()
    }
    assert products["none"] == products["dots"] < products["full"]
    assert ["remat" in str(traced.jaxpr) for traced, _ in programs.values()] == [False, True, True]
    expected, found = (
        nnx.to_pure_dict(programs[remat][0].lower().compile()(programs[remat][1]))
        for remat in ("none", "full")
    )
    assert_close(found, expected)


@every
def test_bfloat16_keeps_float32_parameters_residual_and_logits(name):
    model = make(name, dtype=jnp.bfloat16)
    logits, state = run(model, tokens(), state=model.empty_state(B, T))
    assert logits.dtype == jnp.float32
    block = functools.partial(model.blocks[0], mask=None, segment_ids=None, state=None)
    x, _ = jax.eval_shape(block, jnp.ones((B, 3, 16)), positions=jnp.arange(3))
    assert x.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
    sums = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.float32]
    assert bool(sums) == (name in ("taylor", "llops", "gated_delta", "mamba"))
    expected, _ = run(make(name), tokens())
    # roundings to 8 bits at some ten places of two layers
    assert_close(logits, expected, 3e-2)


def test_positions_are_counted_over_real_tokens_of_a_document():
    mask = jnp.array([[0, 1, 1, 1, 1, 1, 0]], bool)
    segments = jnp.array([[5, 5, 5, 2, 2, 5, 5]])
    found = count_positions(segments, mask, segments, jnp.array([[7]]))
    assert found[0, 1:6].tolist() == [7, 8, 0, 1, 0]
    assert count_positions(segments, None, None).tolist() == [list(range(7))]


def test_begin_like_the_published_models():
    config = DecoderConfig(
        500, 64, ("short_conv", "linear"), {"linear": {"num_heads": 2}}, mlp_width=128
    )
    model = nnx.jit(lambda: config.make(rngs=nnx.Rngs(0)))()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    first, second = params["blocks"].values()
    for matrix in (params["embedding"]["embedding"], first["mixer"]["up"]["kernel"],
                   second["mixer"]["query"]["kernel"], first["mlp"]["up"]["kernel"]):  # fmt: skip
        assert abs(jnp.std(matrix) / 0.02 - 1) < 0.05
    for matrix in (first["mixer"]["out"]["kernel"], second["mixer"]["out"]["kernel"],
                   first["mlp"]["out"]["kernel"]):  # fmt: skip
        assert abs(jnp.std(matrix) / 0.01 - 1) < 0.05  # 0.02 / sqrt(2 L)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("based-360m", 362_620_928),
        ("based-1b", 1_349_453_056),
        # 24 (4 d^2 + 3 d 2816 + 2 d) + 50272 d + d with d = 1024
        ("attn-360m", 359_810_048),
        # 46 (6 d^2 + 2 d (4 + 1 + 96 + 64 + 1 + 16 + 1) + d) + 50288 d + d
        ("mamba-360m", 358_190_080),
    ],
)
def test_published_sizes(name, size):
    config = CONFIGS[name]
    model = nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == size
    stored = json.loads(json.dumps(dataclasses.asdict(config)))
    assert DecoderConfig.from_dict(stored) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ("conv",)}, "layers has 'conv', which is unknown; known: short_conv, linear"),
        ({"mixers": {"mamba": {"heads": 2}}}, r"mixers\['mamba'\]={'heads': 2} do not fit"),
        ({"remat": "all"}, "remat='all' is unknown; known: none, dots, full"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, message):
    config = {"vocab_size": V, "width": 16, "layers": ("mamba",), "mixers": {}}
    arguments = {"remat": change.pop("remat")} if "remat" in change else {}
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**(config | change)).make(rngs=nnx.Rngs(0), **arguments)


def test_states_that_cannot_be_are_refused():
    options = {"num_heads": 2, "kernel": "window_linear"}
    config = DecoderConfig(V, 16, ("softmax", "linear"), {"linear": options})
    config = config.replace_mixer("softmax", num_heads=2)
    model = nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="max_length=0, expected the length of the longest text"):
        model.empty_state(1)
    with pytest.raises(ValueError, match="this model cannot go on from a state: a layer is `lin"):
        model.empty_state(1, 10)
    with pytest.raises(ValueError, match="rotary_fraction=0.6 of head size 8 is 4|expected an ev"):
        config.replace_mixer("softmax", rotary_fraction=0.4).make(rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="this is no description of a decoder: .*'depth'"):
        DecoderConfig.from_dict({"depth": 3})
