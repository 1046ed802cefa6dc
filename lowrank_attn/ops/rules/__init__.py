"""State-update rules. `RULES` lists them by name."""

from lowrank_attn.ops.rules.additive import additive as additive
from lowrank_attn.ops.rules.base import Rule as Rule
from lowrank_attn.ops.rules.decay import decay as decay
from lowrank_attn.ops.rules.delta import delta as delta
from lowrank_attn.ops.rules.gated_delta import gated_delta as gated_delta
from lowrank_attn.ops.rules.gla import gla as gla
from lowrank_attn.ops.rules.kda import kda as kda

RULES: dict[str, Rule] = {
    "additive": additive,
    "decay": decay,
    "gla": gla,
    "delta": delta,
    "gated_delta": gated_delta,
    "kda": kda,
}
