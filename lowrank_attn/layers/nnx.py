"""Linear attention as Flax NNX modules."""

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_attn import ops
from lowrank_attn.features import FeatureMap
from lowrank_attn.layers import AttentionMethod
from lowrank_attn.layers.attend import (
    Kernel,
    attend,
    check_flax_call,
    check_order,
    get_gating,
    head_sizes,
    make_kernel,
    padding_mask,
    resolve_normalize,
)
from lowrank_attn.layers.gates import Gating, Sizes
from lowrank_attn.layers.rotary import rotary
from lowrank_attn.ops.rules.base import Gates


class Constant(nnx.Variable):
    """Arrays of a kernel that belong to the model and are never trained, such as projections."""


class Attend(nnx.Module):
    """Kernel, its parameters and the normaliser: from q, k, v to outputs, without projections.

    Parameters: `phi`, the kernel's own (see its docstring), and with the `rms` normaliser `gain`
    [num_heads, value_dim], which multiplies the normalised output.

    Args:
        num_heads: Hq, heads of the queries.
        num_kv_heads: H, heads of keys and values; divides num_heads.
        qk_dim: D, head size of queries and keys.
        value_dim: P, head size of values.
        kernel: name in `FEATURE_MAPS` or `ATTENTION`, or a value of either kind.
        options: keyword arguments of the kernel's constructor, with a name.
        causal: whether tokens see only themselves and earlier ones.
        normalize: name in `NORMALIZERS`; None: the one that is safe for kernel and rule.
        rule: name in `RULES`, whose gates come with each call. Other rules than `additive` need
            features and causal calls.
        chunk_size, implementation: see `ops.causal`.
        param_dtype: dtype of trained parameters.
        rngs: key stream `params`.

    Raises:
        ValueError: for unknown names and options, heads that do not divide, or a kernel without a
            causal form in a causal layer.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        qk_dim: int,
        value_dim: int,
        *,
        kernel: str | Kernel = "llops",
        options: dict | None = None,
        causal: bool = False,
        normalize: str | None = None,
        rule: str = "additive",
        chunk_size: int = 128,
        implementation=None,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads}, expected a multiple of num_kv_heads={num_kv_heads}."
            )
        self.kernel = make_kernel(kernel, options, rule)
        if isinstance(self.kernel, AttentionMethod):
            self.kernel.check_causal(causal)
        self.normalize = resolve_normalize(self.kernel, normalize, rule)
        self.rule = rule
        self.causal = causal
        self.chunk_size = chunk_size
        self.implementation = implementation
        trainable, constant = self.kernel.init(rngs.params(), qk_dim, num_kv_heads)
        trained = {name: nnx.Param(x.astype(param_dtype)) for name, x in trainable.items()}
        self.phi = nnx.Dict(trained | {name: Constant(x) for name, x in constant.items()})
        has_gain = self.normalize == "rms"
        ones = jnp.ones((num_heads, value_dim), param_dtype)
        self.gain = nnx.Param(ones) if has_gain else None

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
        causal: bool | None = None,
    ) -> tuple[jax.Array, ops.State | None]:
        """Attend; arguments and results as in `layers.attend.attend`, causal None: the layer's."""
        return attend(
            self.kernel,
            self.params(),
            None if self.gain is None else self.gain[...],
            q,
            k,
            v,
            causal=self.causal if causal is None else causal,
            normalize=self.normalize,
            rule=self.rule,
            gates=gates,
            mask=mask,
            segment_ids=segment_ids,
            positions=positions,
            initial_state=initial_state,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )

    def params(self) -> dict[str, jax.Array]:
        """The kernel's parameters and constants by name."""
        return {name: variable[...] for name, variable in self.phi.items()}


class LinearAttention(nnx.Module):
    """Multi-head self-attention in time linear in T: projections, `Attend`, output projection.

    Parameters: `query`, `key`, `value`, `out` (each `kernel` and, with use_bias, `bias`), `attend`
    (see `Attend`) and `gate` (see `layers.gates`); the Linen layer has the same tree.

    Args:
        width: E, size of inputs and outputs.
        num_heads: Hq.
        num_kv_heads: H, divides num_heads; None: num_heads.
        qk_dim: D; None: width / num_heads. Taylor features are meant for 16.
        value_dim: P; None: width / num_heads.
        rule: name in `GATINGS`, a state-update rule with gates that are computed from x, or a
            `Gating`. Other rules than `additive` need a feature map and causal=True.
        use_rotary: whether queries and keys are rotated by their positions, with rotary_base.
        use_bias: whether the projections have a bias.
        dtype: dtype of the computation; None: that of inputs and parameters. States stay float32.
        rngs: key stream `params`.

    The other arguments are those of `Attend`.

    Raises:
        ValueError: for unknown names and options, or sizes that do not divide.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        qk_dim: int | None = None,
        value_dim: int | None = None,
        kernel: str | Kernel = "llops",
        options: dict | None = None,
        causal: bool = False,
        normalize: str | None = None,
        rule: str | Gating = "additive",
        use_rotary: bool = False,
        rotary_base: float = 10000.0,
        use_bias: bool = True,
        chunk_size: int = 128,
        implementation=None,
        dtype=None,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        qk_dim, value_dim = head_sizes(width, num_heads, qk_dim, value_dim)
        H = num_heads if num_kv_heads is None else num_kv_heads
        shared = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query = nnx.LinearGeneral(width, (num_heads, qk_dim), **shared)
        self.key = nnx.LinearGeneral(width, (H, qk_dim), **shared)
        self.value = nnx.LinearGeneral(width, (H, value_dim), **shared)
        self.out = nnx.LinearGeneral((num_heads, value_dim), width, axis=(-2, -1), **shared)
        self.rotary_base = rotary_base if use_rotary else None
        self.gating = get_gating(rule)
        check_order(self.gating.rule, causal)
        self.attend = Attend(
            num_heads,
            H,
            qk_dim,
            value_dim,
            kernel=kernel,
            options=options,
            causal=causal,
            normalize=normalize,
            rule=self.gating.rule,
            chunk_size=chunk_size,
            implementation=implementation,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        gate = {}
        if self.gating.gates:
            M = self.attend.kernel.dim(qk_dim)  # type: ignore[union-attr]  # it has features
            gate = self.gating.init(rngs.params(), Sizes(width, H, M, value_dim))
        self.gate = nnx.Dict({name: nnx.Param(x.astype(param_dtype)) for name, x in gate.items()})
        self.num_kv_heads = H

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        initial_state: ops.State | None = None,
    ) -> tuple[jax.Array, ops.State | None]:
        """Attend from all tokens of x to all (or all earlier) tokens of x.

        Args:
            x: [B, T, E].
            mask: [B, T] bool, false at padding.
            segment_ids: [B, T] int, packed documents.
            positions: [T] or [B, T] int; None: 0..T-1.
            initial_state: the state that an earlier call returned.

        Returns:
            [B, T, E], and the state after the last token (None for kernels without one).
        """
        gate = {name: variable[...] for name, variable in self.gate.items()}
        y, state = self.attend(
            *self.project(x, positions),
            gates=self.gating.apply(gate, x, self.num_kv_heads),
            mask=mask,
            segment_ids=segment_ids,
            positions=positions,
            initial_state=initial_state,
        )
        return self.out(y), state

    def project(
        self, x: jax.Array, positions: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, Hq, D], keys [B, T, H, D] and values [B, T, H, P] of x [B, T, E]."""
        return self._at(self.query(x), positions), self._at(self.key(x), positions), self.value(x)

    def key_features(self, x: jax.Array, *, positions: jax.Array | None = None) -> jax.Array:
        """Features phi(k) [B, T, H, M] of the tokens of x [B, T, E], for `features.statistics`.

        Raises:
            ValueError: if the kernel is no feature map.
        """
        if not isinstance(self.attend.kernel, FeatureMap):
            raise ValueError("key_features of a kernel that is no feature map.")
        k = self._at(self.key(x), positions)
        return self.attend.kernel(self.attend.params(), k, is_query=False, positions=positions)

    def _at(self, x, positions):
        if self.rotary_base is None:
            return x
        at = jnp.arange(x.shape[1]) if positions is None else positions
        return rotary(x, at, self.rotary_base)


class AttentionFn(Attend):
    """`attention_fn` for `flax.nnx.MultiHeadAttention`; being a module, its parameters train.

        nnx.MultiHeadAttention(H, E, attention_fn=AttentionFn(H, H, E // H, E // H, rngs=rngs), ...)

    The arguments are those of `Attend`. The layer's `precision` applies to its projections only.
    """

    def __call__(  # type: ignore[override]
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: jax.Array | None = None,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype=None,
        precision=None,
        module=None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Attend; keywords as Flax passes them.

        Raises:
            ValueError: for masks other than padding, dropout of weights, or sown weights.
        """
        check_flax_call(dropout_rate, deterministic, module)
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        causal = True if is_causal else None
        mask = padding_mask(mask, key)
        y, _ = super().__call__(query, key, value, mask=mask, causal=causal)
        return y
