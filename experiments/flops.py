"""Floating-point operations of a decoder by formula, and the peak rates of devices."""

import jax
from flax import nnx

from lowrank_attn.features import FeatureMap
from lowrank_attn.models.decoder import Decoder
from lowrank_attn.models.decoder_configs import DecoderConfig
from lowrank_attn.models.mixers import LinearMixer, Mamba, SoftmaxAttention

# Dense bfloat16 products with float32 sums, operations per second of one device, from the makers'
# data sheets; by the beginning of `jax.Device.device_kind`, the first that fits.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "TPU v6 lite": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


def peak_flops(device_kind: str) -> float | None:
    """The peak of one device in bfloat16, per second; None if it is not known."""
    return next((x for name, x in PEAK_FLOPS.items() if device_kind.startswith(name)), None)


def training_flops(config: DecoderConfig, length: int) -> float:
    """Operations per token of one training step, three times those of the forward pass.

    Forward: 2 for each parameter, which is one multiplication and one addition (the embedding
    counts if it is the head too), and in addition per layer, with T = length,

        softmax           2 E (T + 1)          scores and values of (T + 1) / 2 tokens on average
        sliding_window    4 E min(W + 1, T)
        linear            2 (H + Hq) M P       what enters the state, and what is read from it;
                          Hq (D + P) (T + 1)   with a kernel without features
        mamba             7 I N                decay, input, sum and output of the state

    Operations that are repeated to save memory, elementwise ones and the states inside of chunks
    do not count.

    Args:
        config: the model.
        length: T.
    """
    model: Decoder = nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(params=0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    if model.head is not None:
        parameters -= model.embedding.embedding.size
    mixers = sum(_mixer_flops(block.mixer, config.width, length) for block in model.blocks)
    return 3.0 * (2 * parameters + mixers)


def _mixer_flops(mixer, E: int, T: int) -> int:
    if isinstance(mixer, SoftmaxAttention):
        return 2 * E * (T + 1) if mixer.window is None else 4 * E * min(mixer.window + 1, T)
    if isinstance(mixer, LinearMixer):
        kernel, (Hq, D), (H, P) = (
            mixer.attend.kernel,
            mixer.query.out_features,
            mixer.value.out_features,
        )
        if isinstance(kernel, FeatureMap):
            return 2 * (H + Hq) * kernel.dim(D) * P
        return Hq * (D + P) * (T + 1)
    if isinstance(mixer, Mamba):
        return 7 * mixer.scan["A_log"].size
    return 0
