"""What `experiments.bench` measures: shapes, operation counts, inputs, the timed functions."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_attn import ops
from lowrank_attn.features.llops import llops
from lowrank_attn.features.taylor import taylor

CHUNK = 64  # tokens, in the count of operations
LONGEST_QUADRATIC = 16384  # tokens of softmax rows and of gradients
FLA_CHUNK, FLA_BASED = "fla_chunk_linear_attn", ("fla_fused_chunk_based", "fla_parallel_based")


class Case(NamedTuple):
    """One shape.

    Attributes:
        kernel: llops (map and causal attention), llops_plain (the same without the norm and the
            constants, the paper's map), llops_bidirectional, taylor (the map of BASED), features
            (causal attention over ready features) or softmax.
        direction: forward, forward+backward, scan, scan+backward or decode.
        p: factors of the map, 0 without one.
    """

    kernel: str
    direction: str
    p: int
    normalize: str
    B: int
    T: int
    H: int
    D: int
    M: int
    P: int

    @property
    def backward(self) -> bool:
        """Whether gradients are taken too."""
        return self.direction.endswith("backward")

    @property
    def chunked(self) -> bool:
        """Whether it is causal over many tokens and computed in chunks."""
        quadratic_or_total = self.kernel in ("softmax", "llops_bidirectional")
        return self.direction != "decode" and not quadratic_or_total

    @property
    def usual(self) -> bool:
        """Whether normaliser, batch, degree and size are those that speed is compared at."""
        plain = self.normalize == "none" and self.p in (0, 2) and self.kernel != "softmax"
        return plain and (self.B, self.T, self.M) == (4, LONGEST_QUADRATIC, 256)

    def flops(self) -> float:
        """Operations of the linear (softmax: causal quadratic) form; backward counts twice."""
        if self.kernel == "softmax":
            per_token = self.T * (self.D + self.P)
        else:
            per_token = 4 * self.M * self.P + 4 * self.p * self.D * self.M
            if self.chunked:
                per_token += CHUNK * (self.M + self.P)
        return self.B * self.T * self.H * per_token * (3.0 if self.backward else 1.0)

    def bytes(self) -> float:
        """Each input read once and each output written once, in bfloat16 (the state: float32)."""
        inputs = 2 * self.D + self.P
        moved = inputs + self.P + (2 * inputs + self.P if self.backward else 0)
        if self.direction == "decode":
            moved += 4 * self.M * self.P  # the state, float32, in and out
        return 2.0 * self.B * self.T * self.H * moved

    def small(self) -> "Case":
        """The shape at which it is compared with float32."""
        return self._replace(B=1, T=min(self.T, 1000), H=2)


def cases(tokens: list[int], memory_tokens: int) -> list[Case]:
    """The shapes, most important first.

    Args:
        tokens: lengths of the sweeps; the other rows have the largest one up to 16,384, or the
            smallest.
        memory_tokens: length of the row that shows the memory of a long sequence; 0: no such row.
    """
    usual = max([T for T in tokens if T <= LONGEST_QUADRATIC] or [min(tokens)])
    sizes = (16, 128, 256, 128)
    both = ("forward", "forward+backward")

    def llops_at(T, direction, p, normalize="none", B=4):
        return Case("llops", direction, p, normalize, B, T, *sizes)

    def softmax_at(T, direction):
        return Case("softmax", direction, 0, "softmax", 4, T, *sizes)

    rows = [llops_at(usual, *row) for row in (
        ("forward", 2), ("forward", 4), ("forward", 2, "sum"), ("forward+backward", 2),
    )]  # fmt: skip
    rows += [Case("llops_plain", *row, "none", 4, usual, *sizes) for row in (
        ("forward", 2), ("forward", 4), ("forward+backward", 2),
    )]  # fmt: skip
    for direction in ("scan", "scan+backward"):
        for B in (4, 1):
            for M in (128, 256):
                rows.append(Case("features", direction, 0, "none", B, usual, 16, M, M, 128))
    for p in (4, 2):
        rows.append(Case("llops", "decode", p, "rms", 64, 1, *sizes))
    for T in sorted(tokens, reverse=True):
        rows += [llops_at(T, "forward", 2), llops_at(T, "forward", 4)]
        if T <= LONGEST_QUADRATIC:
            rows.append(softmax_at(T, "forward"))
    if memory_tokens:
        rows.append(llops_at(memory_tokens, "forward", 2, B=1))
    rows += [llops_at(usual, "forward", 4, "rms")]
    rows += [llops_at(usual, "forward+backward", *row) for row in ((4,), (4, "rms"), (2, "sum"))]
    for T in sorted(tokens, reverse=True):
        if T <= LONGEST_QUADRATIC:
            rows += [llops_at(T, "forward+backward", 2), softmax_at(T, "forward+backward")]
    for direction in both:
        rows.append(Case("llops_bidirectional", direction, 4, "rms", 4, usual, *sizes))
        rows.append(Case("taylor", direction, 0, "sum", 4, usual, 16, 16, 273, 128))
    return list(dict.fromkeys(rows))


def implementations(case: Case, kernels: str | None) -> list[str]:
    """Who computes a case: our kernels (None: the platform has none), `xla`, and peers."""
    if case.kernel == "softmax":
        return ["cudnn"]
    ours = ["xla"] if kernels is None else [kernels, "xla"]
    repeated = case.kernel == "llops_plain" or (case.backward and not case.usual)
    if repeated and kernels is not None:
        ours.remove("xla")  # a GPU compiler takes half a minute for each of its gradients
    if case.kernel == "features":
        return [*ours, FLA_CHUNK]
    return [*ours, *FLA_BASED] if case.kernel == "taylor" else ours


def arrays(case: Case, key: jax.Array) -> dict:
    """Random inputs in bfloat16, parameters and state in float32, and the gradient for outputs."""
    *keys, for_params, for_state = jax.random.split(key, 6)
    sizes = {"q": case.D, "k": case.D, "v": case.P, "dy": case.P}
    inputs: dict = {
        name: jax.random.normal(k, (case.B, case.T, case.H, size), jnp.bfloat16)
        for (name, size), k in zip(sizes.items(), keys, strict=True)
    }
    features = _feature_map(case)
    inputs["params"] = {} if features is None else features.init(for_params, case.D, case.H)[0]
    if case.direction == "decode":
        inputs["S"] = jax.random.normal(for_state, (case.B, case.H, case.M, case.P))
    return inputs


def program(case: Case, implementation: str):
    """What one call computes: outputs, or outputs and the gradients for all inputs."""
    f = _attention(case, implementation)

    def run(dy, **inputs):
        if not case.backward:
            return f(**inputs)
        y, vjp = jax.vjp(lambda inputs: f(**inputs), inputs)
        return y, vjp(dy.astype(y.dtype))

    return jax.jit(run)


def _feature_map(case):
    if case.kernel == "llops_plain":
        return llops(case.p, case.M, constants=False, tied=False, qk_norm=False)
    if case.kernel in ("llops", "llops_bidirectional"):
        return llops(case.p, case.M, squared=case.normalize == "sum")
    return taylor() if case.kernel == "taylor" else None


def _attention(case: Case, implementation: str) -> Callable:
    """The function of q, k, v, params and S, as one implementation computes it."""
    options = {"normalize": case.normalize, "implementation": implementation}
    features = _feature_map(case)

    def softmax(q, k, v, params):
        name = "xla" if implementation == "reference" else implementation
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=name)

    def decode(q, k, v, params, S):
        one = (x[:, 0] for x in (q, k, v))
        y, state = ops.decode_step(
            *one, ops.State(S, None), features=features, params=params, **options
        )
        return y[:, None], state.S

    def attend(q, k, v, params):
        op = ops.bidirectional if case.kernel == "llops_bidirectional" else ops.causal
        return op(q, k, v, features=features, params=params, **options)[0]

    if case.kernel == "softmax":
        return softmax
    return decode if case.direction == "decode" else attend
