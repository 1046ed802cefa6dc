"""What `experiments.slay_kernel` compares: four kinds of queries and keys, scores of each method.

Rows are unit vectors. D, epsilon and budgets of the `protocol` are those of the paper's table 2 and
its sweep; the other data are ours.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_attn.features import FeatureMap, cosine_histogram, plan_slay, slay, slay_auto
from lowrank_attn.features.slay_quadrature import quadrature_nodes

Scores = Callable[[jax.Array, np.ndarray, np.ndarray], np.ndarray]


class Data(NamedTuple):
    """Queries, keys and values of n heads at once, and the softening of the kernel's pole.

    Attributes:
        q, k: [n, T, D] float32 of unit rows, v: [n, T, P].
        epsilon: of the kernel x^2 / (2 + epsilon - 2x).
        causal: whether outputs are causal attention.
        out: weights [H P, E] and bias [E] of an output projection over every H heads, or None.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    epsilon: float
    causal: bool
    out: tuple[np.ndarray, np.ndarray] | None = None


def unit(x):
    """Rows of length 1."""
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def protocol(rng: np.random.Generator, T: int) -> Data:
    """The paper's: one layer of E = 64 and 4 heads at its initial values, on Gaussian inputs.

    Projections and their biases are uniform within E^(-1/2).
    """
    E, H, B = 64, 4, 8
    x = rng.standard_normal((B, T, E))

    def linear():
        return [rng.uniform(-(E**-0.5), E**-0.5, shape) for shape in ((E, E), E)]

    def project():
        w, b = linear()
        y = (x @ w + b).reshape(B, T, H, E // H)
        return np.moveaxis(y, 2, 1).reshape(B * H, T, E // H)

    q, k, v = unit(project()), unit(project()), project().astype(np.float32)
    return Data(q, k, v, 1e-6, True, tuple(linear()))


def isotropic(rng: np.random.Generator, T: int) -> Data:
    """Independent directions in 64 dimensions."""
    q, k, v = rng.standard_normal((3, 8, T, 64))
    return Data(unit(q), unit(k), v.astype(np.float32), 1e-3, False)


def low_rank(rng: np.random.Generator, T: int) -> Data:
    """Rows near a subspace of 8 of 64 dimensions, a tenth of their energy outside."""
    basis = np.linalg.qr(rng.standard_normal((8, 64, 8)))[0]

    def draw():
        inside = rng.standard_normal((8, T, 8)) @ np.swapaxes(basis, 1, 2) * (0.9 / 8) ** 0.5
        return unit(inside + rng.standard_normal((8, T, 64)) * (0.1 / 64) ** 0.5)

    return Data(draw(), draw(), rng.standard_normal((8, T, 64)).astype(np.float32), 1e-3, False)


def clustered(rng: np.random.Generator, T: int) -> Data:
    """Rows around 24 directions that q and k share, of cosine 0.75 within a cluster."""
    centres = unit(rng.standard_normal((8, 24, 64)))

    def draw():
        own = np.take_along_axis(centres, rng.integers(0, 24, (8, T, 1)), axis=1)
        return unit(own * 0.75**0.5 + rng.standard_normal((8, T, 64)) * (0.25 / 64) ** 0.5)

    return Data(draw(), draw(), rng.standard_normal((8, T, 64)).astype(np.float32), 0.1, False)


DATA: Mapping[str, Callable[[np.random.Generator, int], Data]] = {
    "protocol": protocol,
    "isotropic": isotropic,
    "low_rank": low_rank,
    "clustered": clustered,
}


def read_heads(path: str, T: int) -> Data:
    """Queries and keys of a trained model: an .npz file with q, k, v [heads, tokens, D].

    Raises:
        ValueError: if an array is missing or has other axes, or there are fewer than T tokens.
    """
    with np.load(path) as arrays:
        missing = [name for name in "qkv" if name not in arrays]
        if missing:
            raise ValueError(f"heads={path!r} lacks {', '.join(missing)}; it has {list(arrays)}.")
        q, k, v = (np.asarray(arrays[name], np.float32) for name in "qkv")
    if q.ndim != 3 or k.shape != q.shape or v.shape[:2] != q.shape[:2] or q.shape[1] < T:
        raise ValueError(
            f"heads={path!r} has q {q.shape}, k {k.shape}, v {v.shape}, expected "
            f"[heads, tokens, D] with at least {T} tokens."
        )
    return Data(unit(q[:, :T]), unit(k[:, :T]), v[:, :T], 1e-3, True)


def kernel(x: np.ndarray, epsilon: float) -> np.ndarray:
    """The spherical Yat kernel of cosines."""
    return x**2 / (2 + epsilon - 2 * x)


def by_quadrature(num_nodes: int, epsilon: float) -> Scores:
    """The kernel by Gauss-Laguerre nodes, without random features."""
    s, log_w = quadrature_nodes(num_nodes, epsilon, "laguerre")

    def scores(key, q, k):
        x = cosines(q, k)[..., None]
        return np.sum(x**2 * np.exp(log_w + 2 * s * x), axis=-1)

    return scores


def by_features(feature_map: FeatureMap) -> Scores:
    """Scores of a map, with draws of its own for each head."""

    @jax.jit
    def scores(key, q, k):
        params = feature_map.init(key, q.shape[-1], q.shape[0])[1]
        phi_q, phi_k = (
            jax.vmap(lambda p, x: feature_map.apply(p, x, is_query=True))(params, x) for x in (q, k)
        )
        return jnp.einsum("ntm,nsm->nts", phi_q, phi_k, precision="highest")

    return lambda key, q, k: np.asarray(scores(key, q, k), np.float64)


def cosines(q, k):
    """[n, T, T] float64."""
    return np.clip(np.einsum("ntd,nsd->nts", q, k, dtype=np.float64), -1, 1)


def methods(m: int, data: Data) -> dict[str, tuple[Scores, float | None]]:
    """Scores by name, and the predicted error where there is one, at most m features each.

    The paper's have two nodes, with as many polynomial as random features; what has no polynomial
    has as many features in all.
    """
    D, epsilon = data.q.shape[-1], data.epsilon
    side = round((m / 2) ** 0.5)
    as_published = functools.partial(slay, 2, epsilon=epsilon, frequencies="iid", scaled=False)
    found: dict[str, tuple[Scores, float | None]] = {
        "uniform attention": (lambda key, q, k: np.ones((len(q), q.shape[1], k.shape[1])), None),
        "x^2": (lambda key, q, k: cosines(q, k) ** 2, None),
        "quadrature, 2 nodes": (by_quadrature(2, epsilon), None),
    }
    for name in ("anchor", "nystrom", "tensorsketch", "random_maclaurin"):
        found[name] = by_features(as_published(side, side, polynomial=name)), None
    found["laplace_only"] = by_features(as_published(None, m // 2, laplace_only=True)), None
    found["hadamard"] = by_features(as_published(None, m // 2, fusion="hadamard")), None
    found["pairs"] = by_features(slay(1, None, m, epsilon, fusion="pairs")), None
    if m >= D * (D + 1) // 2:
        left = m // (D * (D + 1) // 2)
        found["exact polynomial"] = (
            by_features(slay(1, None, left, epsilon, polynomial="exact")),
            None,
        )
    each = [cosine_histogram(q, k) for q, k in zip(data.q, data.k)]
    histogram = tuple(np.mean(each, axis=0).tolist())
    plan = plan_slay(D, m, epsilon=epsilon, histogram=histogram)
    automatic = slay_auto(m, epsilon=epsilon, histogram=histogram)
    found["slay_auto"] = by_features(automatic), plan.error
    return found
