"""Fitting a feature map to a kernel on given queries and keys, by gradient."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lowrank_attn.features import FeatureMap
from lowrank_attn.features.base import Params


class Fit(NamedTuple):
    """What `fit` returns.

    Attributes:
        params: `trainable | constant` of H heads, for `FeatureMap`.
        loss: [steps], the mean over heads of |A_hat - A|_F^2 / |A|_F^2 on each step's rows.
    """

    params: Params
    loss: jax.Array


def fit(
    feature_map: FeatureMap,
    q: jax.Array,
    k: jax.Array,
    kernel: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    steps: int,
    key: jax.Array,
    learning_rate: float = 1e-2,
    rows: int = 256,
    params: Params | None = None,
) -> Fit:
    """Minimise |phi(q) phi(k)^T - kernel(q, k)|_F^2 / |kernel(q, k)|_F^2 over the map's parameters.

    Adam, with a cosine decay of the rate to 0. Every step draws its queries and keys from the data.

    Args:
        feature_map: the map phi.
        q: [H, N, D] queries sampled from each head, k: [H, S, D] keys, floating.
        kernel: scores of one head, [n, D] and [s, D] to [n, s]; such as
            `lambda q, k: (q @ k.T) ** 2`.
        steps: updates, at least 1.
        key: for the initial parameters and the drawing.
        learning_rate: of the first step.
        rows: queries and keys per step, drawn with replacement.
        params: where to start, such as `llops_from_data`; None: the map's own initialisation.

    Raises:
        ValueError: if shapes do not fit or steps is below 1.

    Source: LLoPS, table 3, where sketches are fitted to the queries and keys of a trained model.
    """
    if q.ndim != 3 or k.ndim != 3 or q.shape[::2] != k.shape[::2]:
        raise ValueError(
            f"q and k have shapes {q.shape} and {k.shape}, expected [H, N, D] and [H, S, D]."
        )
    if steps < 1:
        raise ValueError(f"steps={steps}, expected at least 1.")
    H, _, D = q.shape
    key, for_init = jax.random.split(key)
    trainable, constant = feature_map.init(for_init, D, H)
    if params is not None:
        trainable, constant = ({n: params[n] for n in group} for group in (trainable, constant))
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    def one_head(params, q, k):
        phi_q = feature_map.apply(params, q, is_query=True)
        phi_k = feature_map.apply(params, k, is_query=False)
        exact = kernel(q, k)
        difference = jnp.einsum("tm,sm->ts", phi_q, phi_k, precision="highest") - exact
        return jnp.sum(jnp.square(difference)) / jnp.sum(jnp.square(exact))

    def loss(trainable, q, k):
        return jnp.mean(jax.vmap(one_head)(trainable | constant, q, k))

    def step(carry, key):
        trainable, state = carry
        drawn = [
            jnp.take(x, jax.random.randint(each, (rows,), 0, x.shape[1]), axis=1)
            for x, each in zip((q, k), jax.random.split(key), strict=True)
        ]
        value, gradient = jax.value_and_grad(loss)(trainable, *drawn)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(trainable, updates), state), value

    @jax.jit
    def run(trainable, keys):
        (trainable, _), losses = jax.lax.scan(step, (trainable, optimizer.init(trainable)), keys)
        return trainable, losses

    trainable, losses = run(dict(trainable), jax.random.split(key, steps))
    return Fit(trainable | dict(constant), losses)
