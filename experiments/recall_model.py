"""The two-layer model of associative recall: a gated convolution, then attention of any kernel."""

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_attn.features import FeatureMap
from lowrank_attn.layers.causal_conv import causal_conv
from lowrank_attn.layers.nnx import LinearAttention
from lowrank_attn.layers.visibility import precision_for
from lowrank_attn.ops.normalize import apply_normalizer
from lowrank_attn.ops.product_features import by_products

TAPS = 3  # tokens that the convolution sees
INITIAL = 0.02  # standard deviation of matrices


class BaseConv(nnx.Module):
    """y = (conv(x) + b_c) * (x W + b) + x, a depthwise causal convolution over three tokens.

    Parameters: `conv` [E, 3] and `conv_bias` [E], uniform within 3^(-1/2); `gate` [E, E] with bias.

    Source: Zoology's BaseConv, which is not that of BASED's language models (`ShortConv`).
    """

    def __init__(self, width: int, *, dtype, rngs: nnx.Rngs):
        def uniform(*shape):
            return jax.random.uniform(rngs.params(), shape, minval=-(TAPS**-0.5), maxval=TAPS**-0.5)

        self.conv = nnx.Param(uniform(width, TAPS))
        self.conv_bias = nnx.Param(uniform(width))
        self.gate = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, E] to [B, T, E] in the dtype of x."""
        convolved = causal_conv(x, self.conv[...]) + self.conv_bias[...]
        return (convolved * self.gate(x) + x).astype(x.dtype)


class RecallModel(nnx.Module):
    """Embedding, `BaseConv`, one causal attention layer with one head, the embedding as head.

        r = dropout(embed(tokens))
        r <- r + conv(LN(r));  r <- r + LN(r);  r <- r + attention(LN(r));  r <- r + LN(r)
        logits = LN(r) embedding^T

    The additions of LN(r) are the published blocks with an identity in place of an MLP. The
    residual is float32. Matrices begin as N(0, 0.02^2); no positions.

    Args:
        vocab_size: V.
        width: E, also the size of values.
        qk_dim: size of queries and keys.
        kernel, options: see `LinearAttention`.
        dtype: of the computation inside layers.
        rngs: key stream `params`.

    Source: Zoology at its commit d88d6f5, two layers.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        qk_dim: int,
        kernel: str,
        options: dict,
        *,
        dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.embedding = nnx.Embed(vocab_size, width, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs) for _ in range(5)])
        self.conv = BaseConv(width, dtype=dtype, rngs=rngs)
        self.attention = LinearAttention(
            width,
            1,
            qk_dim=qk_dim,
            kernel=kernel,
            options=options,
            causal=True,
            use_bias=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.dtype = dtype
        for matrix in (
            self.embedding.embedding,
            self.conv.gate.kernel,
            *(getattr(self.attention, name).kernel for name in ("query", "key", "value", "out")),
        ):
            matrix.set_value(INITIAL * jax.random.normal(rngs.params(), matrix.shape))

    def before_attention(self, tokens: jax.Array, kept: jax.Array | None = None):
        """The residual and the input of attention, [B, T, E] each.

        Args:
            tokens: [B, T] int.
            kept: [B, T, E], multiplies the embedding: dropout; None: none.
        """
        r = self.embedding(tokens)
        if kept is not None:
            r = r * kept
        r = r + self.conv(self._norm(0, r))
        r = r + self.norms[1](r)
        return r, self._norm(2, r)

    def hidden(self, tokens: jax.Array, kept: jax.Array | None = None) -> jax.Array:
        """What `logits` reads, [B, T, E] float32."""
        r, x = self.before_attention(tokens, kept)
        r = r + self.attend(x)
        r = r + self.norms[3](r)
        return self.norms[4](r)

    def attend(self, x: jax.Array) -> jax.Array:
        """`attention` of x [B, T, E], with all T x T scores where its kernel has features.

        For sequences no longer than features are many that is less work than states, is compiled
        in a fraction of the time, and can be `vmap`ped.
        """
        layer, kernel = self.attention, self.attention.attend.kernel
        if not isinstance(kernel, FeatureMap):
            return layer(x)[0]
        params, features = layer.attend.params(), by_products(kernel)  # type: ignore[arg-type]
        phi_q = features(params, layer.query(x), is_query=True)
        phi_k = features(params, layer.key(x), is_query=False)
        v = layer.value(x)

        def product(expression, a, b):
            return jnp.einsum(
                expression, a, b, precision=precision_for(a), preferred_element_type=jnp.float32
            )

        scores = jnp.tril(product("bthm,bshm->bhts", phi_q, phi_k))
        summed = product("bhts,bshp->bthp", scores.astype(v.dtype), v)
        sums = jnp.einsum("bhts->bth", scores)
        y = apply_normalizer(summed, sums, layer.attend.normalize, 1e-6).astype(v.dtype)
        gain = layer.attend.gain
        return layer.out(y if gain is None else y * gain[...].astype(y.dtype))

    def logits(self, x: jax.Array) -> jax.Array:
        """Products with the embedding: [..., E] -> [..., V] float32."""
        table = self.embedding.embedding[...].astype(self.dtype)
        return jnp.dot(x.astype(self.dtype), table.T, preferred_element_type=jnp.float32)

    def _norm(self, i, r):
        return self.norms[i](r).astype(self.dtype)
