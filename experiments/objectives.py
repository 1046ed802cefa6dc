"""Losses and accuracies of classification and of self-pretraining, for any task of token ids.

A batch holds `tokens` [B, T] (two towers: [B, 2, T]), `length` [B] ([B, 2]), `label` [B], and in
evaluations `weight` [B], 0 for rows that only fill up a batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lowrank_attn.features import active_features, effective_rank
from lowrank_attn.models.encoder import Encoder, scale_levels

OBJECTIVES = ("masked", "next_token")


class Objective(NamedTuple):
    """`loss` and `evaluate` as `experiments.common.phase.Phase` wants them."""

    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
    evaluate: Callable[..., dict[str, tuple[jax.Array, jax.Array]]]


def real_tokens(batch: Any) -> jax.Array:
    """Which tokens of a batch are no padding, bool in the shape of `tokens`."""
    return jnp.arange(batch["tokens"].shape[-1]) < batch["length"][..., None]


def classification(module: Callable[[Any], nnx.Module], log_features: bool = False) -> Objective:
    """Cross entropy and accuracy of `Classifier` logits.

    Args:
        module: `module(params)` is the classifier.
        log_features: whether evaluations also give, for every block, the effective rank and the
            number of active features of the keys (means over heads and examples).
    """

    def predict(params, batch, rngs):
        logits = module(params)(batch["tokens"], real_tokens(batch), rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, (jnp.argmax(logits, axis=-1) == batch["label"]).astype(jnp.float32)

    def loss(params, batch, key):
        losses, correct = predict(params, batch, nnx.Rngs(dropout=key))
        return jnp.mean(losses), {"accuracy": jnp.mean(correct)}

    def evaluate(params, batch, key):
        losses, correct = predict(params, batch, None)
        weight = batch["weight"]
        total = jnp.sum(weight)
        metrics = {
            "loss": (jnp.sum(losses * weight), total),
            "accuracy": (jnp.sum(correct * weight), total),
        }
        if log_features:
            for name, numbers in key_statistics(module(params).encoder, batch).items():
                metrics[name] = (jnp.sum(numbers * weight), total)
        return metrics

    return Objective(loss, evaluate)


def key_statistics(encoder: Encoder, batch: Any) -> dict[str, jax.Array]:
    """`effective_rank_I` and `active_features_I` [B] of the keys of block I, means over heads.

    Only real tokens count.
    """
    T = batch["tokens"].shape[-1]
    real = real_tokens(batch).reshape(-1, T)
    features = encoder.key_features(batch["tokens"].reshape(-1, T), real)
    numbers = {}
    for i, phi in enumerate(features):
        phi = jnp.moveaxis(phi[:, -T:], 1, 2) * real[:, None, :, None]  # [B, H, T, M]
        numbers[f"effective_rank_{i}"] = jnp.mean(effective_rank(phi), axis=1)
        numbers[f"active_features_{i}"] = jnp.mean(active_features(phi, real[:, None]), axis=1)
    return {
        name: jnp.mean(x.reshape(batch["label"].shape[0], -1), axis=1)
        for name, x in numbers.items()
    }


def token_prediction(
    module: Callable[[Any], nnx.Module],
    objective: str,
    mask_ratio: float,
    mask_id: int,
    loss: str = "cross_entropy",
) -> Objective:
    """Self-pretraining on the inputs alone.

    `masked`: every real token is replaced by `mask_id` with probability `mask_ratio`, drawn anew
    for every batch, and predicted where it was replaced. `next_token`: every real token but the
    first is predicted from the ones before. A batch without a token to predict has loss 0.
    The two documents of a pair are two examples.

    Args:
        module: `module(params)` is the `TokenPredictor`; causal for `next_token`.
        objective: one of `OBJECTIVES`.
        mask_ratio: in (0, 1), only for `masked`.
        mask_id: the id of the mask token; the ids below are those to predict.
        loss: `cross_entropy` over all ids, with the metric `accuracy`; or, for ids that are grey
            levels, `l1`: the predictor gives one number, compared with the level scaled to -1..1,
            with the metric `squared_error`.

    Raises:
        ValueError: if a name is unknown, or the ratio would mask nothing or everything.

    Source: "Never Train from Scratch" (Amos et al. 2024), section 3.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is unknown; known: {', '.join(OBJECTIVES)}.")
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is unknown; known: {', '.join(LOSSES)}.")
    if objective == "masked" and not 0 < mask_ratio < 1:
        raise ValueError(
            f"mask_ratio={mask_ratio} with objective='masked', expected a number between 0 and 1: "
            "otherwise there is nothing to learn. Published for ListOps: 0.1."
        )
    metric, compare = LOSSES[loss]

    def predict(params, batch, key, rngs):
        T = batch["tokens"].shape[-1]
        # the id of the mask may be too large for bytes
        tokens = batch["tokens"].reshape(-1, T).astype(jnp.int32)
        real = real_tokens(batch).reshape(-1, T)
        if objective == "masked":
            wanted = real & jax.random.bernoulli(key, mask_ratio, real.shape)
            outputs = module(params)(jnp.where(wanted, mask_id, tokens), real, rngs=rngs)
            targets = tokens
        else:
            outputs = module(params)(tokens, real, rngs=rngs)[:, :-1]
            wanted, targets = real[:, 1:], tokens[:, 1:]
        return *compare(outputs, targets, mask_id), wanted

    def mean_loss(params, batch, key):
        mask_key, dropout_key = jax.random.split(key)
        losses, scores, wanted = predict(params, batch, mask_key, nnx.Rngs(dropout=dropout_key))
        count = jnp.maximum(jnp.sum(wanted), 1)
        return jnp.sum(losses * wanted) / count, {metric: jnp.sum(scores * wanted) / count}

    def evaluate(params, batch, key):
        losses, scores, wanted = predict(params, batch, key, None)
        towers = losses.shape[0] // batch["weight"].shape[0]
        counted = wanted * jnp.repeat(batch["weight"], towers)[:, None]
        total = jnp.sum(counted)
        return {
            "loss": (jnp.sum(losses * counted), total),
            metric: (jnp.sum(scores * counted), total),
        }

    return Objective(mean_loss, evaluate)


def _cross_entropy(logits, targets, count):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses, jnp.argmax(logits, axis=-1) == targets


def _l1(outputs, targets, count):
    differences = outputs[..., 0] - scale_levels(targets, count)
    return jnp.abs(differences), differences**2


# name -> (metric, losses and scores [B, T] of outputs [B, T, ...] for targets [B, T])
LOSSES = {"cross_entropy": ("accuracy", _cross_entropy), "l1": ("squared_error", _l1)}
