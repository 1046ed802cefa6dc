"""The contract of a state-update rule, and the masks that every rule's chunk needs."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

Gates = Mapping[str, jax.Array]


class Step(Protocol):
    """The signature of `Rule.step`."""

    def __call__(
        self, S: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, gates: Gates
    ) -> tuple[jax.Array, jax.Array]:
        """Advance one head by one token; see `Rule`."""


class Chunk(Protocol):
    """The signature of `Rule.chunk`."""

    def __call__(
        self,
        S: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        gates: Gates,
        run: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Advance one head by C tokens; see `Rule`."""


class Parts(NamedTuple):
    """A chunk of a rule that scales whole states: what is left when the state that enters is 0.

        y_t = y_t(0) + start_t q_t^T S, S <- keep S + S(0)

    Attributes:
        y: [C, P] float32, the outputs without the state.
        S: [M, P] float32, what the chunk adds to the state.
        start: [C, 1] or 1.0, how much of the state a token sees.
        keep: scalar or [1], how much of the state is left.
    """

    y: jax.Array
    S: jax.Array
    start: jax.Array | float
    keep: jax.Array | float


class Rule(NamedTuple):
    """How the state S [M, P] of one head evolves, and what a query reads from it.

    Both functions work on ONE head, in plain `jnp` on two-dimensional blocks, so that the same body
    runs under `lax.scan` and inside a Pallas TPU block. They take S in float32 and return it in
    float32, and return y in float32 whatever the dtype of q, k and v.

    Attributes:
        gates: names of the per-token gates that the rule reads. A gate of 0 leaves the state as it
            is (decays are given as logarithms), so padding sets gates to 0.
        step: `step(S, q, k, v, gates)` for one token, the recurrence as published: q, k [M], v [P],
            gates name -> scalar, or [M] if per feature. Returns (y [P], S). A token sees itself.
        chunk: `chunk(S, q, k, v, gates, run)` for C tokens by matrix products: q, k [C, M],
            v [C, P], gates name -> [C] or [C, M]. Returns (y [C, P], S). `run` [C] int32 counts the
            state resets up to and including each token (0: the token continues S); None: no resets.
        parts: `parts(q, k, v, gates, see, dot)` with the `Visibility` of the chunk and the matrix
            product to use, for rules that scale the state by numbers: all chunks of a sequence can
            then be computed at once. None for other rules.
        per_feature: those of the gates that have one value per feature instead of one per head.
        sums: whether y is a sum of values, each weighted by its score times a factor in [0, 1].
            Otherwise the sum of the weights says nothing, and the sum normalisers are refused.
        unit_keys: whether the state is bounded only for keys of length at most 1. The operations
            take keys as they come; layers bring features to that length.
        most_tokens: the most tokens that `chunk` handles well at once; None: any number.
    """

    gates: tuple[str, ...]
    step: Step
    chunk: Chunk
    parts: Callable[..., Parts] | None = None
    per_feature: tuple[str, ...] = ()
    sums: bool = True
    unit_keys: bool = False
    most_tokens: int | None = None


class Visibility(NamedTuple):
    """Which pairs of tokens and states see each other inside a chunk, as float32 ones and zeros.

    Attributes:
        pairs: [C, C], 1 where query row t sees key column s.
        start: [C, 1], 1 where a token still sees the state that entered the chunk.
        end: [C, 1], 1 where a token is still in the state that leaves the chunk.
        keep: scalar, 1 if the state that entered is still in the state that leaves.
    """

    pairs: jax.Array
    start: jax.Array | float
    end: jax.Array | float
    keep: jax.Array | float


def visibility(C: int, run: jax.Array | None) -> Visibility:
    """Causal visibility in a chunk of C tokens whose state is reset where `run` [C] increases."""
    row = jax.lax.broadcasted_iota(jnp.int32, (C, C), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    causal = row >= column
    if run is None:
        return Visibility(causal.astype(jnp.float32), 1.0, 1.0, 1.0)
    same = run[:, None] == run[None, :]
    last = run[C - 1]
    return Visibility(
        (causal & same).astype(jnp.float32),
        (run == 0).astype(jnp.float32)[:, None],
        (run == last).astype(jnp.float32)[:, None],
        (last == 0).astype(jnp.float32),
    )


def chunk_of_parts(parts: Callable[..., Parts]) -> Chunk:
    """The `chunk` of a rule that has `parts`."""

    def chunk(S, q, k, v, gates, run):
        alone = parts(q, k, v, gates, visibility(q.shape[0], run), dot)
        y = alone.y + alone.start * dot(q, S, (1, 0))
        return y, alone.keep * S + alone.S

    return chunk


def running_sum(x: jax.Array) -> jax.Array:
    """Sums of x [C] over the elements up to and including each, as a column [C, 1].

    `jnp.cumsum` cannot run inside a Pallas TPU block.
    """
    C = x.shape[0]
    row = jax.lax.broadcasted_iota(jnp.int32, (C, C), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    return jnp.sum(jnp.where(row >= column, x[None, :], 0), axis=1, keepdims=True)


def as_column(x: jax.Array) -> jax.Array:
    """Turn x [C] into a column [C, 1].

    The gradient of `x[:, None]` turns a column into a row, which TPU v4 cannot do inside a block;
    that of this form sums over rows.
    """
    C = x.shape[0]
    row = jax.lax.broadcasted_iota(jnp.int32, (C, C), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    return jnp.sum(jnp.where(row == column, x[None, :], 0), axis=1, keepdims=True)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product a . b over one axis of each, accumulated and returned in float32.

    Two operands of the same low precision are multiplied as they are. Beside a float32 operand (the
    state) a bfloat16 one is widened, and the platform's default precision applies: TF32 on GPUs,
    one bfloat16 pass on TPUs, both at least as fine as bfloat16. Two float32 operands are
    multiplied at full float32 precision everywhere.
    """
    full = a.dtype == b.dtype == jnp.float32
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if full else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
