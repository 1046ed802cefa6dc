"""Linear attention as Flax Linen modules, with the parameter tree of the NNX ones."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from lowrank_attn import ops
from lowrank_attn.layers.attend import (
    Kernel,
    attend,
    check_flax_call,
    get_gating,
    head_sizes,
    make_kernel,
    padding_mask,
    resolve_normalize,
)
from lowrank_attn.layers.gates import Gating, Sizes
from lowrank_attn.layers.rotary import rotary
from lowrank_attn.ops.rules.base import Gates


class Attend(nn.Module):
    """Kernel, its parameters and the normaliser; see `layers.nnx.Attend`.

    Sizes are taken from the inputs. Arrays that are not trained are in the collection `constants`.
    """

    kernel: str | Kernel = "llops"
    options: dict | None = None
    causal: bool = False
    normalize: str | None = None
    rule: str = "additive"
    chunk_size: int = 128
    implementation: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        gates: Gates | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        initial_state: ops.State | None = None,
    ) -> tuple[jax.Array, ops.State | None]:
        """Attend; arguments and results as in `layers.attend.attend`."""
        kernel = make_kernel(self.kernel, self.options, self.rule)
        normalize = resolve_normalize(kernel, self.normalize, self.rule)
        H, D = k.shape[2:]

        def trainable(key):
            trainable, _ = kernel.init(key, D, H)
            return jax.tree.map(lambda x: x.astype(self.param_dtype), trainable)

        def constant():
            return kernel.init(self.make_rng("params"), D, H)[1]

        trained, fixed = jax.eval_shape(lambda: kernel.init(jax.random.key(0), D, H))
        params: dict[str, jax.Array] = {}
        if trained:
            params |= self.param("phi", trainable)
        if fixed:
            params |= self.variable("constants", "phi", constant).value
        gain = None
        if normalize == "rms":
            shape = (q.shape[2], v.shape[3])
            gain = self.param("gain", nn.initializers.ones, shape, self.param_dtype)
        return attend(
            kernel,
            params,
            gain,
            q,
            k,
            v,
            causal=self.causal,
            normalize=normalize,
            rule=self.rule,
            gates=gates,
            mask=mask,
            segment_ids=segment_ids,
            positions=positions,
            initial_state=initial_state,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )


class LinearAttention(nn.Module):
    """Multi-head self-attention in time linear in T; see `layers.nnx.LinearAttention`.

    The output has the width of the input.
    """

    num_heads: int
    num_kv_heads: int | None = None
    qk_dim: int | None = None
    value_dim: int | None = None
    kernel: str | Kernel = "llops"
    options: dict | None = None
    causal: bool = False
    normalize: str | None = None
    rule: str | Gating = "additive"
    use_rotary: bool = False
    use_bias: bool = True
    chunk_size: int = 128
    implementation: Any = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        initial_state: ops.State | None = None,
    ) -> tuple[jax.Array, ops.State | None]:
        """Attend within x [B, T, E]; see `layers.nnx.LinearAttention.__call__`."""
        E = x.shape[-1]
        qk_dim, value_dim = head_sizes(E, self.num_heads, self.qk_dim, self.value_dim)
        H = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        gating = get_gating(self.rule)

        def dense(features, name, axis=-1):
            return nn.DenseGeneral(
                features,
                axis=axis,
                use_bias=self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                name=name,
            )

        q = dense((self.num_heads, qk_dim), "query")(x)
        k = dense((H, qk_dim), "key")(x)
        v = dense((H, value_dim), "value")(x)
        if self.use_rotary:
            at = jnp.arange(x.shape[1]) if positions is None else positions
            q, k = rotary(q, at), rotary(k, at)

        def init_gate(key):
            kernel = make_kernel(self.kernel, self.options, gating.rule)
            M = kernel.dim(qk_dim)  # type: ignore[union-attr]  # it has features
            gate = gating.init(key, Sizes(E, H, M, value_dim))
            return jax.tree.map(lambda x: x.astype(self.param_dtype), gate)

        trained = gating.gates and jax.eval_shape(init_gate, jax.random.key(0))
        gate = self.param("gate", init_gate) if trained else {}
        y, state = Attend(
            kernel=self.kernel,
            options=self.options,
            causal=self.causal,
            normalize=self.normalize,
            rule=gating.rule,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
            param_dtype=self.param_dtype,
            name="attend",
        )(
            q,
            k,
            v,
            gates=gating.apply(gate, x, H),
            mask=mask,
            segment_ids=segment_ids,
            positions=positions,
            initial_state=initial_state,
        )
        return dense(E, "out", axis=(-2, -1))(y), state


class AttentionFn(Attend):
    """`attention_fn` for `flax.linen.MultiHeadDotProductAttention`, with parameters of its own.

        nn.MultiHeadDotProductAttention(num_heads=H, attention_fn=AttentionFn(causal=True))

    The fields are those of `Attend`. Linen filters keywords by the signature, so the ones that
    matter are spelled out here. The layer's `precision` applies to its projections only.
    """

    def __call__(  # type: ignore[override]
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = True,
        dtype: Any = None,
        module: Any = None,
    ) -> jax.Array:
        """Attend; keywords as Flax passes them.

        Raises:
            ValueError: for masks other than padding, dropout of weights, or sown weights.
        """
        check_flax_call(dropout_rate, deterministic, module)
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        y, _ = super().__call__(query, key, value, mask=padding_mask(mask, key))
        return y
