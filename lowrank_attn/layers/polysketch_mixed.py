"""PolySketchFormer with exact polynomial scores between tokens of one block."""

import jax
import jax.numpy as jnp

from lowrank_attn import ops
from lowrank_attn.features.polysketch import normalized_rows, polysketch, random_sketch
from lowrank_attn.layers.base import AttentionMethod, Params
from lowrank_attn.layers.visibility import check_same_tokens, segment_numbers
from lowrank_attn.ops.normalize import apply_normalizer


def polysketch_mixed(
    sketch_size: int = 16, degree: int = 4, block_size: int = 128, qk_norm: bool = True
) -> AttentionMethod:
    """Polynomial attention: exact within blocks of tokens, sketched between them.

        score(t, s) = (q_hat_t . k_hat_s)^p      if t // C = s // C
                      phi(q_t) . phi(k_s)        otherwise
        y_t = sum_s score(t, s) v_s / (1 + 1e-6 + sum_s score(t, s))

    phi, x_hat and the parameters are those of `features.polysketch`. Blocks are counted from the
    first token of the call. Computed as sketched attention among all tokens, in float32, plus exact
    minus sketched scores within the blocks.

    Args:
        sketch_size, degree, qk_norm: as in `features.polysketch`.
        block_size: C >= 1; the paper uses 256 to 1024.

    Raises:
        ValueError: if an argument is out of range, or, from `apply`, if shapes do not fit or
            queries and keys are not the same tokens.

    Source: PolySketchFormer (Kacham et al., arXiv 2310.01655), the local exact blocks; its code is
    causal only, ours takes the blocks in both directions. See also `features.polysketch`.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}, expected at least 1.")
    feature_map = polysketch(sketch_size, degree, qk_norm)
    C = block_size

    def apply(
        params: Params,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        B, T, Hq, _ = q.shape
        check_same_tokens(q, k, "blocks hold both")
        H = k.shape[2]
        values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1).astype(jnp.float32)
        attend = ops.causal if causal else ops.bidirectional
        sums, _ = attend(
            q.astype(jnp.float32),
            k.astype(jnp.float32),
            values,
            features=feature_map,
            params=params,
            mask=mask,
            segment_ids=segment_ids,
        )

        def blocks(x, fill=0):  # [B, T, ...] -> [B, N, C, ...]
            x = jnp.pad(x, [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
            return x.reshape(B, -1, C, *x.shape[2:])

        visible = jnp.tri(C, dtype=bool) if causal else jnp.ones((C, C), bool)
        if mask is not None:
            visible = visible & blocks(mask)[:, :, None]
        if segment_ids is not None:
            document = blocks(segment_numbers(segment_ids), -1)
            visible = visible & (document[..., None] == document[:, :, None])
        visible = jnp.broadcast_to(visible, (B, -(-T // C), C, C))

        def one_head(params, q, k, v):  # [B, N, C, G, D], [B, N, C, D], [B, N, C, P + 1]
            def sketch(x):
                flat = random_sketch(params, x.reshape(-1, x.shape[-1]).astype(jnp.float32))
                return flat.reshape(*x.shape[:-1], -1)

            def scores(a, b):
                return jnp.einsum("bncgd,bnsd->bncgs", a, b, precision="highest")

            exact = scores(normalized_rows(params, q), normalized_rows(params, k)) ** degree
            sketched = scores(sketch(q), sketch(k)) ** 2
            correction = jnp.where(visible[:, :, :, None], exact - sketched, 0.0)
            return jnp.einsum("bncgs,bnsp->bncgp", correction, v, precision="highest")

        grouped = blocks(q.reshape(B, T, H, Hq // H, -1))
        local = jax.vmap(one_head, (0, 3, 3, 3), 3)(params, grouped, blocks(k), blocks(values))
        sums += local.reshape(B, -1, Hq, values.shape[-1])[:, :T]
        y = apply_normalizer(sums[..., :-1], sums[..., -1], "sum_plus_one", 1e-6)
        return y.astype(v.dtype)

    return AttentionMethod(init=feature_map.init, apply=apply)
