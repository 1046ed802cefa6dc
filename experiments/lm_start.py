"""What the training of a language model begins with: a shape, or a checkpoint."""

import dataclasses
from typing import Any, NamedTuple

from flax import nnx

from experiments.common import flags
from experiments.common.tokenizer import Tokenizer
from experiments.lm_settings import Config
from lowrank_attn.convert import with_llops
from lowrank_attn.models.decoder_configs import CONFIGS, DecoderConfig
from lowrank_attn.models.folder import Arrays, build, load_decoder


class Start(NamedTuple):
    """What training begins with.

    Attributes:
        decoder: the shape of the model.
        params: its parameters as a nested dict; None: they are drawn.
        source: where they come from, see `save_decoder`.
    """

    decoder: DecoderConfig
    params: Any
    source: dict[str, Any] | None


def make_start(config: Config, tokenizer: Tokenizer | None) -> Start:
    """The model that the settings describe, without a tokenizer as large as it was published.

    Raises:
        ValueError: if the kernel's options or the tokenizer do not fit.
        FileNotFoundError: if there is no such checkpoint.
    """
    options = flags.parse_options("kernel_options", config.kernel_options)
    if config.checkpoint is None:
        decoder = CONFIGS[config.model]
        if tokenizer is not None:  # rows for its ids only
            decoder = dataclasses.replace(decoder, vocab_size=tokenizer.vocab_size)
        if config.kernel is not None:
            if "linear" not in decoder.layers:
                raise ValueError(f"kernel={config.kernel!r}: {config.model} has no linear layers.")
            decoder = decoder.replace_mixer("linear", kernel=config.kernel, options=options)
        linear = decoder.mixers["linear"] if "linear" in decoder.layers else {}
        if config.samples and linear.get("kernel") == "yat_spherical":
            raise ValueError(
                "samples=True with kernel='yat_spherical' in linear layers, which keep no state to "
                "write text from; give --samples=false."
            )
        return Start(decoder, None, None)
    arrays: Arrays
    decoder, arrays, source = load_decoder(config.checkpoint)
    if tokenizer is not None:
        tokenizer.check_fits(decoder.vocab_size)
    if config.kernel is not None:
        try:
            decoder, arrays = with_llops(decoder, arrays, **options)
        except TypeError as error:
            raise ValueError(f"kernel_options={config.kernel_options!r}: {error}.") from error
    return Start(decoder, nnx.to_pure_dict(nnx.state(build(decoder, arrays))), source)
