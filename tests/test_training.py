"""The training loop on a toy: a two-phase run that is interrupted, damaged and continued."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import flags, optimizer, train


@dataclasses.dataclass(frozen=True)
class ToyConfig(train.LoopSettings):
    """A toy experiment."""

    pretrain_steps: int = flags.setting(24, "steps of the first phase")
    finetune_steps: int = flags.setting(40, "steps of the second phase")
    eval_every: int = flags.setting(8, "steps between evaluations")
    log_every: int = flags.setting(1, "steps between rows", changes_result=False)
    steps_per_dispatch: int = flags.setting(4, "steps per dispatch")
    learning_rate: float = flags.setting(1e-2, "peak learning rate")
    width: int = flags.setting(8, "size of the embedding")
    optimizer: str = flags.setting("adamw", "the optimiser", choices=("adamw", "sgd"))
    run_dir: str = flags.setting("", "folder of the run", changes_result=False)
    slow_steps: float = flags.setting(0.0, "seconds to wait per example", changes_result=False)


class ToySource:
    """Rows of 12 tokens below 10; the label is whether there are many large ones."""

    def __init__(self, size: int, seed: int):
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, 10, (size, 12)).astype(np.uint8)
        self.labels = (self.tokens.mean(1) > 4.5).astype(np.int32)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"tokens": self.tokens[index], "label": self.labels[index]}


def features(params, tokens, key):
    x = params["embedding"][tokens.astype(jnp.int32)].mean(1)
    return x * jax.random.bernoulli(key, 0.9, x.shape)


def pretrain_loss(params, batch, key):
    target = batch["tokens"].astype(jnp.float32).mean(1) / 10
    error = features(params, batch["tokens"], key) @ params["out"][:, 0] - target
    return jnp.mean(error**2), {}


def pretrain_eval(params, batch, key):
    target = batch["tokens"].astype(jnp.float32).mean(1) / 10
    error = features(params, batch["tokens"], key) @ params["out"][:, 0] - target
    return {"loss": (jnp.sum(batch["weight"] * error**2), jnp.sum(batch["weight"]))}


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
        embedding = (
            jax.random.normal(key, (10, config.width))
            if previous is None
            else previous["embedding"]
        )
        return {
            "embedding": embedding,
            "out": 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (config.width, 2)),
            "bias": jnp.zeros(2),
        }

    def phase(name, steps, loss_fn, eval_fn, metric, mode):
        rate = optimizer.learning_rate_schedule("cosine", config.learning_rate, 4, steps)
        return train.Phase(
            name=name,
            steps=steps,
            batch_size=6,
            source=ToySource(50, 0),
            init=init,
            loss_fn=loss_fn,
            optimizer=optimizer.adamw(rate, weight_decay=0.1),
            eval_source=ToySource(20, 1),
            eval_fn=eval_fn,
            best_metric=metric,
            best_mode=mode,
        )

    return [
        phase("pretrain", config.pretrain_steps, pretrain_loss, pretrain_eval, "loss", "min"),
        phase("finetune", config.finetune_steps, finetune_loss, finetune_eval, "accuracy", "max"),
    ]


def main(argv):
    config = flags.parse(ToyConfig, argv)
    done = train.train(
        toy_phases(config),
        config,
        config.run_dir,
        flags.to_dict(config, changes_result=True),
        ["a", "b"],
    )
    print(done.best_step, done.best, done.last)


if __name__ == "__main__":
    main(sys.argv)
