"""How far a sketch is from its kernel, and whether its scores can be divided by their sum."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def rmae(approximation: jax.Array, exact: jax.Array) -> jax.Array:
    """The relative mean absolute error mean |A_hat - A| / mean |A| over the last two axes.

    Args:
        approximation, exact: scores [..., T, S], computed in float32 at least.

    Returns:
        [...].

    Source: LLoPS, table 3, whose formula is not printed in the text that we have; this is the usual
    one.
    """
    kind = jnp.promote_types(jnp.result_type(approximation, exact), jnp.float32)
    approximation, exact = approximation.astype(kind), exact.astype(kind)
    axes = (-2, -1)
    return jnp.mean(jnp.abs(approximation - exact), axes) / jnp.mean(jnp.abs(exact), axes)


class ScoreReport(NamedTuple):
    """What `score_report` returns, each [...].

    Attributes:
        negative_share: the share of visible pairs with a negative score.
        smallest_denominator: the smallest |sum of scores| of a query.
        relative_smallest: the same, divided by the median over queries: far below 1 means that some
            outputs of the `sum` normaliser blow up.
    """

    negative_share: jax.Array
    smallest_denominator: jax.Array
    relative_smallest: jax.Array


def score_report(phi_q: jax.Array, phi_k: jax.Array, *, causal: bool) -> ScoreReport:
    """Whether a map's scores on given data can be normalised by their sum.

    Args:
        phi_q: features [..., T, M] of queries, phi_k: [..., S, M] of keys; T = S if causal.
        causal: whether query t sees keys 1..t only; otherwise it sees all.

    Raises:
        ValueError: if causal and T differs from S.
    """
    T, S = phi_q.shape[-2], phi_k.shape[-2]
    if causal and T != S:
        raise ValueError(f"causal=True with {T} queries and {S} keys, expected as many of each.")
    phi_q, phi_k = phi_q.astype(jnp.float32), phi_k.astype(jnp.float32)
    scores = jnp.einsum("...tm,...sm->...ts", phi_q, phi_k, precision="highest")
    visible = jnp.tri(T, dtype=bool) if causal else jnp.ones((T, S), bool)
    negative = jnp.sum((scores < 0) & visible, axis=(-2, -1)) / jnp.sum(visible)
    denominators = jnp.abs(jnp.sum(jnp.where(visible, scores, 0), axis=-1))
    smallest = jnp.min(denominators, axis=-1)
    return ScoreReport(negative, smallest, smallest / jnp.median(denominators, axis=-1))
