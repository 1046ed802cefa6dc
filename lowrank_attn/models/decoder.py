"""Causal language model with one token mixer per layer."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_attn.layers.recent import real_and_segment
from lowrank_attn.layers.visibility import precision_for, segment_numbers
from lowrank_attn.models.mixers import MIXERS
from lowrank_attn.parallel.mesh import cut_table, cut_tokens

# What the backward pass keeps of a block, by name; None: everything.
REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class DecoderState(NamedTuple):
    """What a decoder goes on from.

    Attributes:
        length: [B] int32, tokens of the document so far: the position of the next one.
        mixers: the state of each layer's mixer.
    """

    length: jax.Array
    mixers: tuple[Any, ...]


class GatedMLP(nnx.Module):
    """y = (silu(x W_g) (x W_v)) W_out.

    Parameters: `up` [E, 2, F], first W_v, then W_g; `out` [F, E].
    """

    def __init__(self, width, mlp_width, **shared):
        self.up = nnx.LinearGeneral(width, (2, mlp_width), use_bias=False, **shared)
        self.out = nnx.Linear(mlp_width, width, use_bias=False, **shared)

    def __call__(self, x):
        value, gate = jnp.moveaxis(self.up(x), -2, 0)
        return self.out(jax.nn.silu(gate) * value)


class Block(nnx.Module):
    """x + mixer(RMSNorm(x)), then x + MLP(RMSNorm(x)), the sums in float32."""

    def __init__(self, mixer, width, mlp_width, norm_epsilon, **shared):
        norm = functools.partial(nnx.RMSNorm, width, epsilon=norm_epsilon, **shared)
        self.mixer_norm = norm()
        self.mixer = mixer
        self.mlp_norm = norm() if mlp_width else None
        self.mlp = GatedMLP(width, mlp_width, **shared) if mlp_width else None

    def __call__(self, x, mask, segment_ids, positions, state):
        y, next_state = self.mixer(
            self.mixer_norm(x),
            mask=mask,
            segment_ids=segment_ids,
            positions=positions,
            initial_state=state,
        )
        x = x + y.astype(x.dtype)
        if self.mlp is not None:
            x = x + self.mlp(self.mlp_norm(x)).astype(x.dtype)
        return cut_tokens(x), None if state is None else next_state


class Decoder(nnx.Module):
    """Pre-RMSNorm causal language model: embedding, blocks, final RMSNorm, a table as head.

    Positions enter only where a mixer uses them. The residual is float32. Matrices begin as
    N(0, 0.02^2), those of the `out` projections divided by sqrt(2 L) for L layers; what else a
    mixer has begins as its docstring says.

    Args:
        vocab_size: number of token ids.
        width: E.
        layers: the mixer of each layer, names in `MIXERS`.
        mixers: keyword arguments of these mixers, by name.
        mlp_width: hidden size of the MLP; 0: blocks have none.
        vocab_multiple: the table is padded to a multiple of so many rows, which are logits too.
        norm_epsilon: epsilon of all RMSNorms.
        tied: whether the embedding is the head's table too; otherwise it is `head` [V, E].
        remat: name in `REMAT`.
        dtype: dtype of the computation inside blocks and of the head's operands; None: that of the
            parameters.
        param_dtype: dtype of trained parameters.
        rngs: key stream `params`.

    Raises:
        ValueError: for unknown names, and for options that a mixer does not take.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        layers: Sequence[str],
        mixers: Mapping[str, Mapping[str, Any]],
        *,
        mlp_width: int = 0,
        vocab_multiple: int = 1,
        norm_epsilon: float = 1e-5,
        tied: bool = True,
        remat: str = "none",
        dtype=None,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        if remat not in REMAT:
            raise ValueError(f"remat={remat!r} is unknown; known: {', '.join(REMAT)}.")
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.vocab_size = vocab_size
        self.remat = remat
        rows = -(-vocab_size // vocab_multiple) * vocab_multiple
        table = functools.partial(nnx.Embed, rows, width, param_dtype=param_dtype, rngs=rngs)
        self.embedding = table()
        self.head = None if tied else table()
        self.blocks = nnx.List(
            [
                Block(
                    _make_mixer(name, width, mixers.get(name, {}), shared),
                    width,
                    mlp_width,
                    norm_epsilon,
                    **shared,
                )
                for name in layers
            ]
        )
        self.norm = nnx.RMSNorm(width, epsilon=norm_epsilon, **shared)
        self._initialise(rngs)

    def __call__(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        state: DecoderState | None = None,
    ) -> tuple[jax.Array, DecoderState | None]:
        """Logits of the next token after each token.

        Args:
            tokens: [B, T] int.
            mask: [B, T] bool, false at padding, which is at the ends of a row; outputs there are
                meaningless, states and positions pass over it. None: all tokens are real.
            segment_ids: [B, T] int, packed documents: nothing reaches from one to another, and
                positions begin anew. The first one continues `state`.
            positions: [B, T] int; None: counted per document over the real tokens.
            state: `empty_state`, or what an earlier call returned; None: no state is returned.

        Returns:
            Logits [B, T, V], float32, V = vocab_size rounded up to vocab_multiple, and the state.
        """
        x, state = self.hidden(
            tokens, mask, segment_ids=segment_ids, positions=positions, state=state
        )
        return self.logits(x), state

    def hidden(self, tokens, mask=None, *, segment_ids=None, positions=None, state=None):
        """What `logits` reads, [B, T, E], and the state; the arguments are those of a call."""
        mixer_states = (None,) * len(self.blocks) if state is None else state.mixers
        if positions is None:
            start = 0 if state is None else state.length[:, None]
            positions = count_positions(tokens, mask, segment_ids, start)
        x = cut_tokens(self.embed(tokens).astype(jnp.float32))
        run = Block.__call__
        if REMAT[self.remat] is not None:
            run = nnx.remat(run, policy=REMAT[self.remat])
        after = []
        for block, mixer_state in zip(self.blocks, mixer_states):
            x, mixer_state = run(block, x, mask, segment_ids, positions, mixer_state)
            after.append(mixer_state)
        if state is not None:
            count = _next_position(tokens, mask, segment_ids, positions, state.length)
            state = DecoderState(count, tuple(after))
        return self.norm(x), state

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Rows of the embedding: [B, T] -> [B, T, E]."""
        return jnp.take(cut_table(self.embedding.embedding[...]), tokens, axis=0)

    def logits(self, x: jax.Array) -> jax.Array:
        """Products with the head's table: [..., E] -> [..., V], float32."""
        return table_logits(x, self.head_table())

    def head_table(self) -> jax.Array:
        """What hidden values are multiplied with for logits, [V, E]."""
        return (self.embedding if self.head is None else self.head).embedding[...]

    def empty_state(self, batch: int, max_length: int = 0) -> DecoderState:
        """The state before the first token.

        Args:
            batch: B.
            max_length: most tokens of a document, for the cache of `softmax` layers, the only ones
                whose state grows with it.

        Raises:
            ValueError: if a layer keeps no state, or max_length is needed and is not given.
        """
        dtype = self.norm.dtype or self.embedding.embedding.dtype
        states = [block.mixer.empty_state(batch, max_length, dtype) for block in self.blocks]
        return DecoderState(jnp.zeros((batch,), jnp.int32), tuple(states))

    def _initialise(self, rngs):
        """Draw all matrices anew, with the published standard deviations."""
        state = nnx.state(self, nnx.Param)
        for path, variable in nnx.to_flat_state(state):
            if path[-1] in ("kernel", "embedding"):
                scale = 0.02 / (2 * len(self.blocks)) ** 0.5 if path[-2] == "out" else 0.02
                draw = jax.random.normal(rngs.params(), variable.shape, variable.dtype)
                variable.set_value(scale * draw)
        nnx.update(self, state)


def table_logits(x: jax.Array, table: jax.Array) -> jax.Array:
    """Products of x [..., E] with the rows of a table [V, E], in x's dtype: [..., V] float32."""
    return jnp.dot(
        x,
        table.astype(x.dtype).T,
        precision=precision_for(x),
        preferred_element_type=jnp.float32,
    )


def count_positions(
    tokens: jax.Array,
    mask: jax.Array | None,
    segment_ids: jax.Array | None,
    start: jax.Array | int = 0,
) -> jax.Array:
    """The position of each token in its document, over real tokens: [B, T] int32.

    Args:
        tokens: [B, T], mask, segment_ids: as for `Decoder`.
        start: [B, 1], the position of the first token of a row.
    """
    real, segment = _documents(tokens, mask, segment_ids)
    before = jnp.cumsum(real, axis=1) - real  # real tokens of the row before each one
    begins = jnp.pad(segment[:, 1:] != segment[:, :-1], ((0, 0), (1, 0)))
    first = jax.lax.cummax(jnp.where(begins, before, 0), axis=1)
    return before - first + jnp.where(segment == 0, start, 0)


def _next_position(tokens, mask, segment_ids, positions, count):
    """The position [B] after the last real token of each row, `count` in rows without one."""
    real, segment = _documents(tokens, mask, segment_ids)
    last = jnp.max(jnp.where(real, segment, 0), axis=1, keepdims=True)
    after = jnp.max(jnp.where(real & (segment == last), positions + 1, 0), axis=1)
    return jnp.where(jnp.any(real, axis=1), after, count).astype(jnp.int32)


def _documents(tokens, mask, segment_ids):
    segment = None if segment_ids is None else segment_numbers(segment_ids)
    return real_and_segment(tokens, mask, segment)


def _make_mixer(name, width, options, shared):
    if name not in MIXERS:
        raise ValueError(f"layers has {name!r}, which is unknown; known: {', '.join(MIXERS)}.")
    try:
        return MIXERS[name](width, **options, **shared)
    except TypeError as error:
        raise ValueError(f"mixers[{name!r}]={dict(options)} do not fit: {error}.") from error
