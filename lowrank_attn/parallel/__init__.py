"""Training over many devices: the mesh and where parameters lie, and sequences cut over devices.

`causal` and `halo` are to be called inside `jax.shard_map`; layers do so where a mesh is current.
"""

from lowrank_attn.parallel.causal import causal as causal
from lowrank_attn.parallel.halo import halo as halo
from lowrank_attn.parallel.mesh import TOKENS as TOKENS
from lowrank_attn.parallel.mesh import make_mesh as make_mesh
from lowrank_attn.parallel.mesh import shardings as shardings
from lowrank_attn.parallel.padding import pad_tokens as pad_tokens
