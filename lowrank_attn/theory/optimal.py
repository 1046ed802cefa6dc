"""The best sketch of a polynomial kernel on given queries and keys."""

from typing import NamedTuple

import numpy as np

MAX_ELEMENTS = 2**27  # of an expanded projection, 1 GiB in float64


class Projection(NamedTuple):
    """A linear map W [D^p, M] of the tensor powers x^(⊗p), kept as a sum over data rows.

        W_i = sum_n coefficients[n, i] rows_n^(⊗p),  psi_p(x) W = (x rows^T)^p coefficients

    so nothing of size D^p is formed. Each column is a symmetric tensor.

    Attributes:
        rows: [N, D] float64.
        coefficients: [N, M] float64.
        p: the degree.
    """

    rows: np.ndarray
    coefficients: np.ndarray
    p: int

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Features psi_p(x) W of x [..., D]: [..., M]."""
        return (np.asarray(x, np.float64) @ self.rows.T) ** self.p @ self.coefficients

    def squared_norms(self) -> np.ndarray:
        """|W_i|_F^2 of each column, [M]."""
        gram = (self.rows @ self.rows.T) ** self.p
        return np.einsum("nm,nm->m", self.coefficients, gram @ self.coefficients)

    def expand(self) -> np.ndarray:
        """W as [D, ..., D, M] with p axes of size D.

        Raises:
            ValueError: if that has more than 2^27 elements.
        """
        D, M = self.rows.shape[1], self.coefficients.shape[1]
        if D**self.p * M > MAX_ELEMENTS:
            raise ValueError(
                f"W has {D}^{self.p} x {M} elements, expected at most {MAX_ELEMENTS}; use the "
                "projection as it is, which never forms W."
            )
        W = self.coefficients
        for _ in range(self.p):
            W = self.rows.reshape(self.rows.shape + (1,) * (W.ndim - 1)) * W[:, None]
        return W.sum(axis=0)


class PolynomialSketch(NamedTuple):
    """What `optimal_sketch` returns.

    Attributes:
        query, key: the maps W_Q* and W_K*.
        bound: sum_{i > M} sigma_i^2, below which no sketch with M features gets on this data.
        error: |phi_Q(q) phi_K(k)^T - A|_F^2 of this sketch, equal to `bound` up to rounding.
        squared_norm: |A|_F^2.
    """

    query: Projection
    key: Projection
    bound: float
    error: float
    squared_norm: float


def optimal_sketch(q: np.ndarray, k: np.ndarray, p: int, num_features: int) -> PolynomialSketch:
    """Linear maps of tensor powers that approximate A = (q k^T)^p, elementwise, best of all.

        A = U Sigma V^T,  psi_p(q) W_Q* = U_M Sigma_M^(1/2),  psi_p(k) W_K* = V_M Sigma_M^(1/2)

    The least-norm solutions of these equations are returned. W_Q* and W_K* belong to these q and
    k: on other rows of the same distribution the error is larger. More than C(D + p - 1, p)
    features are never needed, the number of different monomials; the rest are zeros.

    Args:
        q: [N, D] queries of one head, k: [S, D] keys; computed in float64, N, S up to some
            thousands (an N x S singular value decomposition).
        p: the degree, at least 1.
        num_features: M, at least 1.

    Raises:
        ValueError: if shapes or sizes do not fit.

    Source: LLoPS, theorem 3.1 and appendix A.1.
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    if q.ndim != 2 or k.ndim != 2 or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q and k have shapes {q.shape} and {k.shape}, expected [N, D] and [S, D]."
        )
    for name, value in (("p", p), ("num_features", num_features)):
        if value < 1:
            raise ValueError(f"{name}={value}, expected at least 1.")
    A = (q @ k.T) ** p
    U, sigma, Vt = np.linalg.svd(A, full_matrices=False)
    M = min(num_features, sigma.size)
    root = np.sqrt(sigma[:M])
    query = Projection(q, _pad(_solve(q, p, U[:, :M] * root), num_features), p)
    key = Projection(k, _pad(_solve(k, p, Vt[:M].T * root), num_features), p)
    error = float(np.sum((query(q) @ key(k).T - A) ** 2))
    return PolynomialSketch(query, key, float(np.sum(sigma[M:] ** 2)), error, float(np.sum(A**2)))


def _solve(rows, p, values):
    """Coefficients c of the least-norm W with psi_p(rows) W = values: (rows rows^T)^p c = values.

    Directions below the rounding of the Gram matrix carry nothing of A and are dropped.
    """
    eigenvalues, vectors = np.linalg.eigh((rows @ rows.T) ** p)
    keep = eigenvalues > eigenvalues[-1] * len(rows) * np.finfo(np.float64).eps
    vectors = vectors[:, keep]
    return vectors @ ((vectors.T @ values) / eigenvalues[keep, None])


def _pad(coefficients, M):
    return np.pad(coefficients, ((0, 0), (0, M - coefficients.shape[1])))
