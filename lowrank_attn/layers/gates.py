"""How layers compute the gates of a state-update rule from their input.

Convolutions, output gates and other parts of the published blocks are not here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


class Sizes(NamedTuple):
    """Sizes of a layer: E of its input, H key/value heads, M features, P per value."""

    E: int
    H: int
    M: int
    P: int


class Gate(NamedTuple):
    """One gate as pure functions.

    Attributes:
        init: `init(key, sizes)` returns trained arrays. Matrices lead with the axis of their input,
            the others with H.
        apply: `apply(params, x, H)` returns the gate [B, T, H] or [B, T, H, M] of the tokens of
            x [B, T, E], in float32.
    """

    init: Callable[[jax.Array, Sizes], Params]
    apply: Callable[[Params, jax.Array, int], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Gating:
    """The name of a rule, and a form of each of its gates, whose parameters have disjoint names."""

    rule: str
    gates: Mapping[str, Gate]

    def init(self, key: jax.Array, sizes: Sizes) -> Params:
        """The trained arrays of all gates."""
        params: Params = {}
        for i, gate in enumerate(self.gates.values()):
            params |= gate.init(jax.random.fold_in(key, i), sizes)
        return params

    def apply(self, params: Params, x: jax.Array, H: int) -> Params:
        """The gates of the tokens of x [B, T, E] by name, as `ops.causal` takes them."""
        return {name: gate.apply(params, x, H) for name, gate in self.gates.items()}


def fixed_decay() -> Gate:
    """Decay of the head alone: exp(log_decay) = 1 - 2^(-5 - h) for head h = 0..H-1.

    Source: RetNet (Sun et al. 2023), the definition of its heads below equation 8.
    """

    def apply(params, x, H):
        log_decay = jnp.log1p(-jnp.exp2(-5.0 - jnp.arange(H)))
        return jnp.broadcast_to(log_decay, (*x.shape[:2], H))

    return Gate(lambda key, sizes: {}, apply)


def step_decay() -> Gate:
    """Decay per head: log_decay = -exp(A_log) softplus(x W + dt_bias).

    Leaves: `decay` W [E, H], N(0, 1/E); `A_log` [H], the logarithm of U(1, 16); `dt_bias` [H], such
    that softplus(dt_bias) is log-uniform from 0.001 to 0.1.

    Source: Mamba-2 (Dao and Gu 2024), as Gated DeltaNet (arXiv 2412.06464) uses it: the step, the
    softplus, does not multiply the values as well.
    """

    def init(key, sizes):
        projection, steps = jax.random.split(key)
        return {"decay": _matrix(projection, sizes.E, sizes.H)} | _init_steps(steps, (sizes.H,))

    return Gate(init, lambda params, x, H: _steps(params, _product(x, params["decay"])))


def step_decay_per_feature() -> Gate:
    """Decay per feature through a bottleneck: log_decay = -exp(A_log) softplus(x W U + dt_bias).

    Leaves: `decay_down` W [E, P], N(0, 1/E); `decay_up` U [P, H, M], N(0, 1/P); `A_log` [H] and
    `dt_bias` [H, M] as in `step_decay`.

    Source: Kimi Linear (arXiv 2510.26692), its decay in section 4.
    """

    def init(key, sizes):
        down, up, steps = jax.random.split(key, 3)
        return {
            "decay_down": _matrix(down, sizes.E, sizes.P),
            "decay_up": _matrix(up, sizes.P, sizes.H, sizes.M),
        } | _init_steps(steps, (sizes.H, sizes.M))

    return Gate(init, lambda params, x, H: _steps(params, _bottleneck(params, x)))


def root_decay(rank: int = 16, root: float = 16.0) -> Gate:
    """Decay per feature through a bottleneck: log_decay = log(sigmoid(x W U + b)) / root.

    Leaves: `decay_down` W [E, rank], N(0, 1/E); `decay_up` U [rank, H, M], N(0, 1/rank);
    `decay_bias` b [H, M], 0.

    Source: GLA (Yang et al. 2024, arXiv 2312.06635) section 4.4.
    """

    def init(key, sizes):
        down, up = jax.random.split(key)
        return {
            "decay_down": _matrix(down, sizes.E, rank),
            "decay_up": _matrix(up, rank, sizes.H, sizes.M),
            "decay_bias": jnp.zeros((sizes.H, sizes.M)),
        }

    def apply(params, x, H):
        bias = params["decay_bias"].astype(jnp.float32)
        return jax.nn.log_sigmoid(_bottleneck(params, x) + bias) / root

    return Gate(init, apply)


def strength() -> Gate:
    """Strength of writing: beta = sigmoid(x W), with the leaf `beta` W [E, H], N(0, 1/E).

    Source: DeltaNet (Yang et al. 2024, arXiv 2406.06484) section 2.2.
    """
    return Gate(
        lambda key, sizes: {"beta": _matrix(key, sizes.E, sizes.H)},
        lambda params, x, H: jax.nn.sigmoid(_product(x, params["beta"])),
    )


GATINGS: dict[str, Gating] = {
    "additive": Gating("additive", {}),
    "retention": Gating("decay", {"log_decay": fixed_decay()}),
    "decay": Gating("decay", {"log_decay": step_decay()}),
    "gla": Gating("gla", {"log_decay": root_decay()}),
    "delta": Gating("delta", {"beta": strength()}),
    "gated_delta": Gating("gated_delta", {"log_decay": step_decay(), "beta": strength()}),
    "kda": Gating("kda", {"log_decay": step_decay_per_feature(), "beta": strength()}),
}


def _matrix(key, *shape):
    return jax.random.normal(key, shape) * shape[0] ** -0.5


def _product(x, weight):
    """Multiply x [B, T, E] by weight [E, ...] in the dtype of x, summed and returned in float32."""
    return jnp.tensordot(x, weight.astype(x.dtype), 1, preferred_element_type=jnp.float32)


def _bottleneck(params, x):
    return _product(_product(x, params["decay_down"]).astype(x.dtype), params["decay_up"])


def _init_steps(key, shape):
    rate, step = jax.random.split(key)
    dt = jnp.exp(jax.random.uniform(step, shape, minval=jnp.log(1e-3), maxval=jnp.log(1e-1)))
    return {
        "A_log": jnp.log(jax.random.uniform(rate, shape[:1], minval=1.0, maxval=16.0)),
        "dt_bias": dt + jnp.log(-jnp.expm1(-dt)),  # the inverse of the softplus
    }


def _steps(params, x):
    """-exp(A_log) softplus(x + dt_bias) for x [B, T, H] or [B, T, H, M]."""
    rate = jnp.exp(params["A_log"].astype(jnp.float32))
    rate = rate.reshape(-1, *[1] * (x.ndim - 3))
    return -rate * jax.nn.softplus(x + params["dt_bias"].astype(jnp.float32))
