"""PolySketchFormer: sketches of a polynomial kernel with non-negative scores."""

import math

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import FeatureMap, Params
from lowrank_attn.features.numerics import layer_norm, project


def normalized_rows(params: Params, x: jax.Array) -> jax.Array:
    """LayerNorm of the rows x [..., D] of one head, times D^(-1/4); x itself without parameters.

    Scores of such rows are polynomials of q . k / sqrt(D), which is of order one.
    """
    if "gain" not in params:
        return x.astype(jnp.float32)
    D = x.shape[-1]
    return D**-0.25 * (layer_norm(x) * params["gain"] + params["b"])


def random_sketch(params: Params, x: jax.Array) -> jax.Array:
    """The sketch S(x) [T, r] of degree p / 2 of the rows x [T, D] of one head, float32."""
    dtype = x.dtype
    rows = normalized_rows(params, x)
    level = 1
    sketches = None
    while f"G{level}" in params:
        G = jax.lax.stop_gradient(params[f"G{level}"])  # [n, D or r, r], n halved by each level
        each = jax.vmap(lambda s, g: project(s, g, dtype), (None if sketches is None else 0, 0))
        projected = each(rows if sketches is None else sketches, G)
        sketches = G.shape[-1] ** -0.5 * projected[0::2] * projected[1::2]
        level += 1
    assert sketches is not None
    return sketches[0]


def self_tensor(sketch: jax.Array) -> jax.Array:
    """All products of two entries: [T, r] -> [T, r^2], row-major."""
    T, r = sketch.shape
    return (sketch[:, :, None] * sketch[:, None, :]).reshape(T, r * r)


def polysketch(sketch_size: int = 16, degree: int = 4, qk_norm: bool = True) -> FeatureMap:
    """Random sketch of the kernel (q . k)^p with scores that are squares: M = r^2.

        x_hat = LayerNorm(x) / D^(1/4)                        (x itself if not qk_norm)
        S_1 = x_hat,  S_2n = r^(-1/2) (S_n G) * (S'_n G')     (element-wise product)
        phi(x)_(i, j) = S_i S_j,  S = S_{p/2}

    G and G' are independent N(0, 1) matrices, S_n and S'_n sketches of independent draws, so that
    E (S q) . (S k) = (q . k)^(p/2) and every score is the square ((S q) . (S k))^2. Queries and
    keys share all draws and the norm. Features are signed: rounded ones have scores that miss the
    square by up to epsilon |phi(q)| |phi(k)|, epsilon 2^-7 in bfloat16, and where it is smaller
    than that can be negative.

    Trainable leaves with qk_norm: `gain` [H, D] and `b` [H, D], initialised 1 and 0. Constants:
    `G1` [H, p/2, D, r] and for l = 2, 3, ... `Gl` [H, p/2^l, r, r].

    Args:
        sketch_size: r >= 1; the paper uses 32 and 64.
        degree: p, 4, 8 or 16.
        qk_norm: whether x is normalised first (LayerNorm with epsilon 1e-5).

    Raises:
        ValueError: if an argument is out of range.

    Source: PolySketchFormer (Kacham et al., arXiv 2310.01655), the non-negative sketch. Its code
    has degree 4 and multiplies both Gaussian matrices by r^(-1/2), which makes scores r^2 times
    smaller against the 1 in its denominator; its LayerNorm is shared by all heads and not followed
    by D^(-1/4).
    """
    if sketch_size < 1:
        raise ValueError(f"sketch_size={sketch_size}, expected at least 1; 16 to 64 is usual.")
    if degree not in (4, 8, 16):
        raise ValueError(
            f"degree={degree}, expected 4, 8 or 16: sketches are squared from level to level."
        )
    r = sketch_size

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        levels = degree.bit_length() - 2
        draws = {}
        for level, level_key in enumerate(jax.random.split(key, levels), start=1):
            shape = (H, degree // 2**level, D if level == 1 else r, r)
            draws[f"G{level}"] = jax.random.normal(level_key, shape)
        if not qk_norm:
            return {}, draws
        return {"gain": jnp.ones((H, D)), "b": jnp.zeros((H, D))}, draws

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del is_query, positions
        return self_tensor(random_sketch(params, x)).astype(x.dtype)

    return FeatureMap(
        dim=lambda D: r * r,
        init=init,
        apply=apply,
        non_negative=True,
        normalize="sum_plus_one",
    )


def polysketch_learned(
    sketch_size: int = 16, num_levels: int = 2, expansion: int = 8
) -> FeatureMap:
    """Learned sketch of PolySketchFormer, with scores that are squares: M = r^2.

        S(x) = sqrt(r) tanh(f_1(x) * f_2(x) / sqrt(r)),  phi(x)_(i, j) = S_i S_j

    Each branch f is a chain of levels Dense(r) . gelu . Dense(expansion r) . LayerNorm, without
    biases in the Dense layers. Queries and keys share all parameters. |S_i| is below sqrt(r), so
    scores are between 0 and r^4, but for the rounding that `polysketch` describes.

    Trainable leaves, for level l = 1, 2, ... and D_l its input size (D, then r); the axis of 2 is
    the branch: `gainl` and `bl` [H, 2, D_l], initialised 1 and 0, `upl` [H, 2, D_l, expansion r]
    and `downl` [H, 2, expansion r, r], initialised N(0, 1 / inputs).

    Args:
        sketch_size: r >= 1; the paper uses 32 and 64.
        num_levels: levels of each branch, at least 1.
        expansion: hidden size over r, at least 1.

    Raises:
        ValueError: if an argument is out of range.

    Source: PolySketchFormer (Kacham et al., arXiv 2310.01655), the learned sketch as in its code,
    which shares it between heads; ours has parameters for each head.
    """
    for name, value in (
        ("sketch_size", sketch_size),
        ("num_levels", num_levels),
        ("expansion", expansion),
    ):
        if value < 1:
            raise ValueError(f"{name}={value}, expected at least 1.")
    r = sketch_size

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        params: dict[str, jax.Array] = {}
        for level, level_key in enumerate(jax.random.split(key, num_levels), start=1):
            up_key, down_key = jax.random.split(level_key)
            size, hidden = D if level == 1 else r, expansion * r
            params |= {
                f"gain{level}": jnp.ones((H, 2, size)),
                f"b{level}": jnp.zeros((H, 2, size)),
                f"up{level}": size**-0.5 * jax.random.normal(up_key, (H, 2, size, hidden)),
                f"down{level}": hidden**-0.5 * jax.random.normal(down_key, (H, 2, hidden, r)),
            }
        return params, {}

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del is_query, positions

        def branch(n):
            rows = x
            for level in range(1, num_levels + 1):
                rows = layer_norm(rows) * params[f"gain{level}"][n] + params[f"b{level}"][n]
                hidden = jax.nn.gelu(project(rows, params[f"up{level}"][n], x.dtype))
                rows = project(hidden, params[f"down{level}"][n], x.dtype)
            return rows

        sketch = math.sqrt(r) * jnp.tanh(branch(0) * branch(1) / math.sqrt(r))
        return self_tensor(sketch).astype(x.dtype)

    return FeatureMap(
        dim=lambda D: r * r,
        init=init,
        apply=apply,
        non_negative=True,
        normalize="sum_plus_one",
    )
