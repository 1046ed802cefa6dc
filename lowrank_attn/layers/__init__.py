"""Attention layers in Flax NNX (`layers.nnx`) and Flax Linen (`layers.linen`).

`ATTENTION` lists, by name, the attention methods that are no feature map, and `GATINGS` the
state-update rules with the forms of their gates.
"""

from collections.abc import Callable

from lowrank_attn.layers.base import AttentionMethod as AttentionMethod
from lowrank_attn.layers.exact import poly, softmax, yat, yat_spherical
from lowrank_attn.layers.flatten import flatten
from lowrank_attn.layers.gates import GATINGS as GATINGS
from lowrank_attn.layers.gates import Gating as Gating
from lowrank_attn.layers.linformer import linformer
from lowrank_attn.layers.mamba import mamba
from lowrank_attn.layers.nystromformer import nystromformer
from lowrank_attn.layers.polaformer import polaformer
from lowrank_attn.layers.polysketch_mixed import polysketch_mixed
from lowrank_attn.layers.reformer import reformer
from lowrank_attn.layers.skyformer import skyformer
from lowrank_attn.layers.sliding_window import sliding_window
from lowrank_attn.layers.window_linear import window_linear

ATTENTION: dict[str, Callable[..., AttentionMethod]] = {
    "softmax": softmax,
    "poly": poly,
    "yat": yat,
    "yat_spherical": yat_spherical,
    "polysketch_mixed": polysketch_mixed,
    "flatten": flatten,
    "polaformer": polaformer,
    "sliding_window": sliding_window,
    "window_linear": window_linear,
    "nystromformer": nystromformer,
    "skyformer": skyformer,
    "linformer": linformer,
    "reformer": reformer,
    "mamba": mamba,
}
