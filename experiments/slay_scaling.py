"""Latency and peak memory of SLAY's paper, and beyond: python -m experiments.slay_scaling

The paper's lengths are 128 to 131,072 tokens, forward; here up to a million.
"""

import dataclasses
import sys
from typing import Any

from experiments import sweep
from experiments.common import flags
from experiments.common.flags import setting
from experiments.sweep_report import Published

ABOUT = (
    "Protocol of the scaling tables of SLAY (arXiv 2602.04915): causal attention, forward, E "
    "= 256 in 8 heads of D = 32, B = 1. In parentheses the published numbers: one "
    "A100-SXM4-80GB, PyTorch, float32, a layer with its projections; here only attention, in "
    "the dtype below. The paper's linear baselines store all prefix sums, its softmax is the "
    "naive one (`softmax_naive`), out of memory beyond 16,384; `softmax` here is cuDNN's on "
    "GPUs. `slay_1024` has the size of the authors' script (2 nodes x 32 anchors x 16 random "
    "features; the paper does not state it), `slay` and `llops` have M = 256, `favor_relu` "
    "has the 64 features of the authors' script and is the paper's \"FAVOR+\", `favor` (M = "
    "256) the softmax kernel of Performers. Kernels at quadratic cost end at "
    "`--longest_quadratic`."
)
LENGTHS = (1024, 8192, 16384, 65536, 131072)
MS = {
    "softmax_naive": (0.67, 22.8, 85.6),
    "yat_spherical": (0.90, 37.4, 141),
    "elu": (1.18, 8.42, 18.8, 73.3, 147.6),
    "cosformer": (2.20, 14.8, 35.3, 144.6, 291),
    "favor_relu": (1.55, 9.73, 19.4, 77.5, 155),
    "slay_1024": (2.17, 9.78, 19.0, 75.1, 149.6),
}
MEMORY_LENGTHS = (1024, 8192, 16384, 131072)
MIB = {
    "softmax_naive": (81, 4218, 16746),
    "elu": (112, 826, 1642, 13066),
    "cosformer": (181, 1378, 2746, 21900),
    "favor_relu": (151, 1138, 2267, 18062),
    "slay_1024": (152, 215, 314, 2442),
}


@dataclasses.dataclass(frozen=True)
class Config(sweep.Settings):
    """Latency and peak memory of causal attention, as in the scaling tables of SLAY."""

    kernels: str = setting(
        "slay,softmax,softmax_naive,slay_1024,elu,cosformer,favor_relu,favor,llops_p2,llops_p4,"
        "yat_spherical",
        "kernels, comma between",
    )
    tokens: str = setting(
        "131072,1024,16384,1048576,8192,65536,128",
        "lengths T, comma between, the most important first",
    )
    directions: str = setting("forward", "forward, forward+backward, or both")
    heads: int = setting(8, "H")
    head_size: int = setting(32, "D, also of values")


def quick(config: Config) -> dict[str, Any]:
    """Settings of `--quick`."""
    small = {"tokens": "128,1024", "heads": 1, "seconds_per_point": 0.05}
    return small if config.quick else {}


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings end with exit code 2 and one message."""
    config = flags.parse(Config, argv, preset=quick)
    ms = {name: dict(zip(LENGTHS, values)) for name, values in MS.items()}
    mib = {name: dict(zip(MEMORY_LENGTHS, values)) for name, values in MIB.items()}
    if (config.batch, config.heads, config.head_size) != (1, 8, 32):
        ms, mib = {}, {}
    kernels = config.kernels.split(",")
    pairs = [
        (kernel, quadratic)
        for quadratic in ("softmax", "softmax_naive")
        for kernel in kernels
        if kernel not in sweep.QUADRATIC
    ]
    sweep.run(config, "slay_scaling", ABOUT, Published(ms, mib, pairs))


if __name__ == "__main__":
    main(sys.argv)
