"""A toy of two phases for the tests of the training loop.

The file is also its program: `python tests/toy_run.py --run_dir=...`.
"""

import dataclasses
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from experiments.common import flags, optimizer, processes, train

ROOT = pathlib.Path(__file__).parents[1]
# What depends on the settings alone, and so must not change by an interruption.
CURVES = ("pretrain_train.csv", "pretrain_eval.csv", "finetune_train.csv", "finetune_eval.csv")


@dataclasses.dataclass(frozen=True)
class ToyConfig(train.LoopSettings):
    """A toy experiment."""

    pretrain_steps: int = flags.setting(24, "steps of the first phase")
    finetune_steps: int = flags.setting(40, "steps of the second phase")
    eval_every: int = flags.setting(8, "steps between evaluations")
    log_every: int = flags.setting(1, "steps between rows", changes_result=False)
    steps_per_dispatch: int = flags.setting(4, "steps per dispatch")
    learning_rate: float = flags.setting(1e-2, "peak learning rate")
    width: int = flags.setting(8, "size of the embedding", group="model")
    pool: str = flags.setting("mean", "pooling", group="model", choices=("mean", "max"))
    run_dir: str = flags.setting("", "folder of the run", changes_result=False)
    batch_size: int = flags.setting(6, "rows per step")
    delay: float = flags.setting(0.0, "seconds per example", changes_result=False)
    save_delay: float = flags.setting(0.0, "seconds of a save", changes_result=False)


class ToySource:
    """Rows of 12 tokens below 10; the label is whether there are many large ones."""

    def __init__(self, size, seed, delay=0.0):
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, 10, (size, 12)).astype(np.uint8)
        self.labels = (self.tokens.mean(1) > 4.5).astype(np.int32)
        self.delay = delay

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        time.sleep(self.delay)
        return {"tokens": self.tokens[index], "label": self.labels[index]}


def features(params, tokens, key):
    x = params["embedding"][tokens.astype(jnp.int32)].mean(1)
    return x * jax.random.bernoulli(key, 0.9, x.shape)


def squared_errors(params, batch, key):
    target = batch["tokens"].astype(jnp.float32).mean(1) / 10
    return (features(params, batch["tokens"], key) @ params["out"][:, 0] - target) ** 2


def pretrain_loss(params, batch, key):
    return jnp.mean(squared_errors(params, batch, key)), {}


def pretrain_eval(params, batch, key):
    errors = batch["weight"] * squared_errors(params, batch, key)
    return {"loss": (jnp.sum(errors), jnp.sum(batch["weight"]))}


def finetune_loss(params, batch, key):
    logits = features(params, batch["tokens"], key) @ params["out"] + params["bias"]
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1).mean()
    return loss, {"accuracy": jnp.mean(logits.argmax(1) == batch["label"])}


def finetune_eval(params, batch, key):
    logits = params["embedding"][batch["tokens"].astype(jnp.int32)].mean(1) @ params["out"]
    right = (logits + params["bias"]).argmax(1) == batch["label"]
    return {"accuracy": (jnp.sum(batch["weight"] * right), jnp.sum(batch["weight"]))}


def toy_phases(config):
    def init(key, previous):
        first_key, out_key = jax.random.split(key)
        first = jax.random.normal(first_key, (10, config.width))
        return {
            "embedding": first if previous is None else previous["embedding"],
            "out": 0.1 * jax.random.normal(out_key, (config.width, 2)),
            "bias": jnp.zeros(2),
        }

    def phase(name, steps, loss_fn, eval_fn, metric, mode):
        rate = optimizer.learning_rate_schedule("cosine", config.learning_rate, 4, steps)
        return train.Phase(
            name=name,
            steps=steps,
            batch_size=config.batch_size,
            source=ToySource(50, 0, config.delay),
            init=init,
            loss_fn=loss_fn,
            optimizer=optimizer.adamw(rate, weight_decay=0.1),
            eval_source=ToySource(20, 1, config.delay),
            eval_fn=eval_fn,
            best_metric=metric,
            best_mode=mode,
        )

    return [
        phase("pretrain", config.pretrain_steps, pretrain_loss, pretrain_eval, "loss", "min"),
        phase("finetune", config.finetune_steps, finetune_loss, finetune_eval, "accuracy", "max"),
    ]


def run_toy(config, run_dir, phases=None, vocabulary=("a", "b")):
    settings = flags.to_dict(config, changes_result=True)
    phases = toy_phases(config) if phases is None else phases
    return train.train(phases, config, run_dir, settings, list(vocabulary))


def counter(loss_fn=lambda params, batch, key: (params["w"], {}), inits=None):
    """A phase whose only parameter is minus the number of steps."""

    def init(key, previous):
        if inits is not None:
            inits.append(previous)
        return {"w": jnp.zeros(())}

    def eval_fn(params, batch, key):
        count = jnp.sum(batch["weight"])
        return {"distance": (count * jnp.abs(params["w"] + 16.0), count)}

    return train.Phase(
        name="one",
        steps=40,
        batch_size=2,
        source=ToySource(7, 0),
        init=init,
        loss_fn=loss_fn,
        optimizer=optax.sgd(1.0),
        eval_source=ToySource(5, 0),
        eval_fn=eval_fn,
        best_metric="distance",
        best_mode="min",
    )


def saved_steps(run_dir, phase):
    return {path.name for path in (run_dir / "checkpoints" / phase).iterdir()}


def pretrain_only(config, **changes):
    return [dataclasses.replace(toy_phases(config)[0], **changes)]


@dataclasses.dataclass
class Late:
    """What Orbax waits for before a checkpoint is complete."""

    seconds: float

    def result(self, timeout=None):
        time.sleep(self.seconds)


def slow_down_saves(seconds):
    write = ocp.JsonCheckpointHandler.async_save

    async def write_slowly(self, *args, **kwargs):
        return [*(await write(self, *args, **kwargs) or ()), Late(seconds)]

    ocp.JsonCheckpointHandler.async_save = write_slowly


def main(argv):
    config = flags.parse(ToyConfig, argv)
    if config.save_delay:
        slow_down_saves(config.save_delay)
    processes.start(config)
    done = run_toy(config, config.run_dir)
    print(done.best_step, done.best, done.last)


if __name__ == "__main__":
    main(sys.argv)
