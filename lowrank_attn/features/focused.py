"""The focused feature map: directions sharpened by a power, lengths kept."""

import jax
import jax.numpy as jnp

from lowrank_attn.features.base import FeatureMap, Params


def focus(x: jax.Array, scale: jax.Array, power: float) -> jax.Array:
    """Sharpen the direction of relu(x) and keep its length.

        u = (relu(x) + 1e-6) / softplus(scale),  f = |u| u^power / |u^power|

    Args:
        x: [..., C], any floating dtype.
        scale: broadcasts to x.
        power: element-wise, >= 1.

    Returns:
        [..., C], float32, positive.

    Source: FLatten Transformer (Han et al., arXiv 2308.00442), as in its code.
    """
    u = (jax.nn.relu(x.astype(jnp.float32)) + 1e-6) / jax.nn.softplus(scale)
    # f is linear in the length of u, so the largest entry can be taken out before the power.
    largest = jax.lax.stop_gradient(jnp.max(u, axis=-1, keepdims=True))
    u = u / largest
    sharp = u**power
    length = jnp.linalg.norm(u, axis=-1, keepdims=True)
    return largest * length / jnp.linalg.norm(sharp, axis=-1, keepdims=True) * sharp


def focused(power: float = 3.0) -> FeatureMap:
    """The focused map of one head: M = D.

        u = (relu(x) + 1e-6) / softplus(scale),  phi(x) = |u| u^power / |u^power|

    Trainable leaf: `scale` [H, D], shared by queries and keys, initialised 0.

    Args:
        power: element-wise, >= 1.

    Raises:
        ValueError: if it is below 1.

    Source: FLatten Transformer (Han et al., arXiv 2308.00442). Its norms run over the channels of
    all heads, which no map of one head can do; `layers.flatten` is the whole method.
    """
    check_power(power)

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        del key
        return {"scale": jnp.zeros((H, D))}, {}

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del is_query, positions
        return focus(x, params["scale"], power).astype(x.dtype)

    return FeatureMap(dim=lambda D: D, init=init, apply=apply, non_negative=True, normalize="sum")


def check_power(power: float) -> None:
    """Raise ValueError if the power is below 1."""
    if power < 1:
        raise ValueError(f"power={power}, expected at least 1, such as 3.")
