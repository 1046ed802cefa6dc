"""What the Nystrom methods share: heads in groups, and an inverse by matrix products."""

import jax
import jax.numpy as jnp


def grouped_heads(
    q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Move T behind the heads: q [B, H, G, T, D], k [B, H, 1, S, D], v [B, H, 1, S, P], float32."""
    B, T, Hq, D = q.shape
    H = k.shape[2]
    q = jnp.moveaxis(q.astype(jnp.float32).reshape(B, T, H, Hq // H, D), 1, 3)
    k, v = (jnp.moveaxis(x.astype(jnp.float32), 1, 2)[:, :, None] for x in (k, v))
    return q, k, v


def flat_heads(y: jax.Array) -> jax.Array:
    """Undo `grouped_heads` for outputs: [B, H, G, T, P] -> [B, T, H G, P]."""
    B, H, G, T, P = y.shape
    return jnp.moveaxis(y, 3, 1).reshape(B, T, H * G, P)


def iterated_inverse(A: jax.Array, num_iterations: int, shared_start: bool) -> jax.Array:
    """Approximate the (pseudo-)inverse of non-negative matrices A [B, H, G, N, N], in float32.

        Z_0 = A^T / c,  Z <- Z / 4 (13 I - A Z (15 I - A Z (7 I - A Z)))

    c is the largest column sum of A, for each matrix or, with `shared_start`, of all matrices
    together. Rows and columns of zeros stay zeros. It converges where the row sums of A are 1 or A
    is symmetric; the number of steps that it takes grows with the condition number.

    Source: Nystromformer (arXiv 2102.03902), equation 11, after Razavi et al. 2014.
    """
    N = A.shape[-1]
    eye = jnp.eye(N, dtype=jnp.float32)
    columns = jnp.sum(A, axis=-2, keepdims=True)
    c = jnp.max(columns) if shared_start else jnp.max(columns, axis=-1, keepdims=True)
    Z = jnp.swapaxes(A, -1, -2) / jnp.where(c > 0, c, 1.0)
    with jax.default_matmul_precision("highest"):
        for _ in range(num_iterations):
            AZ = A @ Z
            Z = 0.25 * Z @ (13 * eye - AZ @ (15 * eye - AZ @ (7 * eye - AZ)))
    return Z
