"""Transformer encoder over token ids, with heads for classification and token prediction."""

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_attn.layers import Gating
from lowrank_attn.layers.nnx import LinearAttention
from lowrank_attn.models.heads import Head

POSITIONS = ("learned", "sinusoidal", "rotary", "none")
POOLINGS = ("mean", "max", "last", "cls")
EMBEDDINGS = ("table", "levels")
# Up to so many token ids, embedding and its gradient are matrix products.
LARGEST_ONE_HOT = 512


class Block(nnx.Module):
    """x + attention(LayerNorm(x)), then x + MLP(LayerNorm(x)) with a GELU."""

    def __init__(self, width, mlp_width, *, dropout, dtype, rngs, **attention):
        norm = {"dtype": dtype, "rngs": rngs}
        self.attention_norm = nnx.LayerNorm(width, **norm)
        self.attention = LinearAttention(width, dtype=dtype, rngs=rngs, **attention)
        self.mlp_norm = nnx.LayerNorm(width, **norm)
        self.up = nnx.Linear(width, mlp_width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(mlp_width, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)

    def __call__(self, x, mask, rngs):
        drop = {"deterministic": rngs is None, "rngs": rngs}
        y, _ = self.attention(self.attention_norm(x), mask=mask)
        x = x + self.dropout(y, **drop)
        y = self.down(nnx.gelu(self.up(self.mlp_norm(x))))
        return x + self.dropout(y, **drop)


class Encoder(nnx.Module):
    """Pre-LayerNorm transformer encoder: embedding, positions, blocks, final LayerNorm.

    Args:
        vocab_size: number of token ids; id 0 is padding.
        max_length: largest T.
        num_layers, width (E), num_heads, mlp_width: sizes.
        kernel, options, qk_dim, normalize, causal, rule, chunk_size, implementation: see
            `layers.nnx.LinearAttention`.
        embed: `table` has a vector (N(0, 1)) for each id. `levels` is for ids that are grey levels,
            with the id of the mask last: a linear map of the level, scaled by `scale_levels`, and
            of a second number that is 1 for the mask (and the first one 0).
        positions: `learned` (N(0, 1)) or `sinusoidal` (Vaswani et al. 2017, fixed) are added to the
            embedding, `rotary` turns queries and keys in every block, `none`.
        use_cls: whether a learned vector is put before the tokens, for `cls` pooling.
        dropout: rate on the embedding and on every branch of a block.
        dtype: dtype of the computation; parameters are float32.
        rngs: key stream `params`.

    Raises:
        ValueError: for unknown names, or a `cls` vector in a causal encoder, where it sees nothing.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        *,
        num_layers: int,
        width: int,
        num_heads: int,
        mlp_width: int,
        kernel="llops",
        options: dict | None = None,
        qk_dim: int | None = None,
        normalize: str | None = None,
        causal: bool = False,
        rule: str | Gating = "additive",
        embed: str = "table",
        positions: str = "learned",
        use_cls: bool = False,
        dropout: float = 0.0,
        chunk_size: int = 128,
        implementation=None,
        dtype=None,
        rngs: nnx.Rngs,
    ):
        if positions not in POSITIONS:
            raise ValueError(f"positions={positions!r} is unknown; known: {', '.join(POSITIONS)}.")
        if embed not in EMBEDDINGS:
            raise ValueError(f"embed={embed!r} is unknown; known: {', '.join(EMBEDDINGS)}.")
        if use_cls and causal:
            raise ValueError("use_cls=True with causal=True: the first token sees no other token.")
        self.max_length = max_length
        self.width = width
        self.positions = positions
        unit = nnx.initializers.normal(1.0)
        self.levels = vocab_size - 1 if embed == "levels" else None
        self.embedding = (
            nnx.Embed(vocab_size, width, dtype=dtype, embedding_init=unit, rngs=rngs)
            if self.levels is None
            else nnx.Linear(2, width, dtype=dtype, rngs=rngs)
        )
        learned = positions == "learned"
        size = (max_length, width)
        self.position = nnx.Param(unit(rngs.params(), size)) if learned else None
        self.cls = nnx.Param(jnp.zeros((width,))) if use_cls else None
        self.blocks = nnx.List(
            [
                Block(
                    width,
                    mlp_width,
                    num_heads=num_heads,
                    kernel=kernel,
                    options=options,
                    qk_dim=qk_dim,
                    normalize=normalize,
                    causal=causal,
                    rule=rule,
                    use_rotary=positions == "rotary",
                    chunk_size=chunk_size,
                    implementation=implementation,
                    dropout=dropout,
                    dtype=dtype,
                    rngs=rngs,
                )
                for _ in range(num_layers)
            ]
        )
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)

    def __call__(
        self, tokens: jax.Array, mask: jax.Array | None = None, *, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Encode token ids.

        Args:
            tokens: [B, T] int, T <= max_length.
            mask: [B, T] bool, false at padding; None: all tokens are real.
            rngs: key stream `dropout`; None: no dropout.

        Returns:
            [B, T, E], with use_cls [B, 1 + T, E].
        """
        x, mask = self._start(tokens, mask, rngs)
        for block in self.blocks:
            x = block(x, mask, rngs)
        return self.norm(x)

    def key_features(self, tokens: jax.Array, mask: jax.Array | None = None) -> list[jax.Array]:
        """Features of the keys of every block, each [B, T, H, M]; with use_cls 1 + T of them."""
        x, mask = self._start(tokens, mask, None)
        features = []
        for block in self.blocks:
            features.append(block.attention.key_features(block.attention_norm(x)))
            x = block(x, mask, None)
        return features

    def _start(self, tokens, mask, rngs):
        """What enters the first block, and the mask with the `cls` vector."""
        B, T = tokens.shape
        if self.max_length < T:
            raise ValueError(f"tokens has length {T}, expected at most {self.max_length}.")
        x = self._embed(tokens)
        if self.position is not None:
            x = x + self.position[...][:T].astype(x.dtype)
        elif self.positions == "sinusoidal":
            x = x + sinusoids(T, self.width).astype(x.dtype)
        if self.cls is not None:
            first = jnp.broadcast_to(self.cls[...].astype(x.dtype), (B, 1, self.width))
            x = jnp.concatenate([first, x], axis=1)
            if mask is not None:
                mask = jnp.concatenate([jnp.ones((B, 1), bool), mask], axis=1)
        return self.dropout(x, deterministic=rngs is None, rngs=rngs), mask

    def _embed(self, tokens):
        """Look up embeddings; small tables by a matrix product with one-hot rows.

        The gradient of a look-up adds the rows of all B T tokens into a few table rows one by one,
        which is many times slower on accelerators than everything else in a small encoder.
        """
        if self.levels is not None:
            masked = tokens.astype(jnp.int32) == self.levels  # which bytes cannot hold
            level = jnp.where(masked, 0.0, scale_levels(tokens, self.levels))
            return self.embedding(jnp.stack([level, masked.astype(level.dtype)], axis=-1))
        if self.embedding.num_embeddings > LARGEST_ONE_HOT:
            return self.embedding(tokens.astype(jnp.int32))
        table = self.embedding.embedding[...]
        table = table.astype(self.embedding.dtype or table.dtype)
        return jax.nn.one_hot(tokens, len(table), dtype=table.dtype) @ table


class Classifier(nnx.Module):
    """Encoder, pooling over real tokens and a head.

    One tower: logits = head(pool(encode(tokens))). Two towers share the encoder, and the pooled
    vectors of the two documents meet in the head.

    Args:
        encoder: the encoder; it must have a `cls` vector for `cls` pooling.
        num_classes: number of logits.
        pooling: `mean`, `max`, `last` (last real token) or `cls`.
        head_width: hidden size of a ReLU head; None: linear.
        two_towers: whether inputs are pairs of documents.
        pair_head: their head, a name in `heads.PAIR_HEADS`.
        rngs: key stream `params`.

    Raises:
        ValueError: for an unknown pooling or pair head, or `cls` without a `cls` vector.
    """

    def __init__(
        self,
        encoder: Encoder,
        num_classes: int,
        *,
        pooling: str = "mean",
        head_width: int | None = None,
        two_towers: bool = False,
        pair_head: str = "products",
        rngs: nnx.Rngs,
    ):
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is unknown; known: {', '.join(POOLINGS)}.")
        if (pooling == "cls") != (encoder.cls is not None):
            raise ValueError(f"pooling={pooling!r}, expected 'cls' if and only if use_cls is set.")
        self.encoder = encoder
        self.pooling = pooling
        self.head = Head(
            encoder.width,
            num_classes,
            width=head_width,
            pair=pair_head if two_towers else None,
            rngs=rngs,
        )

    def __call__(
        self, tokens: jax.Array, mask: jax.Array, *, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Classify.

        Args:
            tokens: [B, T] int, for two towers [B, 2, T].
            mask: bool of the same shape, false at padding.
            rngs: key stream `dropout`; None: no dropout.

        Returns:
            Logits [B, num_classes], float32.
        """
        T = tokens.shape[-1]
        tokens, mask = tokens.reshape(-1, T), mask.reshape(-1, T)
        return self.head(pool(self.encoder(tokens, mask, rngs=rngs), mask, self.pooling))


class TokenPredictor(nnx.Module):
    """Encoder and a linear head that predicts a token at every position, for self-pretraining."""

    def __init__(self, encoder: Encoder, vocab_size: int, *, rngs: nnx.Rngs):
        self.encoder = encoder
        self.head = nnx.Linear(encoder.width, vocab_size, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, mask: jax.Array, *, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Logits [B, T, vocab_size], float32, for tokens and mask [B, T]."""
        x = self.encoder(tokens, mask, rngs=rngs)[:, -tokens.shape[1] :]
        return self.head(x.astype(jnp.float32))


def pool(x: jax.Array, mask: jax.Array, pooling: str) -> jax.Array:
    """Pool x [B, T, E] over the real tokens of mask [B, T] to [B, E], float32.

    For `cls` x is [B, 1 + T, E]. A row without real tokens gives 0 (`max`, `mean`) or its first
    token (`last`).
    """
    x = x.astype(jnp.float32)
    if pooling == "cls":
        return x[:, 0]
    if pooling == "last":
        last = jnp.max(jnp.where(mask, jnp.arange(mask.shape[1]), 0), axis=1)
        return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    real = mask[..., None]
    if pooling == "max":
        highest = jnp.max(jnp.where(real, x, -jnp.inf), axis=1)
        return jnp.where(jnp.any(mask, axis=1)[:, None], highest, 0)
    count = jnp.maximum(jnp.sum(mask, axis=1), 1)[:, None]
    return jnp.sum(jnp.where(real, x, 0), axis=1) / count


def scale_levels(levels: jax.Array, count: int) -> jax.Array:
    """Levels 0..count-1 as float32 numbers from -1 to 1."""
    return levels.astype(jnp.float32) * (2 / (count - 1)) - 1


def sinusoids(T: int, width: int) -> jax.Array:
    """Fixed positions [T, width]: sines of positions 0..T-1 in the first half, then cosines."""
    half = (width + 1) // 2
    frequency = 10000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(T)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)[:, :width]
