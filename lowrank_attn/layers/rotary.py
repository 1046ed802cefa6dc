"""Rotary positions for queries and keys."""

import jax
import jax.numpy as jnp


def rotary(x: jax.Array, positions: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotate pairs of coordinates (i, i + D / 2) by the angle position * base^(-2 i / D).

    Args:
        x: [B, T, H, D], D even.
        positions: [T] or [B, T] int.
        base: the wave length of the slowest pair is 2 pi base.

    Returns:
        [B, T, H, D] in the dtype of x; angles and products are float32.

    Raises:
        ValueError: if D is odd.

    Source: RoFormer (Su et al. 2021) equation 15, in the half-split order of GPT-NeoX.
    """
    D = x.shape[-1]
    if D % 2:
        raise ValueError(f"x has head size {D}, rotary positions need an even one.")
    frequency = base ** (-jnp.arange(0, D, 2, dtype=jnp.float32) / D)
    angle = positions[..., None].astype(jnp.float32) * frequency  # [T, D / 2] or [B, T, D / 2]
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
