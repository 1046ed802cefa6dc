"""State-update rules. `RULES` lists them by name."""

from lowrank_attn.ops.rules.additive import additive as additive
from lowrank_attn.ops.rules.base import Rule as Rule
from lowrank_attn.ops.rules.decay import decay as decay

RULES: dict[str, Rule] = {"additive": additive, "decay": decay}
