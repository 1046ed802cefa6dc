"""Rank-one (CP) approximations of the columns of a projection, which turn it into LLoPS factors."""

from typing import NamedTuple

import numpy as np

from lowrank_attn.theory.optimal import Projection


class RankOne(NamedTuple):
    """W_i ~ sum_{r=1..t} tau_ri w_1ri ⊗ ... ⊗ w_pri with unit vectors w.

    Attributes:
        vectors: [p, t, D, M].
        tau: [t, M], >= 0.
        residual: [M], |W_i|^2 - sum_r tau_ri^2 = |W_i - sum_r tau_ri w_1ri ⊗ ... ⊗ w_pri|^2.
    """

    vectors: np.ndarray
    tau: np.ndarray
    residual: np.ndarray


def rank_one(
    W: Projection, rank: int = 1, *, restarts: int = 8, iterations: int = 200, seed: int = 0
) -> RankOne:
    """Approximate every column of W by t rank-one tensors, found one after the other.

    Each is fitted to what those before leave over, so that the residual is |W_i|^2 - sum_r tau_r^2
    exactly. For p = 2 this is the truncated singular value decomposition, the best of all. For
    p >= 3 each is the best of `restarts` runs of alternating least squares from random unit
    vectors: a lower bound on the best rank-one tensor, whose computation is NP-hard.

    Args:
        W: a projection.
        rank: t, at least 1.
        restarts: random starts per tensor, for p >= 3.
        iterations: the most sweeps over the p vectors, for p >= 3; sweeps end once no tau grows by
            more than 1e-12 of itself.
        seed: of the starts.

    Raises:
        ValueError: if rank or restarts is below 1.

    Source: LLoPS, equations 5 to 8 and theorem 3.4, where tau is the tensor's spectral norm.
    """
    for name, value in (("rank", rank), ("restarts", restarts)):
        if value < 1:
            raise ValueError(f"{name}={value}, expected at least 1.")
    if W.p == 2:
        vectors, tau = _singular_vectors(W, rank)
    else:
        vectors, tau = _deflate(W, rank, restarts, iterations, np.random.default_rng(seed))
    return RankOne(vectors, tau, W.squared_norms() - np.sum(tau**2, axis=0))


def _singular_vectors(W, rank):
    """The t largest singular values and vectors of each column as a matrix; zeros beyond D."""
    U, sigma, Vt = np.linalg.svd(np.moveaxis(W.expand(), -1, 0))  # [M, D, D], [M, D], [M, D, D]
    M, D = sigma.shape
    t = min(rank, D)
    vectors, tau = np.zeros((2, rank, D, M)), np.zeros((rank, M))
    vectors[0, :t] = np.transpose(U[:, :, :t], (2, 1, 0))
    vectors[1, :t] = np.transpose(Vt[:, :t], (1, 2, 0))
    tau[:t] = sigma[:, :t].T
    return vectors, tau


def _deflate(W, rank, restarts, iterations, generator):
    """Vectors [p, t, D, M] and tau [t, M] by alternating least squares."""
    D, M = W.rows.shape[1], W.coefficients.shape[1]
    vectors, tau = np.zeros((W.p, 0, D, M)), np.zeros((0, M))
    for _ in range(rank):
        best, best_tau = None, np.full(M, -1.0)
        for _ in range(restarts):
            w = generator.standard_normal((W.p, D, M))
            w, found = _alternate(
                W, vectors, tau, w / np.linalg.norm(w, axis=1)[:, None], iterations
            )
            better = found > best_tau
            best = w if best is None else np.where(better, w, best)
            best_tau = np.maximum(found, best_tau)
        vectors = np.concatenate([vectors, best[:, None]], axis=1)
        tau = np.concatenate([tau, best_tau[None]])
    return vectors, tau


def _alternate(W, vectors, tau, w, iterations):
    """Sweep over the p vectors w [p, D, M]; returns them and their tau [M]."""
    size = np.zeros(w.shape[2])
    for _ in range(iterations):
        before = size
        for j in range(W.p):
            others = [w[i] for i in range(W.p) if i != j]
            products = np.prod([W.rows @ other for other in others], axis=0)  # [N, M]
            contracted = W.rows.T @ (W.coefficients * products)  # [D, M]
            overlaps = tau * np.prod(
                [np.einsum("tdm,dm->tm", vectors[i], w[i]) for i in range(W.p) if i != j], axis=0
            )
            contracted -= np.einsum("tdm,tm->dm", vectors[j], overlaps)
            size = np.linalg.norm(contracted, axis=0)
            w[j] = np.where(size > 0, contracted / np.where(size > 0, size, 1), w[j])
        if np.all(size - before <= 1e-12 * size):
            break
    return w, size
