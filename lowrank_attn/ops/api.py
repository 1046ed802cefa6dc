"""The public operations: they check the arguments and hand them to an implementation."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lowrank_attn.ops.arguments import Arguments, Method, State
from lowrank_attn.ops.checks import check_gates, check_qkv, check_state, check_tokens
from lowrank_attn.ops.dispatch import dispatch
from lowrank_attn.ops.manual_axes import vary, varying_axes
from lowrank_attn.ops.normalize import needs_denominator
from lowrank_attn.ops.rules import RULES, Rule


def causal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    features=None,
    params=None,
    rule: str | Rule = "additive",
    gates=None,
    normalize: str = "none",
    epsilon: float = 1e-6,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    initial_state: State | None = None,
    chunk_size: int = 128,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, State]:
    """Causal linear attention: y_t reads the state of tokens 1..t, in time linear in T.

        S_t, z_t = rule(S_{t-1}, phi(k_t), v_t), rule(z_{t-1}, phi(k_t), 1)
        y_t = normalize(phi(q_t)^T S_t, phi(q_t)^T z_t)

    Args:
        q: [B, T, Hq, D], floating. Hq is a multiple of H: consecutive groups of Hq / H query heads
            share one key/value head.
        k: [B, T, H, D].
        v: [B, T, H, P]; y has its dtype.
        features: a `FeatureMap`, or any `features(params, x, is_query=..., positions=...)` from
            [B, T, Hx, D] to [B, T, Hx, M], row by row; None: q and k are features already. Given
            here, features are mapped chunk by chunk and never stored for the whole sequence.
        params: the parameters of `features`, `trainable | constant`.
        rule: name in `RULES` or a `Rule`.
        gates: the rule's gates, name -> [B, T, H], or [B, T, H, M] where it has one per feature;
            decays are log-space, <= 0.
        normalize: `none`, `sum`, `sum_plus_one` or `rms`; see `ops.normalize`. A plain `sum` of
            signed scores comes close to zero and does not train. The delta rules take no sums.
        epsilon: the normaliser's epsilon.
        mask: [B, T] bool, true at real tokens. Applied to phi(k), after the map; gates of padding
            are set to 0, so it leaves the state alone. Outputs at padding are meaningless.
        segment_ids: [B, T] int. A new document begins wherever the id changes: nothing before
            reaches anything after. `initial_state` belongs to the document of the first token; pass
            None where a new document begins there.
        positions: [T] or [B, T] int, handed to `features`; None: 0..T-1.
        initial_state: what an earlier call returned; None: zeros.
        chunk_size: tokens that are processed together by `xla`, at most the rule's `most_tokens`;
            the kernels have sizes of their own for each chip, which `pallas_tpu` lowers for a
            chunk_size below 128.
        implementation: `xla`, `pallas_tpu`, `pallas_gpu` (Hopper GPUs), `reference`, or a sequence
            of names, of which the first that supports the call is used, with a warning for each one
            that does not; None: the kernels of the platform that the call is lowered for, else
            `xla` (which alone has forward-mode derivatives). To compile ahead of time for a
            platform that this process has not, name its implementation.

    Returns:
        y [B, T, Hq, P] in the dtype of v, and the `State` after the last token, in float32.

    Raises:
        ValueError: for arguments that do not fit together; the message names the argument.
        NotImplementedError: if the one named implementation cannot do this call.
    """
    args, method = prepare(
        q, k, v, features, params, rule, gates, normalize, epsilon, mask, segment_ids, positions,
        initial_state, chunk_size,
    )  # fmt: skip
    check_tokens("k", k, q.shape[1])
    return dispatch("causal", args, method, implementation)


def bidirectional(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    features=None,
    params=None,
    normalize: str = "none",
    epsilon: float = 1e-6,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    initial_state: State | None = None,
    chunk_size: int = 128,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, State]:
    """Linear attention in which every query reads all keys, for encoders and cross attention.

        S, z = sum_s phi(k_s) v_s^T, sum_s phi(k_s)
        y_t = normalize(phi(q_t)^T S, phi(q_t)^T z)

    The arguments are those of `causal`, except that k and v may have another length S than q when
    there are neither `segment_ids` nor `positions` (keys are then at positions 0..S-1), that `mask`
    is [B, S], and that there is no rule: without an order of tokens only sums make sense.
    `initial_state` adds tokens seen before; with `segment_ids` it belongs to the first document.

    Returns:
        y [B, T, Hq, P] in the dtype of v, and the `State` of all keys (with `segment_ids`: of the
        last document), in float32.

    Raises:
        ValueError: for arguments that do not fit together; the message names the argument.
        NotImplementedError: if the one named implementation cannot do this call.
    """
    if segment_ids is not None:
        check_tokens("k", k, q.shape[1], "with segment_ids, queries and keys are the same tokens")
    if positions is not None:
        check_tokens("k", k, q.shape[1], "with positions, queries and keys are the same tokens")
    args, method = prepare(
        q, k, v, features, params, "additive", None, normalize, epsilon, mask, segment_ids,
        positions, initial_state, chunk_size,
    )  # fmt: skip
    return dispatch("bidirectional", args, method, implementation)


def decode_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    state: State,
    *,
    features=None,
    params=None,
    rule: str | Rule = "additive",
    gates=None,
    normalize: str = "none",
    epsilon: float = 1e-6,
    mask: jax.Array | None = None,
    positions: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, State]:
    """One token of `causal`, for generation: the same result as a call with T = 1.

    Args:
        q: [B, Hq, D], k: [B, H, D], v: [B, H, P]: one token, without the T axis.
        state: the state so far; see `initial_state`.
        gates: name -> [B, H] or [B, H, M].
        mask: [B] bool, false for rows whose state must stay as it is.
        positions: [B] int; needed by maps that depend on positions.

    The other arguments are those of `causal`.

    Returns:
        y [B, Hq, P] in the dtype of v, and the next `State`.

    Raises:
        ValueError: for arguments that do not fit together; the message names the argument.
        NotImplementedError: if the one named implementation cannot do this call.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(f"{name} has shape {x.shape}, expected three axes [B, H, size].")

    def with_token_axis(x):
        return None if x is None else jnp.expand_dims(jnp.asarray(x), 1)

    q, k, v = (with_token_axis(x) for x in (q, k, v))
    args, method = prepare(
        q, k, v, features, params, rule, jax.tree.map(with_token_axis, gates), normalize, epsilon,
        with_token_axis(mask), None, with_token_axis(positions), state, 1,
    )  # fmt: skip
    y, state = dispatch("decode_step", args, method, implementation)
    return y[:, 0], state


def prepare(
    q, k, v, features, params, rule, gates, normalize, epsilon, mask, segment_ids, positions,
    state, chunk_size,
):  # fmt: skip
    """Check everything and bring it into the form that implementations take."""
    needs_denominator(normalize)
    check_qkv(q, k, v, mapped=features is None)
    B, T = q.shape[:2]
    S, H, P = v.shape[1:]
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"rule={rule!r} is unknown; known: {', '.join(RULES)}.")
        rule = RULES[rule]
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}, expected at least 1.")
    if rule.most_tokens is not None:
        chunk_size = min(chunk_size, rule.most_tokens)
    if needs_denominator(normalize) and not rule.sums:
        raise ValueError(
            f"normalize={normalize!r}, but this rule corrects what it has written, so values are "
            "weighted with both signs and the sum of the weights is no normaliser; use 'rms' or "
            "'none'."
        )
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.shape != (B, S) or mask.dtype != jnp.bool_:
            raise ValueError(
                f"mask has shape {mask.shape} and dtype {mask.dtype}, expected a padding mask of "
                f"shape {(B, S)} and dtype bool. Other masks have no linear form: use `causal`, or "
                "segment_ids for packed documents."
            )
    reset = None
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
        if segment_ids.shape != (B, T) or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise ValueError(
                f"segment_ids has shape {segment_ids.shape} and dtype {segment_ids.dtype}, "
                f"expected integers of shape {(B, T)}."
            )
        changes = segment_ids[:, 1:] != segment_ids[:, :-1]
        reset = jnp.concatenate([jnp.zeros((B, 1), bool), changes], axis=1)
    if positions is None:
        q_positions = jnp.arange(T, dtype=jnp.int32)
        k_positions = jnp.arange(S, dtype=jnp.int32)
    else:
        q_positions = k_positions = jnp.asarray(positions)
        if q_positions.shape not in ((T,), (B, T)):
            raise ValueError(
                f"positions has shape {q_positions.shape}, expected {(T,)} or {(B, T)}."
            )
    if features is None:
        features = _identity
    params = {} if params is None else dict(params)
    M = jax.eval_shape(
        functools.partial(features, is_query=False), params, k, positions=k_positions
    ).shape[-1]
    state = check_state(state, (B, H, M, P), needs_denominator(normalize))
    gates = check_gates(gates, rule, (B, T, H, M))
    if mask is not None:
        gates = {n: jnp.where(mask.reshape(B, S, *[1] * (g.ndim - 2)), g, 0)
                 for n, g in gates.items()}  # fmt: skip
    args = Arguments(q, k, v, params, gates, mask, reset, q_positions, k_positions, state)
    args = args._replace(state=vary(state, varying_axes(args)))
    return args, Method(features, rule, normalize, epsilon, chunk_size)


def _identity(params, x, *, is_query, positions):
    return x
