"""Random directions in orthogonal blocks, for random features of less variance."""

import jax
import jax.numpy as jnp


def draw_orthogonal(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Directions [..., n, D] in orthogonal blocks of D, and lengths of Gaussian vectors [..., n].

    The orthogonal factor of a Gaussian matrix is independent of the triangular one, and so of the
    norms of the columns.
    """
    *lead, n, D = shape
    blocks = -(-n // D)
    gaussian = jax.random.normal(key, (*lead, blocks, D, D))
    q, r = jnp.linalg.qr(gaussian)
    # With the signs of r's diagonal taken out, q is uniform over the orthogonal matrices.
    q = q * jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)[..., None, :]
    lengths = jnp.linalg.norm(gaussian, axis=-2).reshape(*lead, blocks * D)
    return q.reshape(*lead, blocks * D, D)[..., :n, :], lengths[..., :n]
