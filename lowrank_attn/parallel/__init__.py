"""Sequences cut over the devices of a mesh: functions to call inside `jax.shard_map`."""

from lowrank_attn.parallel.causal import causal as causal
from lowrank_attn.parallel.halo import halo as halo
from lowrank_attn.parallel.padding import pad_tokens as pad_tokens
from lowrank_attn.parallel.sliding_window import sliding_window as sliding_window
