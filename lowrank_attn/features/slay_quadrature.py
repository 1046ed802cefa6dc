"""Positive exponential sums for the denominator of the spherical Yat kernel."""

import math

import numpy as np
from scipy.optimize import minimize_scalar

from lowrank_attn.features.slay_minimax import MINIMAX

QUADRATURES = ("laguerre", "rescaled", "minimax")
_MAX_NODES = 185  # 186 nodes have a subnormal weight, 187 overflow inside laggauss


def quadrature_nodes(
    num_nodes: int, epsilon: float, kind: str = "laguerre"
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes s and logarithms of weights w > 0 with sum_r w_r exp(2 s_r x) ~ 1 / (C - 2x).

    C = 2 + epsilon and x is in [-1, 1]. With the Laguerre nodes t and weights alpha,

    * `laguerre`: s = t / C, w = alpha / C. The relative error at x is about (z / (2 - z))^(2R) with
      z = 2x / C, so it is worst at x = 1, where R nodes cannot tell an epsilon below about
      1 / (1.8 R) from zero.
    * `rescaled`: s = t / beta, w = alpha / beta exp(t (1 - C / beta)), for the beta whose largest
      relative error is least: with 3 nodes and epsilon 0.1 it is 0.31 instead of 0.63.
    * `minimax`: the sum whose largest relative error is the least that R nodes allow, 0.02 there.
      From a table: epsilon 0.001, 0.01, 0.1, 0.3 or 1 and up to 8 nodes.

    A smaller error comes from larger s, and the relative variance of a random feature is about
    exp(4 s (1 + x)): `rescaled` and `minimax` are for exponentials that are not sampled.

    Args:
        num_nodes: R, from 1 to 185.
        epsilon: > 0.
        kind: one of `QUADRATURES`.

    Returns:
        s [R] and log w [R], float64. The weights themselves may underflow.

    Raises:
        ValueError: if an argument is out of range, or not in the table of `minimax`.

    Source: SLAY (arXiv 2602.04915), Gauss-Laguerre discretisation of the Bernstein integral. The
    paper has `laguerre` only.
    """
    if not 1 <= num_nodes <= _MAX_NODES:
        raise ValueError(
            f"num_nodes={num_nodes}, expected 1..{_MAX_NODES} (Gauss-Laguerre weights overflow in "
            "float64 beyond that); 1 to 3 nodes are usual."
        )
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon}, expected a finite number > 0, such as 1e-3.")
    if kind not in QUADRATURES:
        raise ValueError(f"quadrature={kind!r} is unknown; known: {', '.join(QUADRATURES)}.")
    C = 2.0 + epsilon
    if kind == "minimax":
        s, omega = _minimax(num_nodes, epsilon)
        return s, np.log(omega) - s * C
    t, alpha = np.polynomial.laguerre.laggauss(num_nodes)
    beta = C if kind == "laguerre" else _best_scale(t, alpha, epsilon)
    return t / beta, np.log(alpha / beta) + t * (1.0 - C / beta)


def _minimax(num_nodes: int, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    if num_nodes not in MINIMAX.get(epsilon, {}):
        known = "; ".join(f"{e}: {', '.join(map(str, MINIMAX[e]))}" for e in MINIMAX)
        raise ValueError(
            f"num_nodes={num_nodes} with epsilon={epsilon} is not in the table of "
            f"quadrature='minimax', which has (epsilon: nodes) {known}."
        )
    s, omega = MINIMAX[epsilon][num_nodes]
    return np.array(s), np.array(omega)


def _best_scale(t: np.ndarray, alpha: np.ndarray, epsilon: float) -> float:
    """The beta of `rescaled`: the best of a grid, refined between its neighbours."""
    x = np.cos(np.linspace(0.0, np.pi, 401))
    y = np.concatenate([2.0 + epsilon - 2.0 * x, np.geomspace(epsilon, 4.0 + epsilon, 401)])

    def worst(log_beta: float) -> float:
        beta = math.exp(log_beta)
        terms = np.exp(np.log(alpha / beta) + t * (1.0 - y[:, None] / beta))
        return float(np.max(np.abs(y * np.sum(terms, axis=1) - 1.0)))

    grid = np.linspace(math.log(epsilon / 4.0), math.log(4.0 + 2.0 * epsilon), 64)
    best = int(np.argmin([worst(b) for b in grid]))
    around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    return math.exp(minimize_scalar(worst, bounds=around, method="bounded").x)
