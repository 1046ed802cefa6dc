"""The `config.json` of Llama and our `DecoderConfig`, in both directions."""

from collections.abc import Mapping
from typing import Any

from lowrank_attn.convert.errors import ConvertError, expect
from lowrank_attn.models.decoder_configs import DecoderConfig, llama_mixer


def llama_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The model of a `config.json` of model_type `llama` or `mistral`.

    Raises:
        KeyError: if a size is missing.
        ConvertError: if it has biases, another activation, scaled rotary positions or a window.
    """
    expect(config, "hidden_act", "silu", "gated MLPs only")
    expect(config, "attention_bias", False, "projections without bias only")
    expect(config, "mlp_bias", False, "projections without bias only")
    expect(config, "rope_scaling", None, "rotary positions as they are only")
    expect(config, "sliding_window", None, "attention to all earlier tokens only")
    rotary = config.get("rope_parameters") or {}  # from transformers 5 on
    if rotary.get("rope_type", "default") != "default":
        raise ConvertError(
            f"config.json has rope_parameters={rotary!r}, expected rope_type 'default': rotary "
            "positions as they are only."
        )
    heads, width = config["num_attention_heads"], config["hidden_size"]
    mixer = llama_mixer(
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or width // heads,
        config.get("rope_theta") or rotary.get("rope_theta", 10000.0),
    )
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        width=width,
        layers=("linear",) * config["num_hidden_layers"],
        mixers={"linear": mixer},
        mlp_width=config["intermediate_size"],
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False),
    )


def published_llama(config: DecoderConfig) -> dict[str, Any]:
    """A `config.json` such that `llama_config` gives the model back, if that is possible."""
    mixer = config.mixers["linear"]
    heads = mixer["num_heads"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": heads,
        "num_key_value_heads": mixer.get("num_kv_heads") or heads,
        "head_dim": mixer.get("qk_dim") or config.width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": mixer.get("rotary_base", 10000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
    }
