"""Time against the number of tokens, figure 2 of LLoPS and beyond: python -m experiments.latency

The paper's lengths are 1,000 to 10,000 tokens, forward, on a GPU; here also with gradients, up to a
million tokens, with peak memory, and on CPUs (`--tokens=1000,2000,4000,10000 --heads=1`).
"""

import dataclasses
import sys
from typing import Any

from experiments import sweep
from experiments.common import flags
from experiments.common.flags import setting
from experiments.sweep_report import Published

LINEAR = ("llops_p2", "llops_p4", "based", "slay")
ABOUT = (
    "Protocol of figure 2 of LLoPS: causal attention of q, k, v with D = 128; LLoPS with M = "
    "256 features, BASED with q and k projected to 16 dimensions and M = 273, projections "
    "included. The figure has forward times of LLoPS with p = 2, BASED and softmax at 1,000 "
    "to 10,000 tokens, 1,000 repetitions in PyTorch, batch, heads and device not stated. "
    'Published: both linear methods "much faster than softmax attention at long sequence '
    'lengths", LLoPS "consistently faster than BASED"; numbers are only drawn. Here LLoPS is '
    "`llops`, with norms of q and k, constants and the `rms` normaliser; BASED and SLAY (M = "
    "256) divide by the sum of scores. Kernels at quadratic cost end at "
    "`--longest_quadratic`."
)


@dataclasses.dataclass(frozen=True)
class Config(sweep.Settings):
    """Time causal attention against the number of tokens, as in figure 2 of LLoPS."""

    kernels: str = setting("llops_p2,softmax,based,llops_p4,slay", "kernels, comma between")
    tokens: str = setting(
        "1000,10000,1048576,4000,131072,2000,32768,7000",
        "lengths T, comma between, the most important first",
    )


def quick(config: Config) -> dict[str, Any]:
    """Settings of `--quick`."""
    small = {"tokens": "256,1024", "heads": 1, "seconds_per_point": 0.05}
    return small if config.quick else {}


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings end with exit code 2 and one message."""
    config = flags.parse(Config, argv, preset=quick)
    pairs = [*((name, "softmax") for name in LINEAR), *((p, "based") for p in LINEAR[:2])]
    sweep.run(config, "latency", ABOUT, Published({}, {}, pairs))


if __name__ == "__main__":
    main(sys.argv)
