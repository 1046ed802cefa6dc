"""Linear attention with learnable low-rank and spherical feature maps for JAX.

Letters used for sizes throughout: B batch, T tokens, H heads, D head size before the feature map,
M feature size after it, P value size per head, R rank or quadrature nodes inside a map, C chunk
length, N = T / C chunks, E model width. Arrays are lower case; S is the state, z its normaliser.
"""

from lowrank_attn.features import FEATURE_MAPS as FEATURE_MAPS
from lowrank_attn.features import FeatureMap as FeatureMap
from lowrank_attn.layers.nnx import LinearAttention as LinearAttention
from lowrank_attn.ops import State as State
from lowrank_attn.ops import bidirectional as bidirectional
from lowrank_attn.ops import causal as causal
from lowrank_attn.ops import decode_step as decode_step
