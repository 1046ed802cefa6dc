"""How the next token is chosen."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Which tokens may come next, and how likely they are.

    The limits apply one after another: of the probabilities at this temperature the `top_k` largest
    are kept, and of these, renormalised, the fewest that sum up to `top_p` or more.

    Attributes:
        temperature: logits are divided by it; 0: always the likeliest token, the first of equals.
        top_k: None: no limit.
        top_p: in (0, 1]; 1: no limit. The likeliest token is always kept.

    Raises:
        ValueError: if a number is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        """Check the ranges."""
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}, expected 0 or more.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}, expected at least 1, or None.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}, expected a number in (0, 1].")


def log_probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The distribution to draw from, for a temperature above 0.

    Args:
        logits: [B, V].
        sampling: what is allowed.

    Returns:
        [B, V] float32, log probabilities up to a constant, -inf where a token is not allowed.
    """
    logits = logits.astype(jnp.float32) / sampling.temperature
    if sampling.top_k is None and sampling.top_p == 1:
        return logits
    V = logits.shape[-1]
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)
    allowed = jnp.arange(V) < (sampling.top_k or V)
    probabilities = jax.nn.softmax(jnp.where(allowed, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    allowed = allowed & ((before < sampling.top_p) | (sampling.top_p == 1))
    allowed = allowed.at[:, 0].set(True)
    rank = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(allowed, rank, axis=-1), logits, -jnp.inf)


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Choose a token for every row: logits [B, V] -> [B] int32."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, log_probabilities(logits, sampling)).astype(jnp.int32)
