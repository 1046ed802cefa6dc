"""Attention operations: `causal`, `bidirectional`, `decode_step`."""

from lowrank_attn.ops.api import bidirectional as bidirectional
from lowrank_attn.ops.api import causal as causal
from lowrank_attn.ops.api import decode_step as decode_step
from lowrank_attn.ops.arguments import State as State
from lowrank_attn.ops.dispatch import IMPLEMENTATIONS as IMPLEMENTATIONS
from lowrank_attn.ops.normalize import NORMALIZERS as NORMALIZERS
from lowrank_attn.ops.rules import RULES as RULES
