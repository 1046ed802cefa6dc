"""Published checkpoints of BASED, its attention baseline, Mamba and Llama, to ours and back.

    config, params, source = read_checkpoint("based-360m")  # a folder with config.json and weights
    config, params = with_llops(config, params)  # the same function, ready to be trained further
    model = build(config, params)

Weights are read without executing anything that is in the files.
"""

from lowrank_attn.convert.checkpoint import Leaf as Leaf
from lowrank_attn.convert.checkpoint import read_checkpoint as read_checkpoint
from lowrank_attn.convert.checkpoint import write_checkpoint as write_checkpoint
from lowrank_attn.convert.errors import ConvertError as ConvertError
from lowrank_attn.convert.kernels import with_kernel as with_kernel
from lowrank_attn.convert.llops import with_llops as with_llops
from lowrank_attn.models.folder import build as build
