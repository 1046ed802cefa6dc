"""Which random features, at which rates and how many of each, approximate the Yat kernel best."""

import functools
import math
import warnings
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from lowrank_attn.features.slay_families import (
    FAMILIES,
    moments,
    quadratic_moments,
)

_RATES = np.geomspace(0.02, 6.0, 28)
_LEAST_GAIN = 0.01  # a plan within 1 % of the error of uniform attention does not beat it


class Block(NamedTuple):
    """One group of features.

    Attributes:
        family: `const` (one constant feature), a name in `FAMILIES`, or `quadratic`: the monomials
            of `slay_polynomials.quadratic` after a random rotation (none if the rank is D).
        s: rate of the exponentials; 0 if there are none.
        weight: > 0, of the family's mean in the kernel.
        num_random: number of random features, 0 for the other families.
        rank: of the quadratic block, a divisor of D; else 0.
    """

    family: str
    s: float
    weight: float
    num_random: int
    rank: int = 0

    def size(self, D: int) -> int:
        """The number of features."""
        return D * (self.rank + 1) // 2 if self.rank else max(self.num_random, 1)


class Plan(NamedTuple):
    """What `plan_slay` chose.

    Attributes:
        D: size of queries and keys.
        blocks: the groups of features, of positive weights.
        num_features: M, all of them.
        error: predicted root mean square error of scores, over their root mean square, after the
            best scaling (normalisers take out the scale).
        uniform_error: the same for constant scores, that is, uniform attention.
    """

    D: int
    blocks: tuple[Block, ...]
    num_features: int
    error: float
    uniform_error: float


class _Column(NamedTuple):
    """A candidate: mean at the cosines, and variance of one feature averaged over them."""

    block: Block
    mean: np.ndarray
    variance: float


class _Problem(NamedTuple):
    """The kernel f at cosines x of probability density."""

    x: np.ndarray
    density: np.ndarray
    f: np.ndarray
    D: int


def cosine_histogram(q: np.ndarray, k: np.ndarray, bins: int = 300) -> tuple[float, ...]:
    """Shares of the cosines of all pairs of rows of q [T, D] and k [S, D], in bins of [-1, 1].

    What `plan_slay` calibrates by. Zero rows have cosine 0.
    """
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    q, k = (x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-300) for x in (q, k))
    counts, _ = np.histogram(np.clip(q @ k.T, -1, 1), bins=bins, range=(-1, 1))
    return tuple((counts / counts.sum()).tolist())


@functools.lru_cache(maxsize=256)
def plan_slay(
    D: int,
    num_features: int = 256,
    target_error: float | None = None,
    epsilon: float = 1e-3,
    histogram: tuple[float, ...] | None = None,
) -> Plan:
    """Choose non-negative features for x^2 / (2 + epsilon - 2x) by their closed-form moments.

    Over weights beta >= 0 of candidates with means mu_j(x) and variances v_j^2 of one feature, and
    over the numbers m_j of features, the expected squared error of a score is minimised,

        E_x (sum_j beta_j mu_j(x) - f(x))^2 + sum_j beta_j^2 v_j^2 / m_j,    sum_j m_j <= M

    whose best m_j ~ beta_j v_j turn the second sum into (sum_j beta_j v_j)^2 / M: one more row of a
    non-negative least squares problem. Candidates are a constant and `FAMILIES` at 28 rates;
    neighbouring rates that come out together are merged, counts rounded and weights refitted. The
    same is solved beside each block of monomials that fits into M, which give all of x^2 or x^2
    within blocks of a rotation, and the least error wins. (Monomials times exponentials instead of
    beside them were never better.)

    Args:
        D: size of queries and keys, at least 2.
        num_features: M >= 1, the most features.
        target_error: None, or the error to reach with as few features as possible, up to M.
        epsilon: > 0.
        histogram: shares of cosines in equal bins of [-1, 1], see `cosine_histogram`; None: half
            isotropic vectors, half a triangular density on |x| <= 0.95.

    Returns:
        The plan. If its error is not 1 % below that of uniform attention, there is a warning.

    Raises:
        ValueError: if an argument is out of range, or if M features do not reach the target.

    Source: SLAY (arXiv 2602.04915) leaves the choice open. The families `prf` and `pair` are its
    factors, the selection is ours.
    """
    _check(D, num_features, target_error, epsilon, histogram)
    problem = _problem(D, epsilon, histogram)
    columns = _columns(problem)
    best = _best(problem, columns, num_features)
    if target_error is not None:
        if best.error > target_error:
            raise ValueError(
                f"target_error={target_error} is not reached with num_features={num_features}, "
                f"which give {best.error:.3f} at D={D}; raise one of them."
            )
        low, high = 0, num_features  # errors of M <= low are too large
        while high - low > max(1, high // 50):
            middle = (low + high) // 2
            tried = _best(problem, columns, middle)
            low, high = (low, middle) if tried.error <= target_error else (middle, high)
            best = tried if tried.error <= target_error else best
    if best.error > (1 - _LEAST_GAIN) * best.uniform_error:
        warnings.warn(
            f"slay_auto: {best.num_features} features at D={D} have a predicted error of "
            f"{best.error:.3f}, and uniform attention has {best.uniform_error:.3f}: they do not "
            "beat it. Raise num_features or lower the size of queries and keys.",
            stacklevel=2,
        )
    return best


def _check(D, num_features, target_error, epsilon, histogram):
    if D < 2:
        raise ValueError(f"D={D}, expected at least 2.")
    if num_features < 1:
        raise ValueError(f"num_features={num_features}, expected at least 1; 128 to 1024 is usual.")
    if target_error is not None and not 0 < target_error < 1:
        raise ValueError(f"target_error={target_error}, expected between 0 and 1, such as 0.5.")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon}, expected a finite number > 0, such as 1e-3.")
    if histogram is not None and (
        len(histogram) < 2 or min(histogram) < 0 or not 0 < sum(histogram) < math.inf
    ):
        raise ValueError(
            "histogram has fewer than two bins, a negative share, or no finite positive sum; "
            "expected shares as `cosine_histogram` returns them."
        )


def _problem(D: int, epsilon: float, histogram: tuple[float, ...] | None) -> _Problem:
    if histogram is None:
        n = 401
        x = np.cos((np.arange(n) + 0.5) * np.pi / n)
        width = np.sqrt(1 - x**2)
        isotropic = (1 - x**2) ** ((D - 3) / 2) * width
        triangle = np.maximum(1 - np.abs(x) / 0.95, 0) * width
        density = 0.5 * isotropic / isotropic.sum() + 0.5 * triangle / triangle.sum()
    else:
        density = np.array(histogram) / sum(histogram)
        x = (2 * np.arange(len(density)) + 1) / len(density) - 1
        x, density = x[density > 0], density[density > 0]
    return _Problem(x, density, x**2 / (2 + epsilon - 2 * x), D)


def _columns(problem: _Problem) -> list[_Column]:
    """The candidates of which every feature costs one, ordered by family and rate."""
    columns = [_Column(Block("const", 0.0, 1.0, 0), np.ones_like(problem.x), 0.0)]
    for family in FAMILIES:
        for s in _RATES.tolist():
            mean, second = moments(family, s, problem.x, problem.D)
            variance = max(0.0, float(problem.density @ (second - mean**2)))
            columns.append(_Column(Block(family, s, 1.0, 1), mean, variance))
    return columns


def _quadratic_columns(problem: _Problem, M: int) -> list[_Column]:
    """Every block of monomials that fits into M features, with its variance as a whole."""
    D, found = problem.D, []
    for rank in (r for r in range(2, D + 1) if D % r == 0 and D * (r + 1) // 2 <= M):
        mean, second = quadratic_moments(rank, problem.x, D)
        variance = max(0.0, float(problem.density @ (second - mean**2)))
        found.append(_Column(Block("quadratic", 0.0, 1.0, 0, rank), mean, variance))
    return found


def _best(problem: _Problem, columns: list[_Column], M: int) -> Plan:
    plans = [_solve(problem, columns, None, M)]
    plans += [_solve(problem, columns, c, M) for c in _quadratic_columns(problem, M)]
    return min(plans, key=lambda p: (round(p.error, 6), p.num_features))


def _fit(problem: _Problem, columns: list[_Column], noise: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights >= 0 that minimise E (sum beta mu - f)^2 + |noise beta|^2, and the relative error."""
    root = np.sqrt(problem.density)
    means = np.stack([c.mean for c in columns], axis=1)
    matrix = np.concatenate([root[:, None] * means, noise])
    target = np.concatenate([root * problem.f, np.zeros(len(noise))])
    scale = np.linalg.norm(matrix, axis=0)
    weights, residual = nnls(matrix / scale, target)
    return weights / scale, float(residual / np.linalg.norm(target))


def _solve(problem: _Problem, columns: list[_Column], block: _Column | None, M: int) -> Plan:
    """The best plan with one block of monomials, or none, and other features in what is left."""
    left = M - (0 if block is None else block.block.size(problem.D))
    candidates = ([] if block is None else [block]) + (columns if left > 1 else columns[:left])
    while True:
        # A block of monomials has a variance of its own; the others share the features left.
        fixed = np.array([c.block.rank > 0 for c in candidates])
        variance = np.array([c.variance for c in candidates])
        shared = np.sqrt(np.where(fixed, 0.0, variance) / max(left - 1, 1))
        noise = np.concatenate([np.diag(np.sqrt(variance))[fixed], shared[None]])
        weights, _ = _fit(problem, candidates, noise)
        kept = _merged(candidates, weights * shared, weights, left - 1)
        if len(kept) == len(candidates):
            break
        candidates = [candidates[i] for i in kept]
    counts = _counts(candidates, weights * shared, left)
    weights, error = _fit(problem, candidates, np.diag(np.sqrt(variance / counts)))
    blocks = tuple(
        c.block._replace(num_random=int(n)) if c.block.family in FAMILIES else c.block
        for c, n in zip(candidates, counts)
    )
    blocks = tuple(b._replace(weight=float(w)) for b, w in zip(blocks, weights) if w > 0)
    mean, square = problem.density @ problem.f, problem.density @ problem.f**2
    return Plan(
        problem.D,
        blocks,
        sum(b.size(problem.D) for b in blocks),
        error,
        math.sqrt(max(0.0, 1 - mean**2 / square)),
    )


def _merged(
    candidates: list[_Column], shares: np.ndarray, weights: np.ndarray, most: int
) -> list[int]:
    """The candidates to keep: of neighbouring rates the heaviest, of random families `most`."""
    groups: list[list[int]] = []
    step = 1.1 * _RATES[1] / _RATES[0]
    for i in np.flatnonzero(weights).tolist():
        block = candidates[i].block
        before = candidates[groups[-1][-1]].block if groups else None
        if before is not None and before.family == block.family and block.s < step * before.s:
            groups[-1].append(i)
        else:
            groups.append([i])
    kept = [max(group, key=lambda i: weights[i]) for group in groups]
    random = [i for i in kept if candidates[i].block.family in FAMILIES]
    dropped = set(sorted(random, key=lambda i: -shares[i])[max(most, 0) :])
    return [i for i in kept if i not in dropped]


def _counts(candidates: list[_Column], shares: np.ndarray, left: int) -> np.ndarray:
    """Numbers of features near the proportions of `shares`, at least 1; 1 for the rest."""
    random = [i for i, c in enumerate(candidates) if c.block.family in FAMILIES]
    counts = np.ones(len(candidates), int)
    spare = left - len(random) - any(c.block.family == "const" for c in candidates)
    if random:
        exact = spare * shares[random] / shares[random].sum()
        counts[random] += np.floor(exact).astype(int)
        rest = spare - int(np.floor(exact).sum())
        counts[np.array(random)[np.argsort(np.floor(exact) - exact)[:rest]]] += 1
    return counts
