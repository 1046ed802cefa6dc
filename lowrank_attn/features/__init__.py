"""Feature maps, the mathematical kernels of linear attention. `FEATURE_MAPS` lists them by name."""

import functools
from collections.abc import Callable

from lowrank_attn.features.base import FeatureMap as FeatureMap
from lowrank_attn.features.cosformer import cosformer as cosformer
from lowrank_attn.features.elu import elu as elu
from lowrank_attn.features.favor import favor as favor
from lowrank_attn.features.favor import favor_relu as favor_relu
from lowrank_attn.features.llops import llops as llops
from lowrank_attn.features.relu import relu as relu
from lowrank_attn.features.slay import slay as slay
from lowrank_attn.features.slay import slay_paper as slay_paper
from lowrank_attn.features.statistics import active_features as active_features
from lowrank_attn.features.statistics import effective_rank as effective_rank
from lowrank_attn.features.taylor import taylor as taylor

FEATURE_MAPS: dict[str, Callable[..., FeatureMap]] = {
    "llops": llops,
    "llops_paper": functools.partial(llops, constants=False, tied=False),
    "slay": slay,
    "slay_paper": slay_paper,
    "taylor": taylor,
    "elu": elu,
    "relu": relu,
    "cosformer": cosformer,
    "favor": favor,
    "favor_relu": favor_relu,
}
