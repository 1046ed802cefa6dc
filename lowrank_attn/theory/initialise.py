"""LLoPS parameters from data: optimal sketch, rank-one columns, factors of the feature map."""

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_attn.theory.cp import RankOne, rank_one
from lowrank_attn.theory.optimal import optimal_sketch


def llops_params(query: RankOne, key: RankOne, *, constants: bool = False) -> dict[str, jax.Array]:
    """Write rank-one columns as parameters of one head of LLoPS.

    They are those of `llops(p, M, rank=t, constants=constants, tied=False, scale=1.0,
    qk_norm=False)`, whose features are then sum_r tau_r prod_j <x, w_jr>. tau is spread evenly over
    the p factors, in place of the paper's lambda, so that all of them train alike.

    Args:
        query, key: from `rank_one` of both sides of a sketch.
        constants: whether the first entry of each vector belongs to a constant 1 in front of x: it
            becomes the constant b of the factor.

    Returns:
        `W` [1, 2, p, t, D, M], with constants `b` [1, 2, p, t, M], for t > 1 `lambda`
        [1, 2, t, M], all of one head, float32.
    """
    p, t, D, M = query.vectors.shape
    sides = np.stack([_scaled(side) for side in (query, key)])  # [2, p, t, D, M]
    params = {}
    if constants:
        params["b"] = sides[:, :, :, 0]
        sides, D = sides[:, :, :, 1:], D - 1
    params["W"] = sides * np.sqrt(D)  # the map multiplies x by D^(-1/2)
    if t > 1:
        params["lambda"] = np.ones((2, t, M))
    return {name: jnp.asarray(x[None], jnp.float32) for name, x in params.items()}


def _scaled(side):
    p, _, _, M = side.vectors.shape
    return side.vectors * (side.tau * np.sqrt(M))[None, :, None] ** (1 / p)


def llops_from_data(
    q: jax.Array,
    k: jax.Array,
    num_factors: int,
    num_features: int,
    *,
    rank: int = 1,
    constants: bool = False,
    restarts: int = 8,
    seed: int = 0,
) -> dict[str, jax.Array]:
    """Initialise the LLoPS maps of a layer from queries and keys that a trained model produced.

    Per head: the optimal sketch of (q . k)^p on the data (of (1 + q . k)^p with constants), each of
    its columns replaced by t rank-one tensors, and these written as factors. How much the second
    step loses is `RankOne.residual`; `fit` with these `params` reduces it.

    Args:
        q: [H, N, D] sampled queries of each head, as the map will see them; k: [H, S, D] keys.
        num_factors: p, num_features: M, rank: t.
        constants: whether the factors have constants.
        restarts, seed: see `rank_one`.

    Returns:
        Parameters of H heads for `llops(p, M, rank=t, constants=constants, tied=False, scale=1.0,
        qk_norm=False)`. Of an NNX layer with that kernel, set `layer.attend.phi[name][...]`.

    Raises:
        ValueError: if shapes or sizes do not fit.
    """
    if q.ndim != 3 or k.ndim != 3 or len(q) != len(k):
        raise ValueError(
            f"q and k have shapes {q.shape} and {k.shape}, expected [H, N, D] and [H, S, D]."
        )
    heads = []
    for rows_q, rows_k in zip(np.asarray(q, np.float64), np.asarray(k, np.float64), strict=True):
        if constants:
            rows_q, rows_k = (
                np.pad(x, ((0, 0), (1, 0)), constant_values=1) for x in (rows_q, rows_k)
            )
        sketch = optimal_sketch(rows_q, rows_k, num_factors, num_features)
        sides = (
            rank_one(side, rank, restarts=restarts, seed=seed)
            for side in (sketch.query, sketch.key)
        )
        heads.append(llops_params(*sides, constants=constants))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *heads)
