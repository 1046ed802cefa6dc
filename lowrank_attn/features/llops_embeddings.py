"""Known feature maps written as products of projections, the parameters of LLoPS."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Product(NamedTuple):
    """The map phi(x)_m = prod_{j=1..p} (b_jm + sum_d x_d Theta_jdm) of one head.

    Attributes:
        Theta: [p, D, M], float32.
        b: [p, M], float32.
    """

    Theta: jax.Array
    b: jax.Array


def untied_ones(n: int) -> list[float]:
    """Return n different powers of 2 with product 1: (1), (2, 1/2), (2, 1, 1/2), (4, 2, 1/2, 1/4).

    Factors of a product that are equal get equal gradients, so they would stay equal while they are
    trained. Multiplied by these numbers they differ and their product is the same, exactly.
    """
    powers = [e for e in range(n // 2, -(n // 2) - 1, -1) if e or n % 2]
    return [2.0**e for e in powers]


def based_size(D: int, symmetric: bool = True) -> int:
    """Return the number of columns of `based`."""
    return 1 + D + (D * (D + 1) // 2 if symmetric else D * D)


def based(D: int, num_factors: int = 2, symmetric: bool = True) -> Product:
    """Taylor features of BASED: phi(q) . phi(k) = 1 + s + s^2 / 2 with s = q . k / sqrt(D).

    Columns are [1 | x_i / D^(1/4) | x_i x_j / (sqrt(2) sqrt(D))] as in `features.taylor`, all pairs
    (i, j) in row-major order, D^2 + D + 1 in all; with `symmetric` only the pairs i <= j, those of
    i < j times sqrt(2), which has the same scores in (D + 1)(D + 2) / 2 columns: 153 in place of
    273 for D = 16. Factors that are constants in a column take the values of `untied_ones`.

    Args:
        D: head size.
        num_factors: p, at least 2; factors beyond the second are constants.
        symmetric: whether each pair has one column.

    Raises:
        ValueError: if num_factors is below 2.

    Source: BASED (arXiv 2402.18668) for the map; LLoPS for the claim that it is a special case. Its
    text leaves out the constants, without which a product of p factors is homogeneous of degree p.
    """
    if num_factors < 2:
        raise ValueError(f"num_factors={num_factors}, expected at least 2: BASED has degree 2.")
    M = based_size(D, symmetric)
    Theta = np.zeros((num_factors, D, M), np.float32)
    b = np.zeros((num_factors, M), np.float32)
    pairs = [(i, j) for i in range(D) for j in range(i if symmetric else 0, D)]
    columns: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    columns += [(D**-0.25, (i,)) for i in range(D)]
    columns += [(math.sqrt((2 if symmetric and i != j else 1) / (2 * D)), (i, j)) for i, j in pairs]
    for m, (weight, coordinates) in enumerate(columns):
        for j, i in enumerate(coordinates):
            Theta[j, i, m] = weight if j == 0 else 1.0
        b[len(coordinates) :, m] = untied_ones(num_factors - len(coordinates))
    return Product(jnp.asarray(Theta), jnp.asarray(b))


def power(W: jax.Array, num_factors: int) -> Product:
    """Element-wise powers of one projection: phi(x) = (x W)^p, the factors untied.

    Args:
        W: [D, M]; the unit matrix takes the powers of x itself.
        num_factors: p, at least 1.
    """
    ones = jnp.asarray(untied_ones(num_factors), jnp.float32)
    return Product(ones[:, None, None] * W, jnp.zeros((num_factors, W.shape[1]), jnp.float32))


def polysketch(G: jax.Array) -> Product:
    """Non-negative random sketch of degree 4 with M = r^2: scores are ((S q) . (S k))^2 >= 0.

        phi(x)_(i, j) = r^(-1) (x G_1)_i (x G_2)_i (x G_1)_j (x G_2)_j

    in row-major order, which is `features.polysketch` of degree 4 for the same G. The two halves
    are multiplied by 2 and 1/2, which unties them in the columns i = j.

    Args:
        G: [2, D, r], independent N(0, 1) for an unbiased sketch of (q . k)^4.

    Source: PolySketchFormer (arXiv 2310.01655), degree 4. Sketches of higher degree add up
    products, which one product of projections cannot.
    """
    r = G.shape[-1]
    G = G * r**-0.25
    first, second = 2.0 * jnp.repeat(G, r, axis=-1), 0.5 * jnp.tile(G, (1, 1, r))
    return Product(jnp.concatenate([first, second]), jnp.zeros((4, r * r), jnp.float32))
