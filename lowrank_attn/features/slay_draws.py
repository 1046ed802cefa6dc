"""Random vectors for SLAY: directions, and frequencies of positive random features."""

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_attn.features.orthogonal import draw_orthogonal
from lowrank_attn.features.unit_rows import unit_rows

FREQUENCIES = ("iid", "orthogonal", "antithetic", "oprf")


def draw_directions(key: jax.Array, shape: tuple[int, ...], orthogonal: bool) -> jax.Array:
    """Uniform unit vectors [..., n, D]; blocks of D of them are orthogonal if asked for."""
    if orthogonal:
        return draw_orthogonal(key, shape)[0]
    return unit_rows(jax.random.normal(key, shape))


def draw_frequencies(
    key: jax.Array, H: int, n: int, D: int, s: np.ndarray, kind: str
) -> tuple[jax.Array, jax.Array]:
    """Draw positive random features whose products average exp(2 s x) for unit vectors.

        e_i(u) = exp(omega_i . u + offset_i),    E e_i(q) e_i(k) = exp(2 s q . k),  |q| = |k| = 1

    * `iid`: omega = sqrt(2 s) g with Gaussian g, offset = -s.
    * `orthogonal`: blocks of D directions are orthogonal, with the lengths of Gaussian vectors.
    * `antithetic`: as `orthogonal`, and the second half of the n vectors is minus the first.
    * `oprf`: as `orthogonal`, with omega = sqrt(2 s (1 - 4A)) g and
      offset = -s + A |g|^2 + D / 4 log(1 - 4A); see `oprf_exponent` for A < 0.

    The relative variance of one product is exp(4 s (1 + x)) - 1 for `iid`; each kind after it
    lowers the variance of the mean: orthogonal blocks by 10 to 30 %, antithetic pairs further for
    s below about 0.3, `oprf` by 1.3 to 4 times, the more the smaller D and the larger s.

    Args:
        key: of the draw.
        H: number of heads.
        n: features for each s.
        D: size of u.
        s: [R], > 0.
        kind: one of `FREQUENCIES`.

    Returns:
        omega [H, R, n, D] and offset [H, R, n], float32.

    Source: positive random features of FAVOR+ (arXiv 2009.14794) at vectors sqrt(2 s) u; `oprf` of
    Chefs' Random Tables (arXiv 2205.15317). SLAY has `iid` only.
    """
    drawn = (H, len(s), -(-n // 2) if kind == "antithetic" else n, D)
    if kind == "iid":
        g = jax.random.normal(key, drawn)
    else:
        direction, length = draw_orthogonal(key, drawn)
        g = direction * length[..., None]
    if kind == "antithetic":
        g = jnp.concatenate([g, -g], axis=-2)[..., :n, :]
    A = oprf_exponent(s, D) if kind == "oprf" else np.zeros_like(s)
    slope = np.sqrt(2 * s * (1 - 4 * A)).astype(np.float32)
    offset = (D / 4 * np.log1p(-4 * A) - s).astype(np.float32)
    square = jnp.sum(jnp.square(g), axis=-1)
    return slope[:, None, None] * g, A.astype(np.float32)[:, None] * square + offset[:, None]


def oprf_exponent(s: np.ndarray, D: int) -> np.ndarray:
    """The A <= 0 of `oprf` whose variance at x = 0 is the least.

        A = (1 - 1 / rho) / 8,  rho = (sqrt((2p + D)^2 + 8 D p) - 2p - D) / (4p),  p = 4s

    where p is the squared norm of sqrt(2 s) (q + k).
    """
    p = 4.0 * s
    root = np.sqrt((2 * p + D) ** 2 + 8 * D * p)
    # The quotient of the docstring, without its difference of nearly equal numbers.
    rho = 2 * D / (root + 2 * p + D)
    return (1 - 1 / rho) / 8
