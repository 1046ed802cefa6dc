"""Exact attention at quadratic cost: softmax, polynomial and Yat kernels.

Every method is an `AttentionMethod` without parameters; `layers.visibility` says which keys a query
sees.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from lowrank_attn.features.unit_rows import unit_rows
from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.visibility import grouped_scores, precision_for, visible_keys
from lowrank_attn.ops.normalize import apply_normalizer, needs_denominator


def _init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
    del key, D, H
    return {}, {}


def _scored(
    score: Callable[[jax.Array, jax.Array], jax.Array], normalize: str, delta: float
) -> AttentionMethod:
    """Attention by a score of q [B, T, H, G, D] and k [B, S, H, D]: [B, H, G, T, S], float32."""
    with_denominator = needs_denominator(normalize)
    if delta <= 0:
        raise ValueError(f"delta={delta}, expected a number > 0, such as 1e-6.")

    def apply(
        params: Params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        del params
        B, T, Hq, D = q.shape
        H = k.shape[2]
        visible = visible_keys(T, causal, mask, segment_ids)
        scores = score(q.reshape(B, T, H, Hq // H, D), k)
        scores = jnp.where(visible[:, None, None], scores, 0.0)
        numerator = jnp.einsum(
            "bhgts,bshp->bthgp",
            scores,
            v.astype(jnp.float32),
            precision=precision_for(q, k, v),
        )
        denominator = jnp.einsum("bhgts->bthg", scores) if with_denominator else None
        y = apply_normalizer(numerator, denominator, normalize, delta)
        return y.reshape(B, T, Hq, -1).astype(v.dtype)

    return AttentionMethod(init=_init, apply=apply)


@functools.cache
def _has_ampere() -> bool:
    """Whether this process has an NVIDIA GPU for which jax can trace its fused attention."""
    try:
        device, *_ = jax.devices("cuda")
    except RuntimeError:
        return False
    return float(device.compute_capability) >= 8.0


def softmax(implementation: Literal["xla", "cudnn"] | None = None) -> AttentionMethod:
    """Softmax attention: softmax over the visible keys of q . k / sqrt(D), times v.

    Computed by `jax.nn.dot_product_attention`, with scores and the softmax in float32, float32
    matrix products at the highest precision, and others at that function's own (probabilities are
    rounded to the dtype of the inputs). The value size P may differ from D.

    Args:
        implementation: as in `jax.nn.dot_product_attention`: "xla" holds all T x S scores, "cudnn"
            is the fused kernel of NVIDIA GPUs. It needs bfloat16 or float16 and max(D, P) a
            multiple of 8 up to 128 (256 from Hopper on), and for gradients with `mask` or
            `segment_ids` also even T and S, for which it reads a T x S array. Where it cannot run,
            jax raises an error that says why. None takes "cudnn" on NVIDIA GPUs from Ampere on,
            without `mask` and `segment_ids`, for the dtypes and sizes up to 128 above, and "xla"
            elsewhere. It cannot shard T or S: name "xla" for that.

    Source: Vaswani et al., Attention Is All You Need (arXiv 1706.03762), equation 1.
    """

    def apply(
        params: Params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        del params
        T, S, D, P = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
        dtype = jnp.result_type(q, k, v)
        # The function wants D = P. Zeros appended to either change no score and no output.
        q_padded, k_padded, v_padded = (
            jnp.pad(x.astype(dtype), ((0, 0),) * 3 + ((0, max(D, P) - x.shape[-1]),))
            for x in (q, k, v)
        )
        visible = None
        if mask is not None or segment_ids is not None:
            visible = visible_keys(T, causal, mask, segment_ids)
            visible = jnp.broadcast_to(visible, (q.shape[0], T, S))
        is_float32 = dtype == jnp.float32

        def attention(implementation, q, k, v):
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                mask=None if visible is None else visible[:, None],
                scale=D**-0.5,
                is_causal=causal,
                implementation=implementation,
            )

        xla = functools.partial(attention, "xla")
        fits = dtype in (jnp.bfloat16, jnp.float16) and max(D, P) <= 128 and max(D, P) % 8 == 0
        with jax.default_matmul_precision("highest") if is_float32 else contextlib.nullcontext():
            if implementation is not None:
                y = attention(implementation, q_padded, k_padded, v_padded)
            elif visible is None and fits and _has_ampere():
                cudnn = functools.partial(attention, "cudnn")
                y = jax.lax.platform_dependent(
                    q_padded, k_padded, v_padded, cuda=cudnn, default=xla
                )
            else:
                y = xla(q_padded, k_padded, v_padded)
        y = y[..., :P].astype(v.dtype)
        if visible is None:
            return y
        # Without a visible key the function averages all values, which has a finite gradient.
        return jnp.where(jnp.any(visible, axis=-1)[:, :, None, None], y, 0)

    return AttentionMethod(init=_init, apply=apply)


def poly(degree: int = 2, normalize: str = "rms", delta: float = 1e-6) -> AttentionMethod:
    """Polynomial attention with scores (q . k)^degree, in float32.

    The default normaliser is `rms`: odd degrees have signed scores, whose sum can be zero, and even
    degrees have scores that all vanish where q is orthogonal to the keys. Even degrees may be given
    `sum`.

    Args:
        degree: integer >= 1.
        normalize: a normaliser of `lowrank_attn.ops.normalize`.
        delta: its epsilon, > 0.

    Raises:
        ValueError: if an argument is out of range.

    Source: the kernel that LLoPS and PolySketchFormer (arXiv 2310.01655) approximate; LLoPS has no
    denominator, that is `none`.
    """
    if degree < 1:
        raise ValueError(f"degree={degree}, expected an integer >= 1, such as 2.")
    return _scored(lambda q, k: grouped_scores(q, k) ** degree, normalize, delta)


def _check_epsilon(epsilon: float) -> None:
    if epsilon <= 0:
        raise ValueError(f"epsilon={epsilon}, expected a number > 0, such as 1e-3.")


def yat(epsilon: float = 1e-3, normalize: str = "sum", delta: float = 1e-6) -> AttentionMethod:
    """Yat attention with scores (q . k)^2 / (|q - k|^2 + epsilon) of raw q and k, in float32.

    |q - k|^2 is taken as |q|^2 + |k|^2 - 2 q . k, not below 0: where q ~ k it is off by about 1e-7
    times |q|^2. Scores are non-negative, so the plain `sum` is a safe normaliser.

    Args:
        epsilon: > 0.
        normalize: a normaliser of `lowrank_attn.ops.normalize`.
        delta: its epsilon, > 0.

    Raises:
        ValueError: if an argument is out of range.

    Source: SLAY (arXiv 2602.04915), the Yat kernel. The authors' code applies a softmax to these
    scores; we normalise them as a kernel.
    """
    _check_epsilon(epsilon)

    def score(q: jax.Array, k: jax.Array) -> jax.Array:
        dot = grouped_scores(q, k)
        q_square = jnp.einsum("bthg->bhgt", jnp.sum(jnp.square(q.astype(jnp.float32)), axis=-1))
        k_square = jnp.einsum("bsh->bhs", jnp.sum(jnp.square(k.astype(jnp.float32)), axis=-1))
        distance = q_square[..., None] + k_square[:, :, None, None, :] - 2.0 * dot
        return jnp.square(dot) / (jnp.maximum(distance, 0.0) + epsilon)

    return _scored(score, normalize, delta)


def yat_spherical(
    epsilon: float = 1e-3, normalize: str = "sum", delta: float = 1e-6
) -> AttentionMethod:
    """Spherical Yat attention with scores x^2 / (2 + epsilon - 2x), x the cosine of q and k.

    q and k are normalised in float32 and x is clamped to [-1, 1], so that the scores stay in
    [0, 1 / epsilon] for bfloat16 inputs too; at x = 1 their relative error is about 1e-7 / epsilon.
    A zero vector has cosine 0 with all others. Scores are non-negative, so the plain `sum` is a
    safe normaliser.

    Args:
        epsilon: > 0.
        normalize: a normaliser of `lowrank_attn.ops.normalize`.
        delta: its epsilon, > 0.

    Raises:
        ValueError: if an argument is out of range.

    Source: SLAY (arXiv 2602.04915), the spherical Yat kernel, which `features.slay` approximates.
    """
    _check_epsilon(epsilon)

    def score(q: jax.Array, k: jax.Array) -> jax.Array:
        x = jnp.clip(grouped_scores(unit_rows(q), unit_rows(k)), -1.0, 1.0)
        return jnp.square(x) / (2.0 + epsilon - 2.0 * x)

    return _scored(score, normalize, delta)
