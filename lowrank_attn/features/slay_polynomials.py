"""Feature maps for the square of a cosine, x^2 = (q . k)^2 with |q| = |k| = 1."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import Params
from lowrank_attn.features.slay_draws import draw_directions

_RIDGE = 1e-3  # of the Nystrom kernel matrix, as in the authors' code


def project(u: jax.Array, vectors: jax.Array) -> jax.Array:
    """The products of rows u [T, D] and vectors [M, D], in full float32: [T, M]."""
    return jnp.dot(u, vectors.T, precision=jax.lax.Precision.HIGHEST)


class Polynomial(NamedTuple):
    """Features g(u) of unit vectors whose products estimate x^2.

    * `anchor`: sqrt(D (D + 2)) (a_i . u)^2 with unit vectors a_i. The mean of the estimate is
      1 + 2 x^2 instead: features without negative products cannot have the mean x^2 unless there
      are D (D + 1) / 2 of them.
    * `exact`: all monomials of degree two, no estimate.
    * `nystrom`: K_uA (K_AA + 1e-3 I)^(-1/2) with K = (. , .)^2 and unit anchors,
      independent ones always.
    * `tensorsketch`: the circular convolution of two count sketches of u; see `tensor_sketch`.
    * `random_maclaurin`: (l_i . u) (r_i . u) with Gaussian l_i and r_i.

    Attributes:
        columns: `columns(D, A)` is the number of features for the size A.
        init: `init(key, D, A, H, orthogonal)` draws the constants; each leads with H.
        apply: `apply(params, u, A)` maps the unit rows [T, D] of one head, in float32.
        averaged: whether every column alone is an estimate, so that their mean is taken.
        non_negative: whether no product of features is negative.
        paper_scale: `paper_scale(D, A)`, the features of the authors' code over these.
    """

    columns: Callable[[int, int], int]
    init: Callable[[jax.Array, int, int, int, bool], Params]
    apply: Callable[[Params, jax.Array, int], jax.Array]
    averaged: bool
    non_negative: bool
    paper_scale: Callable[[int, int], float]


def quadratic(u: jax.Array, rank: int) -> jax.Array:
    """Monomials of degree two within blocks of `rank` columns, [T, D (rank + 1) / 2].

    Column i belongs to block i mod (D / rank), and phi(q) . phi(k) = sum_b (q_b . k_b)^2 exactly:
    every u_i^2 occurs once, and every u_i u_j of one block once, times sqrt(2).

    Args:
        u: [T, D].
        rank: a divisor of D; with `rank` D the products are (q . k)^2.
    """
    D = u.shape[1]
    blocks = D // rank
    parts = [u * u]
    for shift in range(1, rank // 2 + 1):
        partner = jnp.roll(u, -shift * blocks, axis=1)
        pairs = math.sqrt(2.0) * u * partner
        # Half way around each block, the second half repeats the pairs of the first.
        parts.append(pairs[:, : D // 2] if 2 * shift == rank else pairs)
    return jnp.concatenate(parts, axis=1)


def spectrum(buckets: jax.Array, signs: jax.Array, size: int) -> jax.Array:
    """The discrete Fourier transform of a count sketch, as a matrix.

    Args:
        buckets: [..., N], integers below `size`: where each input goes.
        signs: [..., N], +1 or -1.
        size: of the sketch.

    Returns:
        [..., 2, size // 2 + 1, N], float32: cosine and sine at frequencies 0 to size / 2.
    """
    frequency = jnp.arange(size // 2 + 1)[:, None]
    angle = 2 * math.pi / size * (frequency * buckets[..., None, :] % size)
    waves = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-3)
    return waves * signs[..., None, None, :].astype(jnp.float32)


def draw_sketch(key: jax.Array, inputs: int, size: int, H: int) -> jax.Array:
    """Draw `spectrum` of H count sketches: [H, 2, size // 2 + 1, inputs]."""
    bucket_key, sign_key = jax.random.split(key)
    buckets = jax.random.randint(bucket_key, (H, inputs), 0, size)
    return spectrum(buckets, jax.random.rademacher(sign_key, (H, inputs)), size)


def tensor_sketch(
    x: jax.Array, y: jax.Array, of_x: jax.Array, of_y: jax.Array, size: int
) -> jax.Array:
    """A sketch of the outer product of x [T, N] and y [T, L]: [T, size].

    The circular convolution of their count sketches, whose products have the mean
    (x . x') (y . y'). It is left in the real Fourier basis, which is orthonormal: products are the
    same as after the inverse transform.

    Args:
        x: [T, N], y: [T, L].
        of_x: `spectrum` of the sketch of x, of_y: of y.
        size: of both.
    """
    x_cos, x_sin = (project(x, waves) for waves in of_x)
    y_cos, y_sin = (project(y, waves) for waves in of_y)
    scale = math.sqrt(2.0 / size)
    inner = slice(1, (size + 1) // 2)
    real = scale * (x_cos * y_cos - x_sin * y_sin)
    imaginary = scale * (x_cos * y_sin + x_sin * y_cos)
    ends = [real[:, :1] / math.sqrt(2.0)]
    if size % 2 == 0:
        ends.append(real[:, -1:] / math.sqrt(2.0))
    return jnp.concatenate([*ends, real[:, inner], imaginary[:, inner]], axis=1)


def _anchors(key: jax.Array, D: int, A: int, H: int, orthogonal: bool) -> Params:
    return {"anchors": draw_directions(key, (H, A, D), orthogonal)}


def _anchor_features(params: Params, u: jax.Array, A: int) -> jax.Array:
    D = u.shape[1]
    return math.sqrt(D * (D + 2)) * jnp.square(project(u, params["anchors"]))


def whiten(anchors: jax.Array) -> jax.Array:
    """(K_AA + 1e-3 I)^(-1/2) of the squares K of products of anchors [H, A, D]: [H, A, A]."""
    gram = jnp.einsum("had,hbd->hab", anchors, anchors, precision=jax.lax.Precision.HIGHEST)
    values, vectors = jnp.linalg.eigh(jnp.square(gram))
    root = jnp.sqrt(jnp.maximum(values, 0.0) + _RIDGE)
    return jnp.einsum(
        "hai,hi,hbi->hab", vectors, 1.0 / root, vectors, precision=jax.lax.Precision.HIGHEST
    )


def _nystrom(key: jax.Array, D: int, A: int, H: int, orthogonal: bool) -> Params:
    del orthogonal  # K of orthogonal anchors is the identity: nothing to invert, mere anchors
    anchors = draw_directions(key, (H, A, D), False)
    return {"anchors": anchors, "whitening": whiten(anchors)}


def _nystrom_features(params: Params, u: jax.Array, A: int) -> jax.Array:
    return project(jnp.square(project(u, params["anchors"])), params["whitening"])


def _maclaurin(key: jax.Array, D: int, A: int, H: int, orthogonal: bool) -> Params:
    del orthogonal
    left, right = jax.random.normal(key, (2, H, A, D))
    return {"left": left, "right": right}


def _maclaurin_features(params: Params, u: jax.Array, A: int) -> jax.Array:
    return project(u, params["left"]) * project(u, params["right"])


def _tensor_sketches(key: jax.Array, D: int, A: int, H: int, orthogonal: bool) -> Params:
    del orthogonal
    one, two = jax.random.split(key)
    return {"sketch_1": draw_sketch(one, D, A, H), "sketch_2": draw_sketch(two, D, A, H)}


def _tensor_sketch_features(params: Params, u: jax.Array, A: int) -> jax.Array:
    return tensor_sketch(u, u, params["sketch_1"], params["sketch_2"], A)


POLYNOMIALS = {
    "anchor": Polynomial(
        columns=lambda D, A: A,
        init=_anchors,
        apply=_anchor_features,
        averaged=True,
        non_negative=True,
        paper_scale=lambda D, A: (D * (D + 2)) ** -0.5,
    ),
    "exact": Polynomial(
        columns=lambda D, A: D * (D + 1) // 2,
        init=lambda key, D, A, H, orthogonal: {},
        apply=lambda params, u, A: quadratic(u, u.shape[1]),
        averaged=False,
        non_negative=True,
        paper_scale=lambda D, A: 1.0,
    ),
    "nystrom": Polynomial(
        columns=lambda D, A: A,
        init=_nystrom,
        apply=_nystrom_features,
        averaged=False,
        non_negative=False,
        paper_scale=lambda D, A: A**-0.5,
    ),
    "tensorsketch": Polynomial(
        columns=lambda D, A: A,
        init=_tensor_sketches,
        apply=_tensor_sketch_features,
        averaged=False,
        non_negative=False,
        paper_scale=lambda D, A: A**-0.5,
    ),
    "random_maclaurin": Polynomial(
        columns=lambda D, A: A,
        init=_maclaurin,
        apply=_maclaurin_features,
        averaged=True,
        non_negative=False,
        paper_scale=lambda D, A: 1.0 / D,
    ),
}
