"""Attention operations by hand-written kernels for Hopper GPUs (Pallas Mosaic GPU).

The rules are the additive one and the scalar decay. Features that are products of projections
(`FeatureMap.product`) are computed by a kernel, others by XLA beforehand; both are materialised, in
bfloat16. A decoding step is that of `xla`, whose fusion passes over the state once.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_attn.ops.arguments import Arguments, Method, State
from lowrank_attn.ops.manual_axes import vary, varying_axes
from lowrank_attn.ops.normalize import apply_normalizer, needs_denominator
from lowrank_attn.ops.pallas_gpu_attention import Settings, attend, map_and_attend
from lowrank_attn.ops.pallas_gpu_base import pad_to
from lowrank_attn.ops.pallas_gpu_bidirectional import map_sum_and_read, sum_and_read
from lowrank_attn.ops.pallas_gpu_features import Form
from lowrank_attn.ops.pallas_gpu_scan import Denominator, feature_parts
from lowrank_attn.ops.rules.additive import additive
from lowrank_attn.ops.rules.decay import decay
from lowrank_attn.ops.xla import decode_step as decode_step

MAX_FACTORS = 6
MAX_FEATURES = 512
MAX_HEAD_SIZE = 128
LOG_OF_NOTHING = -105.0  # exp of it is 0 in float32


def unsuited(args: Arguments) -> str | None:
    """Why the kernels are not made for these arrays, or None if they are.

    Traced arrays have no device yet: of them only GPUs that are no Hopper are refused.
    """
    if not hasattr(plgpu, "InterpretGPUParams"):
        return f"it needs jax >= 0.11, found {jax.__version__}"
    for name in ("q", "k", "v"):
        dtype = getattr(args, name).dtype
        if dtype != jnp.bfloat16:
            return f"{name} has dtype {dtype}, expected bfloat16; `xla` takes every dtype"
    x = args.q
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    device = next(iter(x.devices())) if concrete else jax.devices()[0]
    if device.platform != "gpu":
        return (
            f"it needs a Hopper GPU, q is on a {device.platform}; use `xla`" if concrete else None
        )
    capability = getattr(device, "compute_capability", "unknown")
    if capability != "9.0":
        return f"it needs a GPU of compute capability 9.0 (Hopper), found {capability}; use `xla`"
    return None


def unsupported(op: str, args: Arguments, method: Method) -> str | None:
    """Why the kernels cannot do a call and what would work, or None if they can."""
    if op == "decode_step":
        return None
    if method.rule not in (additive, decay):
        return "it has only the rules additive and decay; `xla` has all rules"
    if op == "bidirectional" and args.reset is not None:
        return "it has no segment_ids; use `xla`, or one document per row"
    M, P = args.state.S.shape[2:]
    if M > MAX_FEATURES:
        return f"the map has {M} features, expected at most {MAX_FEATURES}; use `xla`"
    if P > MAX_HEAD_SIZE:
        return f"v has last axis {P}, expected at most {MAX_HEAD_SIZE}; use `xla`"
    return unsuited(args)


def _check(op, args, method, interpret):
    reason = unsupported(op, args, method)
    if reason is not None and interpret is None:
        raise NotImplementedError(reason)


def causal(args: Arguments, method: Method, interpret=None) -> tuple[jax.Array, State]:
    """Features, scan and normaliser; see `ops.causal`.

    `interpret` runs the kernels on a CPU, see `pallas_gpu_base.launch`.

    Raises:
        NotImplementedError: with the reason, if the kernels cannot do the call.
    """
    _check("causal", args, method, interpret)
    args = vary(args, varying_axes(args))
    denominator = None
    if needs_denominator(method.normalize):
        offset = 1.0 if method.normalize == "sum_plus_one" else 0.0
        denominator = Denominator(offset, method.epsilon)
    settings = Settings(denominator, method.rule is decay, interpret)
    T, (M, P) = args.q.shape[1], args.state.S.shape[2:]
    log_decay = _log_decay(args)
    if log_decay is not None:
        log_decay = pad_to(log_decay, 1, _up(T, 8))
    args = _pad_tokens(args, _up(T, 8))
    M_padded, P_padded = _up(M, 64 * feature_parts(M)), _up(P, 64)
    S = pad_to(pad_to(args.state.S, 2, M_padded), 3, P_padded)
    z = None if args.state.z is None else pad_to(args.state.z, 2, M_padded)
    if _fused(args, method):
        y, S, z = _fused_map(args, method, S, z, log_decay, settings)
    else:
        phi_q, phi_k, v = method._replace(normalize="none").map(args)
        phi_q, phi_k = pad_to(phi_q, 3, M_padded), pad_to(phi_k, 3, M_padded)
        y, S, z = attend(phi_q, phi_k, pad_to(v, 3, P_padded), S, z, log_decay, settings)
    y = y[:, :T, :, :P]
    if denominator is None:
        y = apply_normalizer(y, None, method.normalize, method.epsilon)
    return y.astype(args.v.dtype), State(S[:, :, :M, :P], None if z is None else z[:, :, :M])


def _log_decay(args):
    """[B, T, H] float32, or None: decays and resets, which are decays to nothing."""
    log_decay = args.gates.get("log_decay")
    if log_decay is None and args.reset is None:
        return None
    if log_decay is None:
        log_decay = jnp.zeros(args.k.shape[:3], jnp.float32)
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), LOG_OF_NOTHING)
    if args.reset is None:
        return log_decay
    return jnp.where(args.reset[:, :, None], LOG_OF_NOTHING, log_decay)


def _pad_tokens(args, T):
    """Add masked tokens up to T, which tensor maps take in multiples of 8."""
    if args.q.shape[1] == T:
        return args
    if args.mask is None:
        args = args._replace(mask=jnp.ones(args.k.shape[:2], bool))
    return _pad_sides(args)


def bidirectional(args: Arguments, method: Method, interpret=None) -> tuple[jax.Array, State]:
    """Features, their sum and what queries read; see `ops.bidirectional`.

    Raises:
        NotImplementedError: with the reason, if the kernels cannot do the call.
    """
    _check("bidirectional", args, method, interpret)
    args = vary(args, varying_axes(args))
    T, M = args.q.shape[1], args.state.S.shape[2]
    v = method.with_ones(args.v)  # before padding: values of 0 hide the features of padded keys
    P = v.shape[3]
    args = _pad_sides(args)
    v = pad_to(pad_to(v, 1, args.k.shape[1]), 3, _up(P, 64))
    S = pad_to(method.join(args.state), 2, _up(M, 64 * feature_parts(M)))
    S = pad_to(S, 3, v.shape[3])
    if _fused(args, method):
        if args.mask is not None:  # the features of keys of 0 are finite, so values of 0 hide them
            real = args.mask[:, :, None, None]
            v, args = jnp.where(real, v, 0), args._replace(k=jnp.where(real, args.k, 0))
        q, k, Theta, b, form = _fused_arguments(args, method, S.shape[2])
        y, S = map_sum_and_read(q, k, v, Theta, b, S, form, interpret)
    else:
        phi_q, phi_k, _ = method.map(args)
        phi_q, phi_k = (pad_to(x, 3, S.shape[2]) for x in (phi_q, phi_k))
        y, S = sum_and_read(phi_q, phi_k, v, S, interpret)
    y, S = y[:, :T, :, :P], S[:, :, :M, :P]
    return method.finish(y, args.v.dtype), method.split(S)


def _pad_sides(args):
    """Add queries and keys of zeros up to multiples of 8; keys are masked if there is a mask."""
    T, S = (_up(x.shape[1], 8) for x in (args.q, args.k))
    k, v = (pad_to(x, 1, S) for x in (args.k, args.v))
    return args._replace(
        q=pad_to(args.q, 1, T),
        k=k,
        v=v,
        mask=None if args.mask is None else pad_to(args.mask, 1, S),
        q_positions=pad_to(args.q_positions, -1, T),
        k_positions=pad_to(args.k_positions, -1, S),
    )


def _fused(args, method):
    """Whether a kernel computes the features."""
    product = getattr(method.features, "product", None)
    if product is None or args.q.shape[-1] > MAX_HEAD_SIZE:
        return False
    Theta, _ = jax.eval_shape(lambda params: _factors(product, params, True), args.params)
    return Theta.shape[1] <= MAX_FACTORS


def _factors(product, params, is_query):
    return jax.vmap(lambda params: product.factors(params, is_query=is_query))(params)


def _fused_map(args, method, S, z, log_decay, settings):
    """Map and attend; a mask enters as zeros of v, or, if these count in a sum, of phi(k)."""
    q, k, Theta, b, form = _fused_arguments(args, method, S.shape[2])
    v, mask = args.v, args.mask
    if mask is not None and z is None:
        v, mask = jnp.where(mask[:, :, None, None], v, 0), None
    v = pad_to(v, 3, S.shape[3])
    return map_and_attend(q, k, v, Theta, b, S, z, log_decay, mask, form, settings)


def _fused_arguments(args, method, M_padded):
    product = method.features.product
    D = args.q.shape[-1]
    D_padded = _up(D, 64)
    sides = [_factors(product, args.params, is_query) for is_query in (True, False)]
    Theta, b = (jnp.stack(x).astype(jnp.float32) for x in zip(*sides, strict=True))
    Theta, b = pad_to(pad_to(Theta, 3, D_padded), 4, M_padded), pad_to(b, 3, M_padded)
    q, k = pad_to(args.q, 3, D_padded), pad_to(args.k, 3, D_padded)
    return q, k, Theta, b, Form(D if product.normalized else 0, product.squared)


def _up(n, multiple):
    return -(-n // multiple) * multiple
