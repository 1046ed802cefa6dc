"""Shapes of language models by name: published ones, and small ones for tests and first runs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lowrank_attn.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What a `Decoder` is, apart from dtypes and how it is computed; all of it fits into JSON.

    Attributes are the arguments of `Decoder`.
    """

    vocab_size: int
    width: int
    layers: tuple[str, ...]
    mixers: Mapping[str, Mapping[str, Any]]
    mlp_width: int = 0
    vocab_multiple: int = 1
    norm_epsilon: float = 1e-5

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """The inverse of `dataclasses.asdict`, also after JSON has made lists of tuples.

        Raises:
            ValueError: for missing and unknown fields.
        """
        try:
            return cls(**{**values, "layers": tuple(values.get("layers", ()))})
        except TypeError as error:
            raise ValueError(f"this is no description of a decoder: {error}.") from error

    def make(self, **arguments) -> Decoder:
        """Build the model; `arguments` are the others of `Decoder`: rngs, dtype, remat."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Decoder(**fields, **arguments)

    def replace_mixer(self, name: str, **options: Any) -> "DecoderConfig":
        """The same model with other options of one mixer."""
        mixers = {**self.mixers, name: {**self.mixers.get(name, {}), **options}}
        return dataclasses.replace(self, mixers=mixers)


def based_layers(
    num_layers: int, linear: tuple[int, ...], sliding: tuple[int, ...]
) -> tuple[str, ...]:
    """BASED's mixers: convolutions except in the layers that are listed, `sliding` first."""
    names = dict.fromkeys(linear, "linear") | dict.fromkeys(sliding, "sliding_window")
    return tuple(names.get(i, "short_conv") for i in range(num_layers))


def based_mixers(num_heads: int, window: int) -> dict[str, dict[str, Any]]:
    """Options of BASED's mixers, Taylor features of 16 dimensions per head."""
    return {
        "short_conv": {"expand": 2, "kernel_size": 3},
        "linear": {"num_heads": num_heads, "qk_dim": 16, "kernel": "taylor"},
        "sliding_window": {"num_heads": num_heads, "window": window},
    }


def _based(width, num_heads, layers, window=128):
    return DecoderConfig(
        vocab_size=50257,
        width=width,
        layers=layers,
        mixers=based_mixers(num_heads, window),
        mlp_width=2 * width,
        vocab_multiple=8,
    )


def _attention(width, num_heads, num_layers, mlp_width):
    return DecoderConfig(
        vocab_size=50257,
        width=width,
        layers=("softmax",) * num_layers,
        mixers={"softmax": {"num_heads": num_heads, "rotary_fraction": 0.5}},
        mlp_width=mlp_width,
        vocab_multiple=16,
    )


def _mamba(vocab_size, width, num_layers):
    return DecoderConfig(
        vocab_size=vocab_size,
        width=width,
        layers=("mamba",) * num_layers,
        mixers={"mamba": {"expand": 2, "state_size": 16, "conv_size": 4}},
        vocab_multiple=16,
    )


def _gpt2(width, num_heads, num_layers):
    """Attention in every layer, in heads as GPT-2's, with an MLP of its number of parameters.

    GPT-2 has learned positions, LayerNorm and a GELU; here are rotary positions, RMSNorm and a
    gated MLP of 8/3 of the width in place of 4.
    """
    return DecoderConfig(
        vocab_size=50257,
        width=width,
        layers=("linear",) * num_layers,
        mixers={"linear": {"num_heads": num_heads, "kernel": "softmax", "use_rotary": True}},
        mlp_width=8 * width // 3,
        vocab_multiple=64,
    )


_tiny_based = based_layers(5, (1,), (2,))

CONFIGS: dict[str, DecoderConfig] = {
    "based-360m": _based(1024, 16, based_layers(27, (1, 6, 11, 16, 21), (2, 7, 12, 17, 22))),
    "based-1b": _based(
        1792, 16, based_layers(36, (1, 6, 11, 16, 21, 27, 33), (2, 7, 12, 17, 22, 28, 34))
    ),
    "attn-360m": _attention(1024, 16, 24, 2816),
    "mamba-360m": _mamba(50277, 1024, 46),
    "gpt2-small": _gpt2(768, 12, 12),
    "based-60m": _based(512, 8, based_layers(10, (1, 6), (2, 7))),
    "attn-60m": _attention(512, 8, 10, 1408),
    "based-tiny": dataclasses.replace(_based(128, 4, _tiny_based, window=32), mlp_width=256),
    "attn-tiny": _attention(128, 4, 3, 512),
    "gpt2-tiny": _gpt2(48, 2, 2),
    "mamba-tiny": _mamba(50257, 128, 3),
}
