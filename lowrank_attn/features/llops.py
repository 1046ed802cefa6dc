"""LLoPS: the learnable low-rank polynomial sketch."""

import functools
import math
import operator
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from lowrank_attn.features import llops_embeddings as embeddings
from lowrank_attn.features.base import FeatureMap, ProductForm
from lowrank_attn.features.numerics import rms_norm

Init = Literal["random", "based", "power", "polysketch"]


def llops(
    num_factors: int = 4,
    num_features: int | None = None,
    *,
    init: Init = "random",
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

    * `W` [H, G, p, t, D, M], initialised N(0, 1) by default
    * `b` [H, G, p, t, M], initialised 1 by default; only with constants
    * `lambda` [H, G, t, M], initialised 1 / t with constants, 1 / sqrt(t) without; only for t > 1
    * `gain` [H, 2, D], initialised 1, one for queries and one for keys; only with qk_norm

    Other values of `init` begin with a known map of x_hat (see `llops_embeddings`), exactly:

    * `based`: the Taylor features of BASED, symmetric, or all D^2 + D + 1 of them if num_features
      says so. More features than that need untied parameters: the additional scores are then zero,
      by one factor of the queries, and can grow. Tied ones would have gradient zero. Without
      qk_norm this is the kernel of BASED's models, and the normaliser theirs, `sum`: scores start
      at 1/2 or more, and nothing keeps them positive once the parameters have moved far.
    * `power`: (x_hat w_m)^p, w_m ~ N(0, I / D)
    * `polysketch`: random PolySketchFormer of x_hat / D^(1/4), p = 4, num_features a square

    lambda_r stands once in each product. The paper's review writes it into all p factors, which
    would make it lambda_r^p.

    Args:
        num_factors: p, 1 to 8, the degree of the polynomial (2p if squared).
        num_features: M; None takes 256, or the columns of BASED with that `init`.
        init: what the parameters begin with: `random`, `based`, `power`, `polysketch`.
        rank: t, the number of products that are summed into one feature.
        constants: whether factors carry the learnable constants b_j.
        tied: whether queries and keys share W, b and lambda.
        squared: whether features are squared, which makes all scores non-negative and the plain sum
            a safe normaliser. It doubles the degree and measured worse in training.
        scale: None takes 0.25 if squared, else 1.0 for p <= 2 or without constants, else 0.5.
        qk_norm: whether x is RMS-normalised (epsilon 1e-6) over D first.

    Raises:
        ValueError: if a size is out of its range, or `init` does not fit the other arguments (the
            squared map cannot be BASED: terms that are all >= 0 and sum to (q . k)^2 all vanish
            where q is orthogonal to k, and so everywhere); for `based` from the map's `init` if
            num_features does not fit D.

    Source: LLoPS, the theorem after equation 8 (rank t) and the t = 1 form that follows it;
    constants, tying, scale and norms are ours.
    """
    for name, value, most in (
        ("num_factors", num_factors, 8),
        ("num_features", 1 if num_features is None else num_features, None),
        ("rank", rank, None),
    ):
        if value < 1 or (most and value > most):
            limits = f"1 to {most}" if most else "at least 1"
            raise ValueError(f"{name}={value}, expected {limits}.")
    if num_features is None and init != "based":
        num_features = 256
    _check_init(init, num_factors, num_features, rank, constants, squared)
    p, t = num_factors, rank
    G = 1 if tied else 2
    if scale is None:
        scale = 0.25 if squared else 0.5 if constants and p > 2 else 1.0

    def num_columns(D):
        return embeddings.based_size(D) if num_features is None else num_features

    def each(M):  # M^(-1/2), spread over the factors
        return M ** (-0.25 / p if squared else -0.5 / p)

    def init_params(key, D, H):
        M = num_columns(D)
        if init == "random":
            params = {"W": jax.random.normal(key, (H, G, p, t, D, M), jnp.float32)}
            b = jnp.ones((H, G, p, t, M), jnp.float32)
        else:
            embed = functools.partial(_embed, init=init, p=p, M=M, D=D, G=G)
            Theta, b = jax.vmap(embed)(jax.random.split(key, H))
            params = {"W": Theta[:, :, :, None] * (math.sqrt(D) / (scale * each(M)))}
            b = b[:, :, :, None] / each(M)
        if constants:
            params["b"] = b
        if t > 1:
            first = 1 / t if constants else t**-0.5
            params["lambda"] = jnp.full((H, G, t, M), first, jnp.float32)
        if qk_norm:
            params["gain"] = jnp.ones((H, 2, D), jnp.float32)
        return params, {}

    def apply(params, x, *, is_query, positions=None):
        side = 0 if tied or is_query else 1
        multiplier = scale * x.shape[-1] ** -0.5
        gain = params["gain"][0 if is_query else 1] if qk_norm else 1.0
        x_hat = rms_norm(x) if qk_norm else x.astype(jnp.float32)
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
        return (phi.shape[-1] ** -0.5 * phi).astype(x.dtype)

    def factors(params, *, is_query):
        side = 0 if tied or is_query else 1
        W = params["W"][side, :, 0]
        _, D, M = W.shape
        Theta = (each(M) * scale * D**-0.5) * W
        if qk_norm:
            Theta = Theta * params["gain"][0 if is_query else 1][:, None]
        b = each(M) * params["b"][side, :, 0] if constants else jnp.zeros((p, M), jnp.float32)
        return Theta, b

    return FeatureMap(
        dim=num_columns,
        init=init_params,
        apply=apply,
        non_negative=squared,
        normalize="sum" if squared or (init == "based" and not qk_norm) else "rms",
        product=ProductForm(factors, qk_norm, squared) if t == 1 else None,
    )


def _check_init(init, p, M, rank, constants, squared):
    """Refuse values of `init` that cannot be represented by the other arguments."""
    if init not in get_args(Init):
        raise ValueError(f"init={init!r} is unknown; known: {', '.join(get_args(Init))}.")
    if init == "random":
        return
    if rank != 1:
        raise ValueError(f"rank={rank} with init={init!r}, expected 1: it is a single product.")
    if init == "based" and squared:
        raise ValueError(
            "init='based' with squared=True: non-negative terms cannot sum to (q . k)^2, which is "
            "0 for orthogonal q and k. Use init='based' without squared, whose scores are at least "
            "1/2 at the start, or init='polysketch', where they are squares."
        )
    if init == "based" and (p < 2 or not constants):
        raise ValueError(
            f"init='based' with num_factors={p}, constants={constants}: expected at least 2 and "
            "True, for terms of degree 0, 1 and 2."
        )
    if init == "polysketch" and (p != 4 or math.isqrt(M) ** 2 != M):
        raise ValueError(
            f"init='polysketch' with num_factors={p}, num_features={M}: expected 4 factors and a "
            "square number of features, such as 256."
        )


def _embed(key, *, init, p, M, D, G):
    """Draw Theta [G, p, D, M] and b [G, p, M] of one head for queries and keys."""
    if init == "power":
        product = embeddings.power(D**-0.5 * jax.random.normal(key, (D, M)), p)
    elif init == "polysketch":
        draws = jax.random.normal(key, (2, D, math.isqrt(M)))
        product = embeddings.polysketch(D**-0.25 * draws)
    else:
        full = embeddings.based_size(D, symmetric=False)
        product = embeddings.based(D, p, symmetric=full > M)
        return _with_spare_columns(key, product, M, G)
    return tuple(jnp.broadcast_to(leaf, (G, *leaf.shape)) for leaf in product)


def _with_spare_columns(key, product, M, G):
    """Append columns whose scores are zero and whose gradients are not, up to M.

    Queries and keys are not normalised where this begins from a trained model. So the new factors
    are nearly constant, and the keys' are divided by their number: an optimiser's first steps then
    change a score by no more than the step, where products of p raw projections would drown it.
    """
    p, D, used = product.Theta.shape
    spare = M - used
    if spare < 0 or (spare and G == 1):
        full = embeddings.based_size(D, symmetric=False)
        raise ValueError(
            f"num_features={M} with init='based' and D={D}: expected {embeddings.based_size(D)} "
            f"(None takes it) or {full}, or with tied=False any number from "
            f"{embeddings.based_size(D)} on. A smaller qk_dim needs fewer."
        )
    Theta = 0.1 * D**-0.5 * jax.random.normal(key, (G, p, D, spare))
    b = jnp.ones((G, p, spare))
    if spare:  # the first factor of queries and of keys
        Theta, b = (leaf.at[0, 0].set(0.0).at[1, 0].divide(spare) for leaf in (Theta, b))
    old = (jnp.broadcast_to(leaf, (G, *leaf.shape)) for leaf in product)
    return tuple(jnp.concatenate(both, axis=-1) for both in zip(old, (Theta, b)))
