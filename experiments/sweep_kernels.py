"""What `experiments.sweep` measures: causal attention by kernels at one size, its inputs."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_attn.features import (
    FeatureMap,
    cosformer,
    elu,
    favor,
    favor_relu,
    llops,
    slay,
    taylor,
)
from lowrank_attn.layers import softmax, yat_spherical
from lowrank_attn.layers.attend import Kernel, attend, resolve_normalize

DIRECTIONS = ("forward", "forward+backward")
BLOCK = 4096  # tokens of random inputs, repeated up to T


class Point(NamedTuple):
    """One size of one kernel: queries and keys [B, T, H, D], values of the same shape."""

    kernel: str
    direction: str
    B: int
    T: int
    H: int
    D: int
    dtype: str


def based(r: int = 16) -> FeatureMap:
    """The Taylor features of BASED, of queries and keys that are projected to r dimensions.

        phi(x) = taylor(x W),  W [D, r], one for queries and one for keys

    M = r^2 + r + 1. Source: BASED (arXiv 2402.18668), as LLoPS's comparison of speed has it.
    """
    of_projected = taylor()

    def init(key, D, H):
        return {"W": D**-0.5 * jax.random.normal(key, (H, 2, D, r))}, {}

    def apply(params, x, *, is_query, positions=None):
        W = params["W"][0 if is_query else 1].astype(x.dtype)
        projected = jnp.matmul(x, W, preferred_element_type=jnp.float32).astype(x.dtype)
        return of_projected.apply({}, projected, is_query=is_query)

    return FeatureMap(
        dim=lambda D: of_projected.dim(r),
        init=init,
        apply=apply,
        non_negative=of_projected.non_negative,
        normalize=of_projected.normalize,
    )


KERNELS: dict[str, Callable[[Point], Kernel]] = {
    "softmax": lambda point: softmax(),
    "softmax_naive": lambda point: softmax("xla"),
    "llops_p2": lambda point: llops(2, 256),
    "llops_p4": lambda point: llops(4, 256),
    "based": lambda point: based(),
    "slay": lambda point: slay(),
    "slay_1024": lambda point: slay(2, 32, 16, 1e-6, frequencies="iid", scaled=False),
    "elu": lambda point: elu(),
    "cosformer": lambda point: cosformer(point.T),
    "favor": lambda point: favor(256),
    "favor_relu": lambda point: favor_relu(64),
    "yat_spherical": lambda point: yat_spherical(),
}
QUADRATIC = ("softmax", "softmax_naive", "yat_spherical")


def num_features(point: Point) -> int | None:
    """M of a kernel, None for one without features."""
    kernel = KERNELS[point.kernel](point)
    return kernel.dim(point.D) if isinstance(kernel, FeatureMap) else None


def arrays(point: Point, key: jax.Array) -> dict[str, jax.Array | dict]:
    """Random queries, keys, values, the gradient for the outputs, parameters and constants."""
    kernel = KERNELS[point.kernel](point)
    *keys, for_params = jax.random.split(key, 5)
    shape = (point.B, min(point.T, BLOCK), point.H, point.D)
    found: dict[str, jax.Array | dict] = {}
    for name, k in zip(("q", "k", "v", "dy"), keys, strict=True):
        block = jax.random.normal(k, shape, point.dtype)
        repeats = -(-point.T // BLOCK)
        found[name] = jnp.tile(block, (1, repeats, 1, 1))[:, : point.T] if repeats > 1 else block
    trainable, constant = kernel.init(for_params, point.D, point.H)
    return found | {"trainable": dict(trainable), "constant": dict(constant)}


def program(point: Point):
    """What one call computes from `arrays`: outputs, and with backward also all gradients."""
    kernel = KERNELS[point.kernel](point)
    normalize = resolve_normalize(kernel, None)

    def forward(constant, inputs):
        params = {**inputs["trainable"], **constant}
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        return attend(kernel, params, None, q, k, v, causal=True, normalize=normalize)[0]

    def run(dy, constant, **inputs):
        if point.direction == "forward":
            return forward(constant, inputs)
        y, vjp = jax.vjp(functools.partial(forward, constant), inputs)
        return y, vjp(dy)

    return jax.jit(run)
