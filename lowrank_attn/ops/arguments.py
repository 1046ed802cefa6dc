"""What an implementation receives: checked arrays and the functions that it composes."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_attn.ops.normalize import apply_normalizer, needs_denominator
from lowrank_attn.ops.rules.base import Gates, Rule


class State(NamedTuple):
    """The state of linear attention, always float32.

    Attributes:
        S: [B, H, M, P], the rule's state per key/value head.
        z: [B, H, M], the same recurrence for values of 1, by which the sum normalisers divide; None
            for the other normalisers.
    """

    S: jax.Array
    z: jax.Array | None


class Arguments(NamedTuple):
    """The arrays of one call, checked by `ops.api`; axes as documented there.

    Attributes:
        q: [B, T, Hq, D], k: [B, S, H, D], v: [B, S, H, P].
        params: parameters of the feature map, leading with H; an empty dict without a map.
        gates: name -> [B, T, H] or [B, T, H, M], already 0 where `mask` is false.
        mask: [B, S] bool or None.
        reset: [B, T] bool or None, true where a token begins a new segment.
        q_positions: [T] or [B, T] int32, k_positions: [S] or [B, S] int32.
        state: the initial state.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    params: dict[str, jax.Array]
    gates: Gates
    mask: jax.Array | None
    reset: jax.Array | None
    q_positions: jax.Array
    k_positions: jax.Array
    state: State


class Method(NamedTuple):
    """The static part of one call.

    Attributes:
        features: `features(params, x, is_query=..., positions=...)` maps all heads of x.
        rule: the state-update rule.
        normalize: name of the normaliser.
        epsilon: its epsilon.
        chunk_size: tokens per chunk, a hint to chunked implementations.
    """

    features: Callable[..., jax.Array]
    rule: Rule
    normalize: str
    epsilon: float
    chunk_size: int

    def map(self, args: Arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Features of queries and of keys (zero where the mask is false), and the values.

        With a denominator the values carry a column of ones, whose sums it is.

        The shapes are [B, T, Hq, M], [B, S, H, M] and [B, S, H, P] or [B, S, H, P + 1].
        """
        phi_q = self.features(args.params, args.q, is_query=True, positions=args.q_positions)
        phi_k = self.features(args.params, args.k, is_query=False, positions=args.k_positions)
        if args.mask is not None:
            phi_k = jnp.where(args.mask[:, :, None, None], phi_k, 0)
        return phi_q, phi_k, self.with_ones(args.v)

    def with_ones(self, v):
        """Append the column of ones whose sums are the denominator, if there is one."""
        if not needs_denominator(self.normalize):
            return v
        return jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)

    def join(self, state):
        """The rule's state for the values of `map`: [B, H, M, P + 1] with a denominator, else S."""
        if not needs_denominator(self.normalize):
            return state.S
        return jnp.concatenate([state.S, state.z[..., None]], axis=-1)

    def split(self, S):
        """The inverse of `join`."""
        if not needs_denominator(self.normalize):
            return State(S, None)
        return State(S[..., :-1], S[..., -1])

    def finish(self, y, dtype):
        """Normalise sums over the values of `map` and cast to the dtype of the output."""
        if needs_denominator(self.normalize):
            y, denominator = y[..., :-1], y[..., -1]
        else:
            denominator = None
        return apply_normalizer(y, denominator, self.normalize, self.epsilon).astype(dtype)
