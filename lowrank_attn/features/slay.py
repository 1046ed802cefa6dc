"""SLAY: anchor and positive random features for the spherical Yat kernel."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_attn.features.base import FeatureMap, Params

_MAX_NODES = 185  # 186 nodes have a subnormal weight, 187 overflow inside laggauss


def unit_rows(x: jax.Array) -> jax.Array:
    """Divide the vectors on the last axis by their Euclidean norm, in float32.

    Rows are scaled by their largest entry before the norm is taken, so no square overflows or
    underflows. Rows whose largest entry is below the smallest normal float32 (about 1e-38) count
    as zero: they give zero, with gradient zero.

    Args:
        x: [..., D].

    Returns:
        [..., D], float32, of norm one or zero.
    """
    x = x.astype(jnp.float32)
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    nonzero = largest >= jnp.finfo(jnp.float32).tiny
    scaled = jnp.where(nonzero, x, 1.0) / jnp.where(nonzero, largest, 1.0)
    norm = jnp.sqrt(jnp.sum(jnp.square(scaled), axis=-1, keepdims=True))
    return jnp.where(nonzero, scaled / norm, 0.0)


def quadrature(num_nodes: int, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Laguerre nodes s and weights w with sum_r w_r exp(2 s_r x) ~ 1 / (C - 2x).

    C = 2 + epsilon; s_r = t_r / C and w_r = alpha_r / C for the Laguerre nodes t and weights alpha.
    The relative error at x is about (z / (2 - z))^(2R) with z = 2x / C, so it is worst at x = 1,
    where R nodes cannot tell an epsilon below about 1 / (1.8 R) from zero.

    Args:
        num_nodes: R, from 1 to 185.
        epsilon: > 0.

    Returns:
        s [R] and w [R], float64.

    Raises:
        ValueError: if an argument is out of range.

    Source: SLAY (arXiv 2602.04915), Gauss-Laguerre discretisation of the Bernstein integral.
    """
    if not 1 <= num_nodes <= _MAX_NODES:
        raise ValueError(
            f"num_nodes={num_nodes}, expected 1..{_MAX_NODES} (Gauss-Laguerre weights overflow in "
            "float64 beyond that); 1 to 3 nodes are usual."
        )
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon}, expected a finite number > 0, such as 1e-3.")
    t, alpha = np.polynomial.laguerre.laggauss(num_nodes)
    C = 2.0 + epsilon
    return t / C, alpha / C


def _directions(key: jax.Array, shape: tuple[int, ...], orthogonal: bool) -> jax.Array:
    """Uniform unit vectors [..., n, D]; blocks of D of them are orthogonal if asked for."""
    if not orthogonal:
        return unit_rows(jax.random.normal(key, shape))
    *lead, n, D = shape
    blocks = -(-n // D)
    q, r = jnp.linalg.qr(jax.random.normal(key, (*lead, blocks, D, D)))
    # With the signs of r's diagonal taken out, q is uniform over the orthogonal matrices.
    q = q * jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)[..., None, :]
    return q.reshape(*lead, blocks * D, D)[..., :n, :]


def slay(
    num_nodes: int = 1,
    num_anchors: int = 16,
    num_random: int = 16,
    epsilon: float = 1e-3,
    scale_anchors: bool = True,
    orthogonal: bool = True,
) -> FeatureMap:
    """Anchor SLAY features for the spherical Yat kernel x^2 / (2 + epsilon - 2x), x = cos(q, k).

    With u = x / |x|, R nodes s_r and weights w_r of `quadrature`, A anchors a_i (unit vectors) and
    F Gaussian vectors omega_rj per node,

        phi(u)[r, i, j] = sqrt(w_r) * c (a_i . u)^2 / sqrt(A)
                          * exp(sqrt(2 s_r) omega_rj . u - s_r) / sqrt(F)

    in the order node, anchor, random feature: M = R A F. All features are >= 0, the length of x
    does not matter, and a zero vector gives zero features. c = sqrt(D (D + 2)) if `scale_anchors`,
    which makes the mean score sum_r w_r (1 + 2 x^2) exp(2 s_r x), about (1 + 2 x^2) / (C - 2x) with
    C = 2 + epsilon: a score is of order one and the sum of scores of order the number of keys.
    Anchors are biased: no number of them turns 1 + 2 x^2 into x^2.

    The draws are constants: one set for each head, no gradient passes into them. Features reach
    about c exp(|omega|), too much for float16; bfloat16 and float32 hold them.

    Defaults. The paper names 2 or 3 nodes with 8 anchors, the authors' code 1 or 2 nodes with 8 to
    64 anchors and 8 to 32 random features, epsilon 1e-3 or 1e-6. The relative variance of one
    random feature is exp(4 s_r (1 + x)) - 1, so each node after the first adds more noise than
    accuracy at these sizes, and anchors count for more than nodes do: one node with 16 x 16
    features has the size of the paper's 2 x 8 x 16, M = 256, and a smaller error: 0.83 against 0.87
    of the output of the exact kernel, for Gaussian rows of D = 64 near a subspace of 8 dimensions,
    where uniform attention has 0.90. On isotropic Gaussian rows of D = 64 neither beats uniform
    attention at this size. With one node, epsilon below about 0.5 changes next to nothing.
    Orthogonal draws keep every expectation and lower the variance.

    Args:
        num_nodes: R, from 1 to 185.
        num_anchors: A >= 1.
        num_random: F >= 1.
        epsilon: > 0, softens the pole of the kernel at x = 1.
        scale_anchors: whether c = sqrt(D (D + 2)); otherwise c = 1, and scores are D (D + 2) times
            smaller, so that the epsilon of a normaliser may shrink the first outputs of a sequence.
        orthogonal: whether anchors and omega come in orthogonal blocks of D (lengths of omega are
            those of Gaussian vectors either way); otherwise all draws are independent.

    Returns:
        A map with constants `anchors` [H, A, D] and `omega` [H, R, F, D], normaliser `sum`.

    Raises:
        ValueError: if a number is out of range.

    Source: SLAY (arXiv 2602.04915), the anchor variant. As in the authors' code the Kronecker
    product of anchor and random features is formed explicitly, with no sketch. We differ in the
    scale c and in orthogonal draws, which `slay_paper` turns off, in drawing anchors for each head
    (the code shares them) and in not clipping the exponent (the clip at 20 is not reached there).
    """
    for name, value in (("num_anchors", num_anchors), ("num_random", num_random)):
        if value < 1:
            raise ValueError(f"{name}={value}, expected at least 1; 8 to 64 is usual.")
    s, w = quadrature(num_nodes, epsilon)
    slope = np.sqrt(2.0 * s).astype(np.float32)
    # sqrt(w_r) goes into the exponent: alone it underflows in float32 from about 50 nodes on.
    offset = (0.5 * np.log(w) - s - 0.5 * math.log(num_anchors * num_random)).astype(np.float32)

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        anchor_key, direction_key, length_key = jax.random.split(key, 3)
        shape = (H, num_nodes, num_random, D)
        length = jnp.linalg.norm(jax.random.normal(length_key, shape), axis=-1, keepdims=True)
        return {}, {
            "anchors": _directions(anchor_key, (H, num_anchors, D), orthogonal),
            "omega": _directions(direction_key, shape, orthogonal) * length,
        }

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del is_query, positions
        T, D = x.shape
        anchors, omega = (jax.lax.stop_gradient(params[name]) for name in ("anchors", "omega"))
        u = unit_rows(x)
        highest = jax.lax.Precision.HIGHEST
        poly = jnp.square(jnp.einsum("td,ad->ta", u, anchors, precision=highest))
        if scale_anchors:
            poly = poly * math.sqrt(D * (D + 2))
        projected = jnp.einsum("td,rfd->trf", u, omega, precision=highest)
        random = jnp.exp(slope[:, None] * projected + offset[:, None])
        phi = poly[:, None, :, None] * random[:, :, None, :]
        return phi.reshape(T, -1).astype(x.dtype)

    return FeatureMap(
        dim=lambda D: num_nodes * num_anchors * num_random,
        init=init,
        apply=apply,
        non_negative=True,
        normalize="sum",
    )


def slay_paper() -> FeatureMap:
    """SLAY as in the paper's table of attention settings: M = 256, for reproduction.

    Two nodes, 8 anchors, 16 random features, epsilon 1e-3, unscaled anchors, independent draws; see
    `slay`. Scores are of order 1 / (D (D + 2)).
    """
    return slay(
        num_nodes=2,
        num_anchors=8,
        num_random=16,
        epsilon=1e-3,
        scale_anchors=False,
        orthogonal=False,
    )
