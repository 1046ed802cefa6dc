"""What the Flax layers share: from projected queries, keys and values to outputs, as pure code."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_attn import ops, parallel
from lowrank_attn.features import FEATURE_MAPS, FeatureMap, unit_length
from lowrank_attn.layers import ATTENTION, GATINGS, AttentionMethod, Gating
from lowrank_attn.layers.over_mesh import attention_over_mesh, method_over_mesh
from lowrank_attn.ops.normalize import needs_denominator
from lowrank_attn.ops.rules import RULES
from lowrank_attn.ops.rules.base import Gates

Kernel = FeatureMap | AttentionMethod


def make_kernel(
    kernel: str | Kernel, options: dict[str, Any] | None = None, rule: str = "additive"
) -> Kernel:
    """Look up a kernel by name in `FEATURE_MAPS` and `ATTENTION`, and build it with its options.

    For rules that need keys of length 1, features of queries and keys are brought to that length.

    Raises:
        ValueError: if a name is unknown, an option is unknown, options come with a value, or a
            kernel without features is to follow a rule other than the additive one.
    """
    options = options or {}
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is unknown; known: {', '.join(RULES)}.")
    if not isinstance(kernel, str):
        if options:
            raise ValueError(f"options={options} belong to a kernel's name, got a kernel's value.")
        made = kernel
    else:
        known = FEATURE_MAPS | ATTENTION
        if kernel not in known:
            raise ValueError(f"kernel={kernel!r} is unknown; known: {', '.join(known)}.")
        try:
            made = known[kernel](**options)
        except TypeError as error:
            raise ValueError(f"options={options} do not fit kernel={kernel!r}: {error}.") from error
    if isinstance(made, AttentionMethod):
        if rule != "additive":
            name = kernel if isinstance(kernel, str) else "an attention method"
            raise ValueError(
                f"rule={rule!r} with kernel={name!r}, which has no features and keeps no state; "
                f"kernels that have: {', '.join(FEATURE_MAPS)}."
            )
        return made
    return unit_length(made) if RULES[rule].unit_keys else made


def get_gating(rule: str | Gating) -> Gating:
    """Look up a rule with its gates by name in `GATINGS`.

    Raises:
        ValueError: if the name is unknown.
    """
    if not isinstance(rule, str):
        return rule
    if rule not in GATINGS:
        raise ValueError(f"rule={rule!r} is unknown; known: {', '.join(GATINGS)}.")
    return GATINGS[rule]


def check_order(rule: str, causal: bool) -> None:
    """Check that tokens are read in order where the rule depends on it.

    Raises:
        ValueError: if they are not.
    """
    if rule != "additive" and not causal:
        raise ValueError(
            f"rule={rule!r} with causal=False: what decays or is overwritten depends on the order "
            "of the tokens. Set causal=True, or rule='additive'."
        )


def resolve_normalize(kernel: Kernel, normalize: str | None, rule: str = "additive") -> str:
    """The normaliser of a layer: the caller's, or the one that is safe for map and rule.

    Raises:
        ValueError: if the name is unknown, given for a method that has its own, the plain sum for a
            map whose scores can be negative, or that of a sum with a rule that has none.
    """
    if isinstance(kernel, AttentionMethod):
        if normalize is not None:
            raise ValueError(f"normalize={normalize!r}, but this kernel normalises by itself.")
        return "none"
    wanted = kernel.normalize if normalize is None else normalize
    if needs_denominator(wanted) and not RULES[rule].sums:
        if normalize is None:
            return "rms"
        raise ValueError(
            f"normalize={normalize!r} with rule={rule!r}, which weights values with both signs; "
            "use 'rms' or 'none'."
        )
    if wanted == "sum" and not kernel.non_negative and kernel.normalize != "sum":
        raise ValueError(
            "normalize='sum' with a feature map whose scores can be negative: their sum comes "
            "close to zero, or changes sign, and does not train. Use "
            f"{kernel.normalize!r}, which is safe for this map, or a map with non-negative scores."
        )
    return wanted


def head_sizes(
    width: int, num_heads: int, qk_dim: int | None, value_dim: int | None
) -> tuple[int, int]:
    """Fill in head sizes that are None by width / num_heads.

    Raises:
        ValueError: if that is needed and num_heads does not divide width.
    """
    if width % num_heads and None in (qk_dim, value_dim):
        raise ValueError(
            f"width={width}, expected a multiple of num_heads={num_heads}; or give qk_dim and "
            "value_dim."
        )
    size = width // num_heads
    return (size if qk_dim is None else qk_dim), (size if value_dim is None else value_dim)


def attend(
    kernel: Kernel,
    params: dict[str, jax.Array],
    gain: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    normalize: str,
    rule: str = "additive",
    gates: Gates | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    initial_state: ops.State | None = None,
    chunk_size: int = 128,
    implementation=None,
) -> tuple[jax.Array, ops.State | None]:
    """Attention with any kernel; the arguments are those of `ops.causal`.

    One causal token with a state is computed by `ops.decode_step`. Where a mesh of
    `parallel.make_mesh` is current, rows, heads and causal sequences are cut over its devices.

    Args:
        kernel: a feature map or an attention method.
        params: its parameters, `trainable | constant`.
        gain: [Hq, P], multiplies the output of the `rms` normaliser; None otherwise.

    Returns:
        y [B, T, Hq, P] in the dtype of v, and the state, None for an attention method.

    Raises:
        ValueError: if an attention method is given a state, which it has not, a rule that
            depends on the order of tokens is not causal, or the mesh cuts sequences that must be
            whole.
        NotImplementedError: if an attention method cannot keep packed documents apart.
    """
    if isinstance(kernel, AttentionMethod):
        if initial_state is not None:
            raise ValueError("initial_state is given, but this kernel keeps no state.")
        y = method_over_mesh(
            kernel, params, q, k, v, causal=causal, mask=mask, segment_ids=segment_ids
        )
        return y, None
    check_order(rule, causal)
    shared = {"features": kernel, "normalize": normalize, "implementation": implementation}
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "params": params,
        "gates": gates,
        "mask": mask,
        "segment_ids": segment_ids,
        "positions": positions,
        "initial_state": initial_state,
    }
    call_of_shards = None
    if causal and q.shape[1] == 1 and initial_state is not None:
        call = functools.partial(_decode, rule=rule, **shared)
    elif causal:
        options = {"rule": rule, "chunk_size": chunk_size, **shared}
        call = functools.partial(ops.causal, **options)
        call_of_shards = functools.partial(parallel.causal, **options)
    else:
        del arrays["gates"]
        call = functools.partial(ops.bidirectional, chunk_size=chunk_size, **shared)
    y, state = attention_over_mesh(
        call, call_of_shards, {name: x for name, x in arrays.items() if x is not None}
    )
    if gain is not None:
        y = y * gain.astype(y.dtype)
    return y, state


def _decode(
    q,
    k,
    v,
    initial_state,
    gates=None,
    mask=None,
    segment_ids=None,
    positions=None,
    **arguments,
):
    """`ops.decode_step` of arrays with a T axis of length 1."""
    del segment_ids  # of one token
    if positions is not None:
        positions = jnp.broadcast_to(positions, (len(q), 1))
    q, k, v, gates, mask, positions = jax.tree.map(
        lambda x: x[:, 0], (q, k, v, gates, mask, positions)
    )
    y, state = ops.decode_step(
        q, k, v, initial_state, gates=gates, mask=mask, positions=positions, **arguments
    )
    return y[:, None], state


def padding_mask(mask: jax.Array | None, keys: jax.Array) -> jax.Array | None:
    """Turn a mask as Flax hands it over into [B, S]; only padding of the keys has a linear form.

    Args:
        mask: None or [B or 1, 1, 1, S], true or non-zero at real keys.
        keys: [B, S, H, D].

    Raises:
        ValueError: if the mask differs between queries or heads.
    """
    if mask is None:
        return None
    B, S = keys.shape[:2]
    if mask.ndim != 4 or mask.shape[0] not in (1, B) or mask.shape[1:] != (1, 1, S):
        raise ValueError(
            f"mask has shape {mask.shape}, expected {(B, 1, 1, S)}: linear attention can hide keys "
            "from all queries alike, nothing else. Use causal=True in place of a causal mask, and "
            "segment_ids of `LinearAttention` for packed documents."
        )
    return jnp.broadcast_to(mask[:, 0, 0], (B, S)).astype(bool)


def check_flax_call(dropout_rate: float, deterministic: bool, module: Any) -> None:
    """Refuse what Flax's attention layers can ask for and linear attention cannot give.

    Raises:
        ValueError: for dropout of attention weights, or for attention weights to be sown.
    """
    if dropout_rate and not deterministic:
        raise ValueError(
            f"dropout_rate={dropout_rate}: attention weights are never formed, so they cannot be "
            "dropped. Set it to 0 and drop elements of the layer's output instead."
        )
    if module is not None:
        raise ValueError("sow_weights=True, but attention weights are never formed.")
