"""Feature maps, the mathematical kernels of linear attention. `FEATURE_MAPS` lists them by name."""

import functools
from collections.abc import Callable

from lowrank_attn.features.base import FeatureMap as FeatureMap
from lowrank_attn.features.cosformer import cosformer as cosformer
from lowrank_attn.features.elu import elu as elu
from lowrank_attn.features.favor import favor as favor
from lowrank_attn.features.favor import favor_relu as favor_relu
from lowrank_attn.features.focused import focused as focused
from lowrank_attn.features.hedgehog import hedgehog as hedgehog
from lowrank_attn.features.llops import llops as llops
from lowrank_attn.features.mlp import mlp as mlp
from lowrank_attn.features.polysketch import polysketch as polysketch
from lowrank_attn.features.polysketch import polysketch_learned as polysketch_learned
from lowrank_attn.features.relu import relu as relu
from lowrank_attn.features.slay import slay as slay
from lowrank_attn.features.slay import slay_paper as slay_paper
from lowrank_attn.features.slay_auto import slay_auto as slay_auto
from lowrank_attn.features.slay_plan import cosine_histogram as cosine_histogram
from lowrank_attn.features.slay_plan import plan_slay as plan_slay
from lowrank_attn.features.statistics import active_features as active_features
from lowrank_attn.features.statistics import effective_rank as effective_rank
from lowrank_attn.features.taylor import taylor as taylor
from lowrank_attn.features.unit import unit_length as unit_length

FEATURE_MAPS: dict[str, Callable[..., FeatureMap]] = {
    "llops": llops,
    "llops_paper": functools.partial(llops, constants=False, tied=False),
    "slay": slay,
    "slay_paper": slay_paper,
    "slay_auto": slay_auto,
    "taylor": taylor,
    "polysketch": polysketch,
    "polysketch_learned": polysketch_learned,
    "hedgehog": hedgehog,
    "mlp": mlp,
    "focused": focused,
    "elu": elu,
    "relu": relu,
    "cosformer": cosformer,
    "favor": favor,
    "favor_relu": favor_relu,
}
