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
    q = _orthonormal_columns(gaussian)
    lengths = jnp.linalg.norm(gaussian, axis=-2).reshape(*lead, blocks * D)
    return q.reshape(*lead, blocks * D, D)[..., :n, :], lengths[..., :n]


def _orthonormal_columns(a: jax.Array) -> jax.Array:
    """The orthogonal factor of matrices [..., D, D] whose triangular one has a positive diagonal.

    So it is uniform over orthogonal matrices for Gaussian ones. Gram-Schmidt, each column twice:
    two batched `jnp.linalg.qr` in one program were seen to wait for each other for ever on CPUs.
    """

    def add(i, q):
        v = jax.lax.dynamic_index_in_dim(a, i, -1)
        with jax.default_matmul_precision("float32"):
            for _ in range(2):
                v = v - q @ (jnp.swapaxes(q, -2, -1) @ v)
        v = v / jnp.linalg.norm(v, axis=-2, keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(q, v[..., 0], i, -1)

    return jax.lax.fori_loop(0, a.shape[-1], add, jnp.zeros_like(a))
