"""Speed of the attention operations on this machine: python -m experiments.bench

Every row is one implementation at one shape. Before it is timed, the same call at a small shape is
compared with float32; a row whose error is too large is left out, aloud. Inputs are random and
rotate, so that small shapes do not run from the cache. Writes a CSV and a markdown table.
"""

import csv
import functools
import pathlib
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from lowrank_attn import ops
from lowrank_attn.features.llops import llops

_OUT = flags.DEFINE_string("out", "experiments/results", "Folder of the CSV and the table.")
_TOKENS = flags.DEFINE_list(
    "tokens", ["1024", "2048", "4096", "16384"], "Sequence lengths of the LLoPS and softmax rows."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timings per row, of which the median counts.")
_ONLY = flags.DEFINE_string("only", "", "Regular expression that implementations must match.")

COLUMNS = [
    "implementation", "direction", "kernel", "p", "normalize", "B", "T", "H", "D", "M", "P",
    "dtype", "device", "jax", "ms", "ms_spread", "rel_err", "tflops", "gbps", "roofline_fraction",
]  # fmt: skip
# Measured on one card: bfloat16 matrix products and device-to-device copies.
PEAKS = {"NVIDIA H200": (790e12, 4.3e12)}
# Rounding of inputs, products and outputs to bfloat16, with room for what gradients add up.
FORWARD_TOLERANCE, BACKWARD_TOLERANCE = 6e-3, 1.2e-2
CHUNK = 64  # tokens, in the count of operations


class Case(NamedTuple):
    """One shape; `kernel` is llops (map and attention), features (ready ones) or softmax."""

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
    def backward(self):
        """Whether gradients are taken too."""
        return self.direction.endswith("backward")

    def flops(self) -> float:
        """Operations of the linear (softmax: causal quadratic) form; backward counts twice."""
        if self.kernel == "softmax":
            per_token = self.T * (self.D + self.P)
        else:
            chunk = 1 if self.direction == "decode" else CHUNK
            per_token = 4 * self.M * self.P + chunk * (self.M + self.P)
            per_token += 4 * self.p * self.D * self.M
        return self.B * self.T * self.H * per_token * (3.0 if self.backward else 1.0)

    def bytes(self) -> float:
        """Each input read once and each output written once, in bfloat16 (the state: float32)."""
        inputs = 2 * (self.M if self.kernel == "features" else self.D) + self.P
        moved = inputs + self.P + (2 * inputs + self.P if self.backward else 0)
        if self.direction == "decode":
            moved += 4 * self.M * self.P  # the state, float32, in and out
        return 2.0 * self.B * self.T * self.H * moved

    def small(self) -> "Case":
        """The shape at which it is compared with float32."""
        return self._replace(B=1, T=min(self.T, 1000), H=2)


def cases(tokens: list[int]) -> list[Case]:
    """The shapes, most important first."""
    rows = []
    for T in sorted(tokens, reverse=True):
        shape = (4, T, 16, 128, 256, 128)
        for direction in ("forward", "forward+backward"):
            rows += [
                Case("llops", direction, 2, "none", *shape),
                Case("llops", direction, 4, "none", *shape),
                Case("llops", direction, 4, "rms", *shape),
                Case("llops", direction, 2, "sum", *shape),
                Case("softmax", direction, 0, "softmax", *shape),
            ]
    for direction in ("scan", "scan+backward"):
        for B in (4, 1):
            for M in (128, 256):
                rows.append(Case("features", direction, 0, "none", B, 16384, 16, M, M, 128))
    rows.append(Case("llops", "decode", 4, "rms", 64, 1, 16, 128, 256, 128))
    return rows


def feature_map(case: Case):
    """The map of a case, or None."""
    if case.kernel != "llops":
        return None
    return llops(case.p, case.M, squared=case.normalize == "sum")


def arrays(case: Case, key) -> dict:
    """Random inputs in bfloat16, parameters and state in float32, and the gradient for outputs."""
    *keys, for_params, for_state = jax.random.split(key, 6)
    sizes = {"q": case.D, "k": case.D, "v": case.P, "dy": case.P}
    inputs: dict = {
        name: jax.random.normal(k, (case.B, case.T, case.H, size), jnp.bfloat16)
        for (name, size), k in zip(sizes.items(), keys, strict=True)
    }
    features = feature_map(case)
    inputs["params"] = {} if features is None else features.init(for_params, case.D, case.H)[0]
    if case.direction == "decode":
        inputs["S"] = jax.random.normal(for_state, (case.B, case.H, case.M, case.P))
    return inputs


def attention(case: Case, implementation: str) -> Callable:
    """The timed function of q, k, v, params and S, as one implementation computes it."""
    options = {"normalize": case.normalize, "implementation": implementation}
    features = feature_map(case)

    def softmax(q, k, v, params):
        name = "xla" if implementation == "reference" else implementation
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=name)

    def decode(q, k, v, params, S):
        one = (x[:, 0] for x in (q, k, v))
        y, state = ops.decode_step(
            *one, ops.State(S, None), features=features, params=params, **options
        )
        return y[:, None], state.S

    def causal(q, k, v, params):
        return ops.causal(q, k, v, features=features, params=params, **options)[0]

    if case.kernel == "softmax":
        return softmax
    return decode if case.direction == "decode" else causal


def program(case: Case, implementation: str):
    """What one call computes: outputs, or outputs and the gradients for all inputs."""
    f = attention(case, implementation)

    def run(dy, **inputs):
        if not case.backward:
            return f(**inputs)
        y, vjp = jax.vjp(lambda inputs: f(**inputs), inputs)
        return y, vjp(dy.astype(y.dtype))

    return jax.jit(run)


@functools.cache
def outputs(small: Case, implementation: str) -> list[np.ndarray]:
    """What an implementation computes at a small shape, the reference in float32."""
    inputs = arrays(small, jax.random.key(3))
    if implementation != "reference":
        out = program(small, implementation)(**inputs)
    else:
        with jax.default_matmul_precision("float32"):
            wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
            out = program(small, implementation)(**wide)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(out)]


def error(case: Case, implementation: str) -> float:
    """The largest relative error of an output or gradient against float32."""
    got, want = (outputs(case.small(), name) for name in (implementation, "reference"))
    pairs = zip(got, want, strict=True)
    return float(max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs))


def milliseconds(run, sets, repeats: int) -> tuple[float, float]:
    """Median and spread of the wall time of one call, over repeats of several calls."""
    jax.block_until_ready([run(**x) for x in sets])
    began = time.perf_counter()
    jax.block_until_ready(run(**sets[0]))
    calls = int(np.clip(0.05 / (time.perf_counter() - began), 3, 50))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for i in range(calls):
            out = run(**sets[i % len(sets)])
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / calls * 1e3)
    return float(np.median(times)), max(times) - min(times)


def measure(case: Case, implementation: str, repeats: int) -> dict | None:
    """One row of the table, or None if the call is unsupported or wrong."""
    name = f"{implementation} {case}"
    try:
        rel_err = error(case, implementation)
        limit = BACKWARD_TOLERANCE if case.backward else FORWARD_TOLERANCE
        if not rel_err < limit:
            logging.error("left out, relative error %.1e >= %.1e: %s", rel_err, limit, name)
            return None
        count = int(np.clip(256e6 // case.bytes(), 1, 8))
        sets = [arrays(case, jax.random.key(10 + i)) for i in range(count)]
        ms, spread = milliseconds(program(case, implementation), sets, repeats)
    except (NotImplementedError, ValueError, RuntimeError) as e:
        logging.warning("left out, %s: %s", str(e).splitlines()[0], name)
        return None
    device = jax.devices()[0].device_kind
    flops, moved = case.flops(), case.bytes()
    rate, bandwidth = PEAKS.get(device, (float("nan"), float("nan")))
    return case._asdict() | {
        "implementation": implementation,
        "dtype": "bfloat16",
        "device": device,
        "jax": jax.__version__,
        "ms": f"{ms:.4f}",
        "ms_spread": f"{spread:.4f}",
        "rel_err": f"{rel_err:.1e}",
        "tflops": f"{flops / ms / 1e9:.1f}",
        "gbps": f"{moved / ms / 1e6:.0f}",
        "roofline_fraction": f"{max(flops / rate, moved / bandwidth) / ms * 1e3:.3f}",
    }


def write(rows: list[dict], folder: pathlib.Path) -> None:
    """Write `bench_<device>.csv` and the same as a markdown table."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"\W+", "_", jax.devices()[0].device_kind.lower())
    with open(folder / f"bench_{device}.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([str(row[c]) for c in COLUMNS] for row in rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (folder / f"bench_{device}.md").write_text(table)


def main(_):
    """Measure every case with every implementation that has it."""
    rows: list[dict] = []
    for case in cases([int(t) for t in _TOKENS.value]):
        for implementation in ("cudnn",) if case.kernel == "softmax" else ("pallas_gpu", "xla"):
            if not re.search(_ONLY.value, implementation):
                continue
            row = measure(case, implementation, _REPEATS.value)
            if row is not None:
                rows.append(row)
                print(" ".join(f"{c}={row[c]}" for c in COLUMNS), flush=True)
                write(rows, pathlib.Path(_OUT.value))


if __name__ == "__main__":
    app.run(main)
