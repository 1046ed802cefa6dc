"""LLoPS: the learnable low-rank polynomial sketch."""

import functools
import operator

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import FeatureMap, ProductForm


def llops(
    num_factors: int = 4,
    num_features: int = 256,
    *,
    rank: int = 1,
    constants: bool = True,
    tied: bool = True,
    squared: bool = False,
    scale: float | None = None,
    qk_norm: bool = True,
) -> FeatureMap:
    """Learnable sketch of a polynomial kernel: products of p projections, summed over t ranks.

        x_hat  = RMSNorm(x) * gain                    (x itself if not qk_norm)
        phi(x) = M^(-1/2) sum_r lambda_r prod_{j=1..p} (b_jr + (scale / sqrt(D)) x_hat W_jr)

    With `squared`, each sum over r is squared before it is multiplied by M^(-1/2).

    The defaults are the form that trains from scratch: constants b_j, tied parameters, and the
    `rms` normaliser. Its kernel begins as (1 + scale^2 c)^p, c the cosine of q and k, which has a
    linear term from the start. The paper's plain product is `constants=False, tied=False` (named
    `llops_paper`): its kernel begins as c^p, below the noise of the sketch, and training from
    scratch lets the features collapse onto a few columns. The fixed multiplier scale / sqrt(D)
    outside W keeps one Adam step on W small against the factor that it changes.

    Trainable leaves, with G = 1 if tied else 2 (queries first, then keys):

    * `W` [H, G, p, t, D, M], initialised N(0, 1)
    * `b` [H, G, p, t, M], initialised 1; only with constants
    * `lambda` [H, G, t, M], initialised 1 / t with constants, 1 / sqrt(t) without; only for t > 1
    * `gain` [H, 2, D], initialised 1, one for queries and one for keys; only with qk_norm

    lambda_r stands once in each product. The paper's review writes it into all p factors, which
    would make it lambda_r^p.

    Args:
        num_factors: p, 1 to 8, the degree of the polynomial (2p if squared).
        num_features: M.
        rank: t, the number of products that are summed into one feature.
        constants: whether factors carry the learnable constants b_j.
        tied: whether queries and keys share W, b and lambda.
        squared: whether features are squared, which makes all scores non-negative and the plain sum
            a safe normaliser. It doubles the degree and measured worse in training.
        scale: None takes 0.25 if squared, else 1.0 for p <= 2 or without constants, else 0.5.
        qk_norm: whether x is RMS-normalised (epsilon 1e-6) over D first.

    Raises:
        ValueError: if a size is out of its range.

    Source: LLoPS, the theorem after equation 8 (rank t) and the t = 1 form that follows it;
    constants, tying, scale and norms are ours.
    """
    for name, value, most in (
        ("num_factors", num_factors, 8),
        ("num_features", num_features, None),
        ("rank", rank, None),
    ):
        if value < 1 or (most and value > most):
            limits = f"1 to {most}" if most else "at least 1"
            raise ValueError(f"{name}={value}, expected {limits}.")
    p, M, t = num_factors, num_features, rank
    G = 1 if tied else 2
    if scale is None:
        scale = 0.25 if squared else 0.5 if constants and p > 2 else 1.0

    def init(key, D, H):
        params = {"W": jax.random.normal(key, (H, G, p, t, D, M), jnp.float32)}
        if constants:
            params["b"] = jnp.ones((H, G, p, t, M), jnp.float32)
        if t > 1:
            each = 1 / t if constants else t**-0.5
            params["lambda"] = jnp.full((H, G, t, M), each, jnp.float32)
        if qk_norm:
            params["gain"] = jnp.ones((H, 2, D), jnp.float32)
        return params, {}

    def apply(params, x, *, is_query, positions=None):
        side = 0 if tied or is_query else 1
        multiplier = scale * x.shape[-1] ** -0.5
        gain = params["gain"][0 if is_query else 1] if qk_norm else 1.0
        x_hat = _rms_norm(x) if qk_norm else x.astype(jnp.float32)
        x_hat = (x_hat * (gain * multiplier)).astype(x.dtype)

        def factor(j, r):  # two-dimensional products only, so that this runs in a Pallas TPU block
            precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            projected = jax.lax.dot_general(
                x_hat,
                params["W"][side, j, r].astype(x.dtype),
                (((1,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )  # [T, M]
            return projected + params["b"][side, j, r] if constants else projected

        def product(r):
            factors = functools.reduce(operator.mul, [factor(j, r) for j in range(p)])
            return factors * params["lambda"][side, r] if t > 1 else factors

        phi = functools.reduce(operator.add, [product(r) for r in range(t)])
        if squared:
            phi = jnp.square(phi)
        return (M**-0.5 * phi).astype(x.dtype)

    def factors(params, *, is_query):
        side = 0 if tied or is_query else 1
        each = M ** (-0.25 / p if squared else -0.5 / p)  # M^(-1/2), spread over the factors
        W = params["W"][side, :, 0]
        Theta = (each * scale * W.shape[1] ** -0.5) * W
        if qk_norm:
            Theta = Theta * params["gain"][0 if is_query else 1][:, None]
        b = each * params["b"][side, :, 0] if constants else jnp.zeros((p, M), jnp.float32)
        return Theta, b

    return FeatureMap(
        dim=lambda D: M,
        init=init,
        apply=apply,
        non_negative=squared,
        normalize="sum" if squared else "rms",
        product=ProductForm(factors, qk_norm, squared) if t == 1 else None,
    )


def _rms_norm(x: jax.Array) -> jax.Array:
    """Compute x / sqrt(mean(x^2) + 1e-6) over the last axis, in float32, for any finite x.

    Rows are divided by their largest magnitude first (if it is above 1), so that squares cannot
    overflow; the result does not depend on that divisor, which therefore carries no gradient.
    """
    x = x.astype(jnp.float32)
    size = jax.lax.stop_gradient(jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1.0))
    shrink = 1.0 / size
    x = x * shrink
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6 * jnp.square(shrink))
