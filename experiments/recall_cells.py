"""The cells of `experiments.recall`: which models are trained, and what was published for them."""

import math
from typing import NamedTuple

from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.layers import ATTENTION

STATE = 256  # features of the maps that are compared, as in the paper
# Maps that have as many features as their head size allows: features / head size.
PER_COORDINATE = {"hedgehog": 2, "cosformer": 2, "focused": 1, "elu": 1, "relu": 1}
KERNELS = (
    "llops", "llops_paper", "taylor", "slay", "slay_auto", "polysketch", "polysketch_learned",
    "hedgehog", "mlp", "focused", "elu", "relu", "cosformer", "favor", "favor_relu", "softmax",
)  # fmt: skip


class Cell(NamedTuple):
    """One model.

    Attributes:
        kernel: name of a feature map, or `softmax`.
        p: factors of LLoPS, 0 for others.
        m: features; 0 for softmax, which has none.
        width: E.
        data: name in `MIXES`.
    """

    kernel: str
    p: int
    m: int
    width: int
    data: str

    def qk_dim(self) -> int:
        """The size of queries and keys: the width, or what gives m features; 16 in BASED."""
        if self.kernel == "taylor":
            return (math.isqrt(4 * self.m - 3) - 1) // 2
        if self.kernel in PER_COORDINATE:
            return self.m // PER_COORDINATE[self.kernel]
        return self.width

    def options(self) -> dict:
        """Keyword arguments of the kernel."""
        if self.p:
            return {"num_factors": self.p, "num_features": self.m}
        if self.kernel in ("polysketch", "polysketch_learned"):
            return {"sketch_size": math.isqrt(self.m)}
        if self.kernel in ("mlp", "favor", "favor_relu", "slay_auto"):
            return {"num_features": self.m}
        if self.kernel == "slay":
            return {"num_anchors": self.m // 16}  # and 16 random features
        return {"implementation": "xla"} if self.kernel == "softmax" else {}


# Accuracies in percent as printed: LLoPS, tables 4 and 5 and the review of it. Those of p = 4 at
# widths 128 and 192 are the rows that stand beside BASED.
PUBLISHED = {
    ("llops_paper", 2, 256, 128): 88.7,
    ("llops_paper", 4, 256, 128): 93.2,
    ("llops_paper", 6, 256, 128): 86.6,
    ("llops_paper", 4, 256, 192): 99.0,
    ("taylor", 0, 273, 128): 91.9,
    ("taylor", 0, 273, 192): 98.1,
}


def make(kernel: str, p: int = 4, m: int = STATE, width: int = 128, data: str = "mix") -> Cell:
    """A cell, with p for LLoPS only, BASED's own number of features, and a quarter of all sizes
    for the quick data.
    """
    small = 4 if data == "quick" else 1
    p = p if kernel in ("llops", "llops_paper") else 0
    features = {"taylor": 73 if small > 1 else 273, "softmax": 0}.get(kernel, m // small)
    return Cell(kernel, p, features, width // small, data)


def groups(kernels: tuple[str, ...], quick: bool) -> dict[str, list[Cell]]:
    """The cells of each group."""
    both = ("llops_paper", "llops")
    data = "quick" if quick else "mix"
    return {
        "p": [make(kernel, p=p, data=data) for kernel in both for p in (2, 4, 6)],
        "based": [
            make(kernel, width=width, data=data)
            for width in (64, 128, 192)
            for kernel in ("taylor", *both)
        ],
        "m": [make(kernel, m=m, data=data) for kernel in both for m in (64, 128, 192, 256)],
        "kernels": [make(kernel, data=data) for kernel in kernels],
        "lengths": [
            make(kernel, data=length)
            for length in (("quick",) if quick else ("64", "128", "256"))
            for kernel in ("softmax", "taylor", *both)
        ],
    }


def check_kernels(names: tuple[str, ...]) -> None:
    """Refuse kernels that the experiment has no size for.

    Raises:
        ValueError: naming them, and those that are known.
    """
    for name in names:
        if name not in KERNELS:
            reason = "is unknown"
            if name in FEATURE_MAPS or name in ATTENTION:
                reason = (
                    "is no kernel of this comparison (it is not causal, or a preset of another)"
                )
            raise ValueError(f"kernels: {name!r} {reason}; known: {', '.join(KERNELS)}.")
