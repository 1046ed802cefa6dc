"""Depthwise convolution of values over their neighbours in the sequence or on a grid."""

import jax
import jax.numpy as jnp

from lowrank_attn.layers.base import Params


def check_kernel(kernel_size: int, grid_width: int | None) -> None:
    """Check the options of `depthwise`.

    Raises:
        ValueError: if the kernel size is not odd and positive or the grid has no columns.
    """
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size={kernel_size}, expected an odd number such as 5.")
    if grid_width is not None and grid_width < 1:
        raise ValueError(f"grid_width={grid_width}, expected at least 1, or None for sequences.")


def init_depthwise(
    key: jax.Array, D: int, H: int, kernel_size: int, grid_width: int | None
) -> Params:
    """Draw `conv` [H, D, rows, kernel_size], uniform in +-1 / sqrt(taps), and `conv_bias` [H, D].

    Kernels have kernel_size rows on a grid and 1 in a sequence.
    """
    rows = 1 if grid_width is None else kernel_size
    bound = (rows * kernel_size) ** -0.5
    conv = jax.random.uniform(key, (H, D, rows, kernel_size), minval=-bound, maxval=bound)
    return {"conv": conv, "conv_bias": jnp.zeros((H, D))}


def depthwise(
    params: Params,
    v: jax.Array,
    *,
    num_queries: int,
    causal: bool,
    mask: jax.Array | None,
    segment_ids: jax.Array | None,
    grid_width: int | None,
) -> jax.Array:
    """Add up neighbours, each channel for itself, with zeros outside, in float32.

    In a sequence the kernel is centred on the token, or ends with it if `causal`; it does not reach
    across a change of `segment_ids`. On a grid the T tokens are the rows, one after another, of an
    image of width `grid_width`.

    Args:
        params: `conv` and `conv_bias`, see `init_depthwise`.
        v: [B, T, H, P] with P the D of the parameters.
        num_queries: number of queries, which must be T.
        causal, mask, segment_ids: as in `AttentionMethod`; hidden values count as 0.
        grid_width: None for sequences.

    Returns:
        [B, T, H, P], float32.

    Raises:
        ValueError: if shapes do not fit, or a grid is to be causal or packed.
    """
    B, T, H, P = v.shape
    conv = params["conv"]
    rows, columns = conv.shape[2:]
    if conv.shape[1] != P:
        raise ValueError(
            f"v has head size {P}, expected {conv.shape[1]} as in q and k: the kernel of the "
            "convolution has a row for each channel."
        )
    if num_queries != T:
        raise ValueError(
            f"v has {T} tokens, expected {num_queries} as in q: the convolution adds neighbours' "
            "values to each token's output."
        )
    if grid_width is not None and (causal or segment_ids is not None or T % grid_width):
        raise ValueError(
            f"grid_width={grid_width} with causal={causal}, "
            f"{'no ' if segment_ids is None else ''}segment_ids and {T} tokens: expected a whole "
            "image, neither causal nor packed. Use grid_width=None for sequences."
        )
    width = T if grid_width is None else grid_width
    above, left = rows // 2, columns - 1 if causal else columns // 2
    padding = ((0, 0), (above, rows - 1 - above), (left, columns - 1 - left))
    values = v.astype(jnp.float32)
    if mask is not None:
        values = jnp.where(mask[:, :, None, None], values, 0.0)
    values = jnp.pad(values.reshape(B, T // width, width, H, P), (*padding, (0, 0), (0, 0)))
    document = None
    if segment_ids is not None:
        begins = segment_ids[:, 1:] != segment_ids[:, :-1]
        document = jnp.pad(jnp.cumsum(begins, axis=1), ((0, 0), (1, 0)))[:, None]  # [B, 1, T]
        neighbours = jnp.pad(document, padding, constant_values=-1)

    def tap(i, j):
        here = (slice(None), slice(i, i + T // width), slice(j, j + width))
        values_here = values[here]
        if document is not None:
            same = neighbours[here] == document
            values_here = jnp.where(same[..., None, None], values_here, 0.0)
        return values_here * conv[:, :, i, j]

    y = sum(tap(i, j) for i in range(rows) for j in range(columns))
    return y.reshape(B, T, H, P) + params["conv_bias"]
