"""SLAY: positive random features for the spherical Yat kernel."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_attn.features.base import FeatureMap, Params
from lowrank_attn.features.slay_draws import FREQUENCIES, draw_frequencies
from lowrank_attn.features.slay_polynomials import (
    POLYNOMIALS,
    draw_sketch,
    project,
    tensor_sketch,
)
from lowrank_attn.features.slay_quadrature import quadrature_nodes
from lowrank_attn.features.unit_rows import unit_rows

FUSIONS = ("kronecker", "pairs", "hadamard", "sketch")


def slay(
    num_nodes: int = 1,
    num_anchors: int | None = None,
    num_random: int = 16,
    epsilon: float = 1e-3,
    *,
    polynomial: str = "anchor",
    fusion: str = "kronecker",
    sketch_size: int | None = None,
    laplace_only: bool = False,
    frequencies: str = "orthogonal",
    quadrature: str = "laguerre",
    scaled: bool = True,
) -> FeatureMap:
    """SLAY features for the spherical Yat kernel x^2 / (C - 2x), x = cos(q, k), C = 2 + epsilon.

    With u = x / |x|, R nodes s_r and weights w_r of `quadrature_nodes`, A features g_i(u) of a
    `Polynomial` and F positive random features e_rj(u) of `draw_frequencies` for each node,

        phi(u)[r, i, j] = sqrt(w_r) g_i(u) e_rj(u) / sqrt(A F)

    in the order node, polynomial, random (without the A for polynomials that are no average). The
    mean of a score is sum_r w_r x^2 exp(2 s_r x) ~ x^2 / (C - 2x), with 1 + 2 x^2 in place of x^2
    for anchors. The length of x does not matter, and a zero vector gives zero features.

    `fusion` says how both factors meet:

    * `kronecker`: as above, M = R A F.
    * `pairs`: every e_rj has a g_rj of its own, phi[r, j] = sqrt(w_r / F) g_rj e_rj, M = R F. At
      the same M the variance is several times smaller than that of `kronecker`.
    * `hadamard`: the polynomial factor of e_rj is the square of omega_rj . u / sqrt(2 s_r) itself,
      M = R F. The mean has m^4 + 2 m^2 (1 + 2x) + 1 + 2 x^2, m = sqrt(2 s_r) (1 + x), in place of
      x^2.
    * `sketch`: a signed `tensor_sketch` of the Kronecker product of each node, M = R sketch_size.

    With `laplace_only` there is no polynomial: phi[r, j] = sqrt(w_r C^2 / (4 F)) e_rj, M = R F, for
    the kernel (C^2 / 4) / (C - 2x) = x^2 / (C - 2x) + C / 4 + x / 2. Features of zero vectors stay.

    All features are >= 0 with anchors and no sketch. Scores are >= 0 with `exact` as well, up to
    rounding: in bfloat16 1 or 2 % of them come out slightly negative. With the other polynomials
    and with `sketch` scores may be negative: `non_negative` is False and the normaliser `rms`.

    The draws are constants: one set for each head, no gradient passes into them. Features reach
    about D exp(|omega|), too much for float16; bfloat16 and float32 hold them.

    Defaults. The paper names 2 or 3 nodes with 8 anchors, the authors' code 1 or 2 nodes with 8 to
    64 anchors and 8 to 32 random features, epsilon 1e-3 or 1e-6. The relative variance of one
    random feature is exp(4 s_r (1 + x)) - 1, so each node after the first adds more noise than
    accuracy at these sizes, and anchors count for more than nodes do: one node with 16 x 16
    features has the size of the paper's 2 x 8 x 16, M = 256, and a smaller error: 0.83 against 0.87
    of the output of the exact kernel, for Gaussian rows of D = 64 near a subspace of 8 dimensions,
    where uniform attention has 0.90. On isotropic Gaussian rows of D = 64 neither beats uniform
    attention at this size. With one node, epsilon below about 0.5 changes next to nothing.
    `slay_auto` chooses all of this for a given size.

    Args:
        num_nodes: R, from 1 to 185.
        num_anchors: A >= 1, the size of the polynomial factor where one can be chosen; 16 if None.
        num_random: F >= 1.
        epsilon: > 0, softens the pole of the kernel at x = 1.
        polynomial: name in `POLYNOMIALS`; `pairs` takes `anchor` and `random_maclaurin`.
        fusion: one of `FUSIONS`.
        sketch_size: features per node with fusion `sketch`; 64 if None.
        laplace_only: whether to leave the polynomial factor out.
        frequencies: one of `FREQUENCIES`; `hadamard` does not take `oprf`. Anchors come in
            orthogonal blocks of D as well, unless it is `iid`.
        quadrature: one of `QUADRATURES`.
        scaled: whether features have the scale above, at which the sum of scores is of the order of
            the number of keys; otherwise that of the authors' code, for example D (D + 2) times
            smaller scores of anchors, so that the epsilon of a normaliser may shrink the first
            outputs of a sequence.

    Returns:
        A map with constants `omega` [H, R F, D], `offset` [H, R F] and those of the polynomial and
        of the sketch.

    Raises:
        ValueError: if a number is out of range, a name unknown, or an option without effect given.

    Source: SLAY (arXiv 2602.04915); the paper's experiments use anchors and the Kronecker product.
    We differ in the scale and in orthogonal draws, which `slay_paper` turns off, in drawing anchors
    for each head (the code shares them) and in not clipping the exponent (the clip at 20 is not
    reached there). `exact` has D (D + 1) / 2 columns for the D^2 of the paper. Not in the paper:
    `pairs`, quadratures but `laguerre` and frequencies but `iid`.
    """
    _check(polynomial, fusion, laplace_only, frequencies)
    factor = POLYNOMIALS[polynomial]
    has_factor = not laplace_only and fusion != "hadamard"
    num_anchors = _size(
        "num_anchors",
        num_anchors,
        16,
        has_factor and fusion != "pairs" and polynomial != "exact",
        f"polynomial={polynomial!r}, fusion={fusion!r}, laplace_only={laplace_only}",
    )
    sketch_size = _size("sketch_size", sketch_size, 64, fusion == "sketch", f"fusion={fusion!r}")
    if num_random < 1:
        raise ValueError(f"num_random={num_random}, expected at least 1; 8 to 64 is usual.")
    s, log_w = quadrature_nodes(num_nodes, epsilon, quadrature)
    A = num_nodes * num_random if fusion == "pairs" else num_anchors

    def dim(D: int) -> int:
        if fusion == "sketch":
            return num_nodes * sketch_size
        if fusion == "kronecker" and not laplace_only:
            return num_nodes * factor.columns(D, A) * num_random
        return num_nodes * num_random

    def log_scale(D: int) -> float:
        """The logarithm of what multiplies sqrt(w_r) g e."""
        scale = -0.5 * math.log(num_random)
        if laplace_only:
            return scale + math.log((2.0 + epsilon) / 2.0)
        if fusion == "hadamard":
            return scale if scaled else 2 * scale
        if factor.averaged and fusion != "pairs":
            scale -= 0.5 * math.log(A)
        return scale if scaled else scale + math.log(factor.paper_scale(D, A))

    def init(key: jax.Array, D: int, H: int) -> tuple[Params, Params]:
        factor_key, frequency_key, sketch_key = jax.random.split(key, 3)
        omega, offset = draw_frequencies(frequency_key, H, num_random, D, s, frequencies)
        # sqrt(w_r) goes into the exponent: alone it underflows in float32 from about 50 nodes on.
        log_weight = 0.5 * log_w + log_scale(D)
        if fusion == "hadamard":
            log_weight -= np.log(2.0 * s)  # of the squared frequencies
        offset = offset + log_weight.astype(np.float32)[:, None]
        constant = {"omega": omega.reshape(H, -1, D), "offset": offset.reshape(H, -1)}
        if has_factor:
            constant |= factor.init(factor_key, D, A, H, frequencies != "iid")
        if fusion == "sketch":
            one, two = jax.random.split(sketch_key)
            constant["sketch_of_polynomial"] = draw_sketch(
                one, factor.columns(D, A), sketch_size, H
            )
            constant["sketch_of_random"] = draw_sketch(two, num_random, sketch_size, H)
        return {}, constant

    def apply(
        params: Params, x: jax.Array, *, is_query: bool, positions: jax.Array | None = None
    ) -> jax.Array:
        del is_query, positions
        params = jax.lax.stop_gradient(params)
        u = unit_rows(x)
        exponent = project(u, params["omega"])
        random = jnp.exp(exponent + params["offset"])
        if laplace_only:
            return random.astype(x.dtype)
        if fusion == "hadamard":
            return (jnp.square(exponent) * random).astype(x.dtype)
        g = factor.apply(params, u, A)
        if fusion == "pairs":
            return (g * random).astype(x.dtype)
        nodes = jnp.split(random, num_nodes, axis=1)
        if fusion == "sketch":
            sketches = params["sketch_of_polynomial"], params["sketch_of_random"]
            parts = [tensor_sketch(g, e, *sketches, sketch_size) for e in nodes]
        else:
            parts = [(g[:, :, None] * e[:, None, :]).reshape(len(x), -1) for e in nodes]
        return jnp.concatenate(parts, axis=1).astype(x.dtype)

    non_negative = fusion != "sketch" and (not has_factor or factor.non_negative)
    return FeatureMap(
        dim=dim,
        init=init,
        apply=apply,
        non_negative=non_negative,
        normalize="sum" if non_negative else "rms",
    )


def slay_paper() -> FeatureMap:
    """SLAY as in the paper's table of attention settings: M = 256, for reproduction.

    Two nodes, 8 anchors, 16 random features, epsilon 1e-3, unscaled anchors, independent draws; see
    `slay`. Scores are of order 1 / (D (D + 2)).
    """
    return slay(2, 8, 16, 1e-3, frequencies="iid", scaled=False)


def _check(polynomial: str, fusion: str, laplace_only: bool, frequencies: str) -> None:
    names: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("polynomial", polynomial, tuple(POLYNOMIALS)),
        ("fusion", fusion, FUSIONS),
        ("frequencies", frequencies, FREQUENCIES),
    )
    for name, value, known in names:
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; known: {', '.join(known)}.")
    if laplace_only and (polynomial, fusion) != ("anchor", "kronecker"):
        raise ValueError(
            f"laplace_only=True with polynomial={polynomial!r}, fusion={fusion!r}: there is no "
            "polynomial factor then, so leave both out."
        )
    if fusion == "hadamard" and (polynomial != "anchor" or frequencies == "oprf"):
        raise ValueError(
            f"fusion='hadamard' with polynomial={polynomial!r}, frequencies={frequencies!r}: its "
            "polynomial is the square of the Gaussian frequencies themselves, so leave polynomial "
            "out and take frequencies other than 'oprf', which are not Gaussian."
        )
    if fusion == "pairs" and not POLYNOMIALS[polynomial].averaged:
        averaged = ", ".join(name for name, factor in POLYNOMIALS.items() if factor.averaged)
        raise ValueError(
            f"fusion='pairs' with polynomial={polynomial!r}, whose columns are no estimates of x^2 "
            f"one by one; those of these are: {averaged}."
        )


def _size(name: str, value: int | None, default: int, used: bool, settings: str) -> int:
    """A size that is the default if None, at least 1, and not given where it has no effect."""
    if value is not None and not used:
        raise ValueError(f"{name}={value} has no effect with {settings}; leave it out.")
    value = default if value is None else value
    if value < 1:
        raise ValueError(f"{name}={value}, expected at least 1; 8 to 64 is usual.")
    return value
