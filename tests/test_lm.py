"""Training of language models from the command line, its loss, and its count of operations."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close
from flax import nnx

from experiments import lm
from experiments.common.module import PureModule
from experiments.flops import peak_flops, training_flops
from experiments.lm_objective import next_token
from experiments.lm_settings import RECIPES, Config, choose_recipe
from experiments.lm_start import Start
from lowrank_attn.models.decoder_configs import CONFIGS, DecoderConfig
from lowrank_attn.models.folder import arrays_of, build, load_decoder, save_decoder

EOT = 256
MIXERS = {
    "short_conv": {"expand": 2, "kernel_size": 3},
    "linear": {"num_heads": 2, "qk_dim": 4, "kernel": "taylor"},
    "sliding_window": {"num_heads": 2, "window": 4},
    "softmax": {"num_heads": 2},
    "mamba": {"state_size": 4},
}
EVERY = DecoderConfig(257, 16, tuple(MIXERS), MIXERS, mlp_width=32, vocab_multiple=8)
SMALL = DecoderConfig(257, 16, ("short_conv", "linear"), MIXERS, mlp_width=32)
ONE = DecoderConfig(257, 16, ("linear",), MIXERS)


def pure(config, **arguments):
    return PureModule(lambda rngs: config.make(rngs=rngs, **arguments))


def rows(*documents):
    """One row of documents, each after its end-of-text id."""
    tokens = np.concatenate([[EOT, *document] for document in documents])
    tokens = np.append(tokens, EOT).astype(np.uint16)
    return {"tokens": tokens[None, :-1], "targets": tokens[None, 1:]}


def random_rows(count, *lengths):
    """Rows of documents of random ids."""
    rng = np.random.default_rng(0)
    every = [rows(*(rng.integers(0, 256, n) for n in lengths)) for _ in range(count)]
    return {name: np.concatenate([row[name] for row in every]) for name in every[0]}


@pytest.mark.parametrize(("config", "eot", "independent"), [(EVERY, EOT, True), (SMALL, -1, False)])
def test_documents_do_not_see_their_neighbours(config, eot, independent):
    """For every mixer: what a document adds to the loss of a row is the same in any row."""
    model = pure(config)
    params = jax.tree.map(lambda x: 4 * x, model.init(jax.random.key(0)))
    evaluate = jax.jit(next_token(model.module, eot).evaluate)
    one = np.ones(1, np.float32)
    a, b, c, d = np.random.default_rng(0).integers(0, 256, (4, 9))
    ac, ad, bc, bd = (
        float(evaluate(params, rows(*pair) | {"weight": one}, None)["loss"][0])
        for pair in ((a, c), (a, d), (b, c), (b, d))
    )
    assert abs(ac - bc) > 0.01 and abs(ac - ad) > 0.01
    interaction = abs((ac - bc) - (ad - bd))
    assert interaction < 1e-4 if independent else interaction > 1e-2


def test_loss_and_gradient_in_parts(monkeypatch):
    """Those of the mean cross entropy of all logits at once."""
    model = pure(ONE)
    params = model.init(jax.random.key(0))
    batch = random_rows(4, 4, 6)

    @jax.jit
    @jax.value_and_grad
    def plain(params):
        tokens = batch["tokens"].astype(jnp.int32)
        segments = jnp.cumsum(tokens == EOT, axis=1)
        logits, _ = model.module(params)(tokens, segment_ids=segments)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.mean(losses)

    expected = plain(params)
    for accumulate, head_tokens in ((1, 1), (1, 4096), (2, 8)):
        monkeypatch.setattr("experiments.lm_objective._HEAD_TOKENS", head_tokens)
        loss = next_token(model.module, EOT, accumulate).loss
        found = jax.jit(jax.value_and_grad(lambda p, f=loss: f(p, batch, None)[0]))(params)
        assert_close(found, expected)


def test_weights_of_rows_in_an_evaluation():
    model = pure(ONE)
    evaluate = jax.jit(next_token(model.module, EOT).evaluate)
    params, batch = model.init(jax.random.key(0)), random_rows(3, 9)

    def loss(*weight):
        return evaluate(params, batch | {"weight": np.array(weight, np.float32)}, None)["loss"]

    (both, count), first, second = loss(1, 1, 0), loss(1, 0, 0), loss(0, 1, 0)
    assert count == 2 * batch["tokens"].shape[1]
    assert float(both) == pytest.approx(float(first[0] + second[0]), rel=1e-6)
    assert float(first[0]) != float(second[0])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of text that is easy to learn."""
    folder = tmp_path_factory.mktemp("text")
    lines = (json.dumps({"text": f"{i % 7} is a number. " * (1 + i % 3)}) for i in range(200))
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def command(text, tmp_path, monkeypatch, capsys):
    """`command(*arguments)` runs a small model in this process and gives its summary."""
    monkeypatch.setitem(CONFIGS, "based-tiny", ONE)
    monkeypatch.setattr(lm, "write_samples", lambda *unused: "")

    def run(*arguments):
        lm.main(["lm", f"--data={text}", "--tokenizer=bytes", "--validation_share=0.2",
                 f"--cache_dir={text.parent / 'cache'}", f"--run_dir={tmp_path / 'run'}",
                 "--batch_size=4", "--length=32", "--log_every=1", *arguments])  # fmt: skip
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


write_samples = lm.write_samples


def curves(run_dir):
    return {p.name: p.read_bytes() for p in run_dir.glob("*.csv") if "timing" not in p.name}


def test_command_learns_and_leaves_what_it_promises(command, tmp_path, monkeypatch):
    monkeypatch.setattr(lm, "write_samples", write_samples)
    summary = command("--steps=60", "--eval_every=30", "--learning_rate=0.01", "--accumulate=2")
    assert summary["validation_loss"] < 3.5 < np.log(257)
    assert summary["validation_perplexity"] == pytest.approx(np.exp(summary["validation_loss"]))
    run_dir = tmp_path / "run"
    assert summary["run_dir"] == str(run_dir) and summary["mfu"] is None
    assert summary["tokens_per_second"] > 0
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (run_dir / "samples").iterdir()) == ["30.txt", "60.txt"]
    assert "is a number" in (run_dir / "samples" / "60.txt").read_text()
    metrics = json.loads((run_dir / "result.json").read_text())["metrics"]
    assert metrics["tokens"] == 60 * 4 * 32 and metrics["best_step"] == 60
    assert metrics["timing"]["tokens_per_second"] == summary["tokens_per_second"]

    # the model is the one that was evaluated
    decoder, params, _ = load_decoder(run_dir / "model")
    config, start, text = inputs(run_dir, decoder)
    phase, _ = lm.make_phase(config, start, text)
    nested = nnx.to_pure_dict(nnx.state(build(decoder, params)))
    assert metrics["parameters"] == sum(x.size for x in jax.tree.leaves(nested))
    found = lm.validate(config, phase, nested)
    assert found["loss"] == pytest.approx(summary["validation_loss"], rel=1e-6)

    again = command("--steps=60", "--eval_every=30", "--learning_rate=0.01", "--accumulate=2")
    assert again["validation_loss"] == summary["validation_loss"]


def inputs(run_dir, decoder):
    config = Config(**json.loads((run_dir / "result.json").read_text())["config"])
    text = lm.load_text(config, lm.load_tokenizer("bytes"), progress=False)
    return config, Start(decoder, None, None), text


def test_stopped_run_continues_bit_for_bit(command, tmp_path, monkeypatch):
    arguments = ("--steps=12", "--eval_every=6", "--steps_per_dispatch=2", "--checkpoint_every=4")
    whole = command(*arguments, f"--run_dir={tmp_path / 'whole'}")

    def crash(*unused):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lm, "write_samples", crash)
        command(*arguments)
    assert len((tmp_path / "run" / "train_train.csv").read_text().splitlines()) == 7
    again = command(*arguments)
    assert curves(tmp_path / "run") == curves(tmp_path / "whole")
    assert again["validation_loss"] == whole["validation_loss"]
    a, b = (load_decoder(tmp_path / name / "model")[1] for name in ("run", "whole"))
    assert all(np.array_equal(a[name], b[name]) for name in b)


@pytest.fixture
def checkpoint(tmp_path):
    """The folder of a small BASED model with large weights."""
    model = ONE.make(rngs=nnx.Rngs(params=1))
    arrays = {name: 5 * x if x.ndim > 1 else x for name, x in arrays_of(model).items()}
    save_decoder(tmp_path / "based", ONE, arrays, {"from": "test"})
    return tmp_path / "based"


def test_llops_goes_on_where_based_is(command, checkpoint, tmp_path):
    """Equal losses before training, not after it; the steps change what BASED has not."""
    shared = (f"--checkpoint={checkpoint}", "--steps=4", "--eval_every=4")
    based = command(*shared, f"--run_dir={tmp_path / 'a'}")
    llops = command(
        *shared, f"--run_dir={tmp_path / 'b'}", "--kernel=llops",
        "--kernel_options=num_factors=4,num_features=24",
    )  # fmt: skip
    before = [run["validation_loss_before"] for run in (based, llops)]
    assert before[1] == pytest.approx(before[0], rel=1e-6)
    assert llops["validation_loss"] != based["validation_loss"]
    decoder, params, source = load_decoder(tmp_path / "b" / "model")
    assert source == {"from": "test"}
    assert decoder.mixers["linear"]["options"]["num_features"] == 24
    silent = params["blocks/0/mixer/attend/phi/W"][:, 0, 0, 0, :, 15:]
    assert silent.shape[-1] == 9 and np.all(np.max(np.abs(silent), axis=(0, 1)) > 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=based-tiney"], "based-tiney.*based-tiny"),
        (["--kernel_options=num_features=8"], "kernel_options='num_features=8' without --kernel"),
        (["--model=attn-tiny", "--kernel=elu"], "kernel='elu': attn-tiny has no linear layers"),
        (["--kernel=elu", "--kernel_options=p=2"], "options=.* do not fit kernel='elu'"),
        (["--batch_size=4", "--accumulate=3"], "accumulate=3, expected a divisor of batch_size=4"),
        (["--length=0"], "length=0, expected at least 1"),
        (["--length=100000"], "less than a row"),
        (["--tokenizer=gpt2.json"], "gpt2.json"),
        (["--checkpoint=nowhere"], "nowhere has no decoder.json"),
        (["--checkpoint=x", "--kernel=elu"], "kernel='elu' with --checkpoint, expected llops"),
    ],
)
def test_wrong_settings_exit_with_2_and_write_nothing(
    command, tmp_path, capsys, arguments, message
):
    with pytest.raises(SystemExit) as stop:
        command(*arguments)
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err, re.S)
    assert not (tmp_path / "run").exists()


def test_checkpoint_with_fewer_ids_than_the_tokenizer_is_refused(command, checkpoint, capsys):
    text = json.loads((checkpoint / "decoder.json").read_text())
    text["decoder"]["vocab_size"] = 100
    (checkpoint / "decoder.json").write_text(json.dumps(text))
    with pytest.raises(SystemExit):
        command(f"--checkpoint={checkpoint}")
    assert "bytes has 257 ids, the model 100" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_settings(recipe):
    Config(data="x", tokenizer="bytes", **RECIPES[recipe])


def test_recipe_depends_on_the_device_and_the_start():
    config = Config(data="x", tokenizer="bytes")
    continued = Config(data="x", tokenizer="bytes", checkpoint="y")
    assert [choose_recipe(c, "gpu")[0] for c in (config, continued)] == ["published", "continued"]
    assert choose_recipe(continued, "cpu")[0] == "quick"


def test_operations_of_based_360m():
    """Counted by hand: 17 convolutions, 5 linear layers, 5 windows of 129 tokens."""
    E, heads = 1024, 16
    parameters = 362_620_928
    linear = 5 * 4 * heads * 273 * 64
    window = 5 * 4 * E * 129
    assert training_flops(CONFIGS["based-360m"], 2048) == 3 * (2 * parameters + linear + window)


def test_operations_of_softmax_grow_with_the_length():
    config = CONFIGS["attn-360m"]
    longer, shorter = (training_flops(config, length) for length in (4096, 2048))
    assert longer - shorter == 3 * 24 * 2 * 1024 * 2048


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("NVIDIA H200", 989e12), ("TPU v5 lite", 197e12), ("TPU v5p", 459e12), ("cpu", None)],
)
def test_peak_rates(kind, peak):
    assert peak_flops(kind) == peak
