"""Linear attention with learnable low-rank and spherical feature maps for JAX.

Letters used for sizes throughout: B batch, T tokens, H heads, D head size before the feature map,
M feature size after it, P value size per head, R rank or quadrature nodes inside a map, C chunk
length, N = T / C chunks, E model width. Arrays are lower case; S is the state, z its normaliser.
"""
