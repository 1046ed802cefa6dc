"""Token mixers of a causal language model. `MIXERS` lists them by name.

Every mixer is a module `mixer(x, mask=, segment_ids=, positions=, initial_state=)` from x [B, T, E]
to (y [B, T, E], state), as `LinearAttention` is. A token reads itself and earlier tokens of its
document. `initial_state` is `mixer.empty_state(...)` or what an earlier call returned; without one
no state needs to be returned. The mask [B, T] is false at padding, which is at the ends of a row.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.layers import AttentionMethod
from lowrank_attn.layers.attend import head_sizes
from lowrank_attn.layers.cached_softmax import KeyValueCache, cached_softmax, empty_cache
from lowrank_attn.layers.causal_conv import causal_conv
from lowrank_attn.layers.exact import softmax
from lowrank_attn.layers.mamba import MambaState, continue_mamba, mamba
from lowrank_attn.layers.nnx import LinearAttention
from lowrank_attn.layers.over_mesh import conv_over_mesh, method_over_mesh
from lowrank_attn.layers.recent import real_and_segment, remember
from lowrank_attn.layers.rotary import rotary
from lowrank_attn.layers.sliding_window import WindowState, continue_window, sliding_window
from lowrank_attn.layers.visibility import segment_numbers
from lowrank_attn.ops import State
from lowrank_attn.ops.normalize import needs_denominator


class LinearMixer(LinearAttention):
    """Causal `LinearAttention` of any kernel and rule, without biases.

    The kernel `softmax`, with `use_rotary` and `num_kv_heads`, makes the attention of Llama; it
    goes on from a `KeyValueCache`, other kernels that are no feature maps keep no state.

    Args:
        width: E.
        options: the other arguments of `LinearAttention`, `num_heads` among them.
        rngs: key stream `params`.
    """

    def __init__(self, width: int, *, use_bias: bool = False, rngs: nnx.Rngs, **options):
        super().__init__(width, causal=True, use_bias=use_bias, rngs=rngs, **options)
        self.has_cache = options.get("kernel") == "softmax"

    def __call__(self, x, *, mask=None, segment_ids=None, positions=None, initial_state=None):
        """Mix the tokens of x; see the head of this file."""
        if not isinstance(initial_state, KeyValueCache):
            return super().__call__(
                x,
                mask=mask,
                segment_ids=segment_ids,
                positions=positions,
                initial_state=initial_state,
            )
        segment = None if segment_ids is None else segment_numbers(segment_ids)
        tokens = real_and_segment(x, mask, segment)
        y, state = cached_softmax(*self.project(x, positions), initial_state, *tokens)
        return self.out(y), state

    def empty_state(self, batch: int, max_length: int, dtype) -> State | KeyValueCache:
        """Zeros; of `softmax`, room for max_length tokens.

        Raises:
            ValueError: if the kernel keeps no state, or that is no room.
        """
        kernel = self.attend.kernel
        if self.has_cache:
            sizes = (self.key.out_features, self.value.out_features)
            return empty_cache(batch, max_length, *sizes, dtype)
        if isinstance(kernel, AttentionMethod):
            raise ValueError(
                "this model cannot go on from a state: a layer is `linear` with a kernel that is "
                f"no feature map. Kernels that are: {', '.join(FEATURE_MAPS)}; other layers with "
                "a state: " + ", ".join(name for name in MIXERS if name != "linear") + "."
            )
        H, D = self.key.out_features
        P = self.value.out_features[1]
        S = jnp.zeros((batch, H, kernel.dim(D), P), jnp.float32)
        return State(S, S[..., 0] if needs_denominator(self.attend.normalize) else None)


class ShortConv(nnx.Module):
    """Gated convolution over K tokens.

        [a | g] = x W_in + b_in,  y = (silu(conv(a)) g) W_out + b_out

    Parameters: `up` [E, 2, I] with bias, first a, then g; `conv` [I, K], uniform within K^(-1/2);
    `out` [I, E] with bias. I = expand E.

    Args:
        width: E.
        expand: I / E.
        kernel_size: K, the token itself and K - 1 before it.
        dtype: dtype of the computation; None: that of x and parameters.
        rngs: key stream `params`.

    Source: BASED (arXiv 2402.18668), the convolution of its published models.
    """

    def __init__(
        self,
        width: int,
        *,
        expand: int = 2,
        kernel_size: int = 3,
        dtype=None,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        if kernel_size < 1:
            raise ValueError(f"kernel_size={kernel_size}, expected at least 1.")
        inner = expand * width
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.up = nnx.LinearGeneral(width, (2, inner), **shared)
        bound = kernel_size**-0.5
        filters = jax.random.uniform(
            rngs.params(), (inner, kernel_size), param_dtype, minval=-bound, maxval=bound
        )
        self.conv = nnx.Param(filters)
        self.out = nnx.Linear(inner, width, **shared)

    def __call__(self, x, *, mask=None, segment_ids=None, positions=None, initial_state=None):
        """Mix the tokens of x; see the head of this file. The state is [B, K - 1, I]."""
        del positions
        a, g = jnp.moveaxis(self.up(x), -2, 0)
        if mask is not None:
            a = jnp.where(mask[..., None], a, 0)
        filters = self.conv[...].astype(jnp.float32)
        state = None
        if initial_state is None:
            y = conv_over_mesh(a, filters, segment_ids)
        else:
            segment = None if segment_ids is None else segment_numbers(segment_ids)
            y = causal_conv(a, filters, segment, initial_state)
            real, segment = real_and_segment(x, mask, segment)
            state = remember(initial_state, a.astype(initial_state.dtype), real, segment)
        return self.out(jax.nn.silu(y).astype(g.dtype) * g), state

    def empty_state(self, batch: int, max_length: int, dtype) -> jax.Array:
        """Nothing before the first token."""
        del max_length
        inner, K = self.conv.shape
        return jnp.zeros((batch, K - 1, inner), dtype)


class SoftmaxAttention(nnx.Module):
    """Softmax attention to all earlier tokens or to a window, with rotary positions.

    Parameters: `qkv` [E, 3, H, D] (query, key, value) and `out` [H, D, E], without bias.

    Args:
        width: E.
        num_heads: H, divides E; D = E / H.
        window: W, how many tokens a token looks back; None: all.
        rotary_fraction: the first so many of the D coordinates are rotated; their number
            int(D rotary_fraction) must be even.
        dtype: dtype of the computation; None: that of x and parameters.
        rngs: key stream `params`.

    Raises:
        ValueError: if the sizes do not divide, or the window is below 1.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        window: int | None = None,
        rotary_fraction: float = 1.0,
        dtype=None,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        D, _ = head_sizes(width, num_heads, None, None)
        shared = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.qkv = nnx.LinearGeneral(width, (3, num_heads, D), **shared)
        self.out = nnx.LinearGeneral((num_heads, D), width, axis=(-2, -1), **shared)
        self.window = window
        self.method = softmax() if window is None else sliding_window(window)
        self.rotated = int(D * rotary_fraction)
        if self.rotated % 2 or not 0 <= self.rotated <= D:
            raise ValueError(
                f"rotary_fraction={rotary_fraction} of head size {D} is {self.rotated} "
                f"coordinates, expected an even number up to {D}."
            )

    def __call__(self, x, *, mask=None, segment_ids=None, positions=None, initial_state=None):
        """Mix the tokens of x; see the head of this file.

        The state is a `WindowState`, or without a window a `KeyValueCache`.
        """
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        positions = jnp.arange(x.shape[1]) if positions is None else positions
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        if initial_state is None:
            y = method_over_mesh(
                self.method, {}, q, k, v, causal=True, mask=mask, segment_ids=segment_ids
            )
            return self.out(y), None
        segment = None if segment_ids is None else segment_numbers(segment_ids)
        tokens = real_and_segment(x, mask, segment)
        advance = cached_softmax if self.window is None else continue_window
        y, state = advance(q, k, v, initial_state, *tokens)
        return self.out(y), state

    def empty_state(self, batch: int, max_length: int, dtype) -> WindowState | KeyValueCache:
        """Nothing before the first token; without a window, room for max_length tokens.

        Raises:
            ValueError: if that is no room.
        """
        heads = self.qkv.out_features[1:]
        if self.window is None:
            return empty_cache(batch, max_length, heads, heads, dtype)
        # an array each, so that both can be donated
        k, v = (jnp.zeros((batch, self.window, *heads), dtype) for _ in range(2))
        return WindowState(k, v, jnp.zeros((batch, self.window), bool))

    def _rotate(self, x, positions):
        rotated, rest = jnp.split(x, (self.rotated,), axis=-1)
        return jnp.concatenate([rotary(rotated, positions), rest], axis=-1)


class Mamba(nnx.Module):
    """Mamba's block around the selective scan: [v | q] = x W_in, y = scan(v, q) W_out.

    Parameters: `up` [E, 2, I], first v, then the gate q; `scan`, the leaves of `layers.mamba` for
    one head of I channels; `out` [I, E]. I = expand E.

    Args:
        width: E.
        expand: I / E.
        state_size, conv_size, dt_rank: see `layers.mamba`.
        dtype: dtype of the projections; None: that of x and parameters. The scan is float32.
        rngs: key stream `params`.

    Source: Mamba (arXiv 2312.00752), figure 3.
    """

    def __init__(
        self,
        width: int,
        *,
        expand: int = 2,
        state_size: int = 16,
        conv_size: int = 4,
        dt_rank: int | None = None,
        dtype=None,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        inner = expand * width
        shared = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.up = nnx.LinearGeneral(width, (2, inner), **shared)
        self.method = mamba(state_size, conv_size, dt_rank)
        scan, _ = self.method.init(rngs.params(), inner, 1)
        self.scan = nnx.Dict({name: nnx.Param(x.astype(param_dtype)) for name, x in scan.items()})
        self.out = nnx.Linear(inner, width, **shared)

    def __call__(self, x, *, mask=None, segment_ids=None, positions=None, initial_state=None):
        """Mix the tokens of x; see the head of this file. The state is a `MambaState`."""
        del positions
        v, q = jnp.moveaxis(self.up(x)[..., None, :], -3, 0)
        params = {name: variable[...] for name, variable in self.scan.items()}
        if initial_state is None:
            y = method_over_mesh(
                self.method, params, q, q, v, causal=True, mask=mask, segment_ids=segment_ids
            )
            return self.out(y[:, :, 0]), None
        segment = None if segment_ids is None else segment_numbers(segment_ids)
        tokens = real_and_segment(x, mask, segment)
        y, state = continue_mamba(params, q, v, initial_state, *tokens)
        return self.out(y[:, :, 0]), state

    def empty_state(self, batch: int, max_length: int, dtype) -> MambaState:
        """Nothing before the first token."""
        del max_length
        H, inner, N = self.scan["A_log"].shape
        K = self.scan["conv"].shape[-1]
        conv = jnp.zeros((batch, K - 1, H, inner), dtype)
        return MambaState(conv, jnp.zeros((batch, H, inner, N), jnp.float32))


MIXERS: dict[str, Callable[..., nnx.Module]] = {
    "short_conv": ShortConv,
    "linear": LinearMixer,
    "sliding_window": functools.partial(SoftmaxAttention, window=128),
    "softmax": SoftmaxAttention,
    "mamba": Mamba,
}
