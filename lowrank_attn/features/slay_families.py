"""Means and variances of the random features that approximate the spherical Yat kernel.

Everything is a function of x = q . k for unit vectors q and k, because the draws are rotation
invariant. A family is a product phi(q) phi(k) of one random feature, with `mean` and `second`
moments over independent draws; orthogonal draws have the same means and smaller variances.
"""

import math

import numpy as np

from lowrank_attn.features.slay_draws import oprf_exponent

FAMILIES = ("prf", "pair", "pair4", "hadamard")


def gaussian_moment(n: int, mean: np.ndarray, x: np.ndarray) -> np.ndarray:
    """E (mean + X)^n (mean + Y)^n for standard normal X and Y of correlation x."""

    def shifted(j):  # E (mean + X)^j
        return sum(
            math.comb(j, 2 * i) * math.prod(range(1, 2 * i, 2)) * mean ** (j - 2 * i)
            for i in range(j // 2 + 1)
        )

    return sum(
        math.factorial(j) * math.comb(n, j) ** 2 * shifted(n - j) ** 2 * x**j for j in range(n + 1)
    )


def exponential_moments(
    s: float, x: np.ndarray, D: int, oprf: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The first two moments of e(q) e(k) of `draw_frequencies`, kinds `oprf` or else `iid`."""
    A = float(oprf_exponent(np.array(s), D)) if oprf else 0.0
    constant = D * math.log1p(-4 * A) - D / 2 * math.log1p(-8 * A) - 4 * s
    return np.exp(2 * s * x), np.exp(constant + 8 * s * (1 + x) * (1 - 4 * A) / (1 - 8 * A))


def moments(family: str, s: float, x: np.ndarray, D: int) -> tuple[np.ndarray, np.ndarray]:
    """The first two moments of one feature.

    * `prf`: e(u) alone, mean exp(2 s x).
    * `pair`: sqrt(D (D + 2)) (a . u)^2 e(u) with a unit vector a of its own.
    * `pair4`: sqrt(D (D + 2) (D + 4) (D + 6)) (a . u)^4 e(u).
    * `hadamard`: (g . u)^2 e(u) with the Gaussian vector g of e, of the kind `orthogonal`.

    The exponentials e of the first three are of the kind `oprf`.

    Args:
        family: one of `FAMILIES`.
        s: > 0, the rate of e.
        x: cosines.
        D: size of q and k.

    Returns:
        E phi(q) phi(k) and E (phi(q) phi(k))^2, of the shape of x.
    """
    mean, second = exponential_moments(s, x, D, oprf=family != "hadamard")
    if family == "prf":
        return mean, second
    if family == "hadamard":
        m = math.sqrt(2 * s) * (1 + x)
        return gaussian_moment(2, m, x) * mean, gaussian_moment(4, 2 * m, x) * second
    n = {"pair": 2, "pair4": 4}[family]
    # Gaussian anchors have the moments of unit ones times those of their length.
    ratio = length_moment(2 * n, D) ** 2 / length_moment(4 * n, D)
    zero = np.zeros_like(x)
    return (
        gaussian_moment(n, zero, x) * mean,
        ratio * gaussian_moment(2 * n, zero, x) * second,
    )


def length_moment(n: int, D: int) -> float:
    """E |g|^n of a Gaussian vector of D numbers, n even."""
    return math.prod(D + 2.0 * i for i in range(n // 2))


def quadratic_moments(rank: int, x: np.ndarray, D: int) -> tuple[np.ndarray, np.ndarray]:
    """The first two moments of sum_b (q_b . k_b)^2 over blocks of a random rotation.

    q_b holds the coordinates of one of D / rank blocks. With k = x q + sqrt(1 - x^2) h, h
    orthogonal to q, the squared lengths A_b of the q_b are Dirichlet distributed with parameters
    rank / 2, and given q the moments of h are those of a uniform vector in the complement of q:
    E sum_b (q_b . h_b)^2 = (1 - sum A^2) / (D - 1), and so on. With `rank` D it is x^2 exactly.

    Args:
        rank: a divisor of D.
        x: cosines.
        D: size of q and k.
    """
    if rank == D:
        return x**2, x**4
    blocks, alpha = D // rank, rank / 2

    def dirichlet(*powers):
        rising = [alpha + i for power in powers for i in range(power)]
        return math.prod(rising) / math.prod(D / 2 + i for i in range(sum(powers)))

    square = blocks * dirichlet(2)
    cube = blocks * dirichlet(3)
    square_square = blocks * dirichlet(4) + blocks * (blocks - 1) * dirichlet(2, 2)
    y2 = 1 - x**2
    mean = x**2 * square + y2 * (1 - square) / (D - 1)
    # E (sum B^2)^2 for the products B_b = q_b . h_b, by Wick's rule on the sphere.
    fourth = (1 - 2 * square + square_square) + 2 * (square - 2 * cube + square_square)
    second = (
        x**4 * square_square
        + 2 * x**2 * y2 * (2 * (cube - square_square) + square - square_square) / (D - 1)
        + y2**2 * fourth / ((D - 1) * (D + 1))
    )
    return mean, second
