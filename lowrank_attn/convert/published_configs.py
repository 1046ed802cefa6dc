"""The `config.json` of published checkpoints and our `DecoderConfig`, in both directions."""

from collections.abc import Mapping
from typing import Any

from lowrank_attn.convert.errors import ConvertError, expect
from lowrank_attn.convert.llama_config import llama_config, published_llama
from lowrank_attn.models.decoder_configs import DecoderConfig, based_layers

# The class of a mixer, the last part of its `_target_`, and what it is here.
_TARGETS = {
    "BaseConv": "short_conv",
    "LinearAttention": "linear",
    "SlidingAttention": "sliding_window",
    "MHA": "softmax",
}
# What BASED's code reads besides: options that our model has as published, or not at all.
_GPT_OPTIONS = {
    "activation_function": "swiglu",
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_mlp": False,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "use_flash_attn": True,
    "special_initializer": True,
    "reorder_and_upcast_attn": False,
    "scale_attn_by_inverse_layer_idx": False,
    "attn_pdrop": 0,
    "embd_pdrop": 0,
    "resid_pdrop": 0,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "qkv_proj_bias": False,
    "out_proj_bias": False,
    "max_position_embeddings": 0,
    "n_positions": 2048,
}


def read_config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DecoderConfig:
    """The model of a checkpoint.

    Args:
        config: `config.json` of BASED, of its attention or Mamba baseline, of mamba_ssm, or of a
            Mamba, Llama or Mistral of transformers.
        shapes: name -> shape of the checkpoint's arrays; BASED's code widens the MLP to a multiple
            of 128 or 256, so its width is read off them.

    Raises:
        ConvertError: if it is none of these, or has an option that our model has not.
    """
    try:
        if "n_embd" in config:
            return _gpt(config, shapes)
        if "d_model" in config:
            return _mamba_ssm(config)
        if config.get("model_type") == "mamba":
            return _mamba_transformers(config)
        if config.get("model_type") in ("llama", "mistral"):
            return llama_config(config)
    except KeyError as error:
        raise ConvertError(f"config.json has no {error}, which the model needs.") from error
    raise ConvertError(
        "config.json is not of BASED, its baselines, Mamba or Llama: expected 'n_embd', 'd_model' "
        f"or model_type 'mamba', 'llama' or 'mistral', found {', '.join(sorted(config)[:12])}."
    )


def published_config(config: DecoderConfig) -> dict[str, Any]:
    """A `config.json` for a model, such that `read_config` gives the model back.

    Raises:
        ConvertError: if it mixes layers that no published layout has together, or has options that
            the layout cannot express.
    """
    kinds, mixers = set(config.layers), config.mixers
    if kinds == {"linear"} and mixers.get("linear", {}).get("kernel") == "softmax":
        return published_llama(config)
    if kinds == {"mamba"}:
        ssm = {"state_size": "d_state", "conv_size": "d_conv", "expand": "expand"}
        options = mixers.get("mamba", {})
        rank = options.get("dt_rank")
        return {
            "d_model": config.width,
            "n_layer": len(config.layers),
            "vocab_size": config.vocab_size,
            "ssm_cfg": {there: options[here] for here, there in ssm.items() if here in options}
            | {"dt_rank": "auto" if rank is None else rank},
            "rms_norm": True,
            "residual_in_fp32": True,
            "pad_vocab_size_multiple": config.vocab_multiple,
            "norm_epsilon": config.norm_epsilon,
            "tie_embeddings": True,
        }
    based = {"short_conv", "linear", "sliding_window"}
    if kinds != {"softmax"} and not kinds <= based:
        raise ConvertError(
            f"no published layout has the layers {', '.join(sorted(kinds))} together; one has "
            f"{', '.join(sorted(based))}, one softmax, one mamba."
        )
    heads = [mixers.get(kind, {}).get("num_heads") for kind in sorted(kinds - {"short_conv"})]
    published = _GPT_OPTIONS | {
        "n_embd": config.width,
        "n_layer": len(config.layers),
        "n_head": heads[0] if heads else 1,
        "n_inner": config.mlp_width,
        "vocab_size": config.vocab_size,
        "pad_vocab_size_multiple": config.vocab_multiple,
        "layer_norm_epsilon": config.norm_epsilon,
    }
    if kinds == {"softmax"}:
        fraction = mixers.get("softmax", {}).get("rotary_fraction", 1.0)
        return published | {"rotary_emb_fraction": fraction}
    module = "based.models.mixers."
    linear, sliding = mixers.get("linear", {}), mixers.get("sliding_window", {})
    return published | {
        "rotary_emb_fraction": 1,
        "alt_mixer_layers": [i for i, kind in enumerate(config.layers) if kind == "linear"],
        "alt_mixer_2_layers": [i for i, k in enumerate(config.layers) if k == "sliding_window"],
        "mixer": {
            "_target_": module + "convolution.BaseConv",
            "l_max": 2048,
            "use_bias": True,
            "expand_proj": 2 * mixers.get("short_conv", {}).get("expand", 2),
        },
        "alt_mixer": {
            "_target_": module + "linear_attention.LinearAttention",
            "l_max": 2048,
            "feature_dim": linear.get("qk_dim", 16),
            "feature_map": {
                "_target_": module + "linear_attention.TaylorExp",
                "input_dim": linear.get("qk_dim", 16),
            },
            "num_heads": linear.get("num_heads"),
            "parallel_implementation": "quadratic",
        },
        "alt_mixer_2": {
            "_target_": module + "slide_attention.SlidingAttention",
            "window_size": 2 * sliding.get("window", 128),
            "num_heads": sliding.get("num_heads"),
            "causal": True,
        },
    }


def _gpt(config, shapes):
    expect(config, "activation_function", "swiglu", "gated MLPs only")
    expect(config, "rms_norm", True, "RMSNorm only")
    expect(config, "rotary_emb_base", 10000, "other bases are not supported")
    n_head = config["n_head"]
    parts = {name: config.get(name) or {} for name in ("mixer", "alt_mixer", "alt_mixer_2")}
    default = _mixer_name(parts["mixer"], "softmax")
    if default == "softmax":
        layers = ("softmax",) * config["n_layer"]
    else:
        for name, expected in (
            ("mixer", "short_conv"), ("alt_mixer", "linear"), ("alt_mixer_2", "sliding_window"),
        ):  # fmt: skip
            found = _mixer_name(parts[name], expected)
            if found != expected:
                raise ConvertError(f"config.json has a {found} as {name}, expected {expected}.")
        layers = based_layers(
            config["n_layer"],
            tuple(config.get("alt_mixer_layers") or ()),
            tuple(config.get("alt_mixer_2_layers") or ()),
        )
    conv, linear, sliding = parts.values()
    mixers = {
        "short_conv": {"expand": conv.get("expand_proj", 4) // 2, "kernel_size": 3},
        "linear": {
            "num_heads": linear.get("num_heads", n_head),
            "qk_dim": linear.get("feature_dim", 16),
            "kernel": "taylor",
        },
        # a query of BASED's code sees half of the configured window before itself
        "sliding_window": {
            "num_heads": sliding.get("num_heads", n_head),
            "window": sliding.get("window_size", 256) // 2,
        },
        "softmax": {"num_heads": n_head, "rotary_fraction": config.get("rotary_emb_fraction", 0)},
    }
    fc1 = "transformer.layers.0.mlp.fc1.weight"
    if fc1 not in shapes:
        raise ConvertError(f"{fc1} is missing.")
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        width=config["n_embd"],
        layers=layers,
        mixers={name: options for name, options in mixers.items() if name in layers},
        mlp_width=shapes[fc1][0] // 2,
        vocab_multiple=config.get("pad_vocab_size_multiple", 1),
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
    )


def _mamba_ssm(config):
    expect(config, "rms_norm", True, "RMSNorm only")
    expect(config, "tie_embeddings", True, "tied embeddings only")
    ssm = config.get("ssm_cfg") or {}
    rank = ssm.get("dt_rank", "auto")
    return _mamba(
        config["vocab_size"], config["d_model"], config["n_layer"], ssm.get("expand", 2),
        ssm.get("d_state", 16), ssm.get("d_conv", 4), None if rank == "auto" else rank,
        config.get("pad_vocab_size_multiple", 8), config.get("norm_epsilon", 1e-5),
    )  # fmt: skip


def _mamba_transformers(config):
    expect(config, "use_bias", False, "projections without bias only")
    expect(config, "use_conv_bias", True, "convolutions with bias only")
    rank = config.get("time_step_rank", "auto")
    return _mamba(
        config["vocab_size"], config["hidden_size"], config["num_hidden_layers"],
        config.get("expand", 2), config.get("state_size", 16), config.get("conv_kernel", 4),
        None if rank == "auto" else rank, 1, config.get("layer_norm_epsilon", 1e-5),
    )  # fmt: skip


def _mamba(vocab, width, depth, expand, state_size, conv_size, dt_rank, multiple, epsilon):
    options = {
        "expand": expand,
        "state_size": state_size,
        "conv_size": conv_size,
        "dt_rank": dt_rank,
    }
    return DecoderConfig(
        vocab_size=vocab,
        width=width,
        layers=("mamba",) * depth,
        mixers={"mamba": options},
        vocab_multiple=multiple,
        norm_epsilon=epsilon,
    )


def _mixer_name(part, default):
    target = part.get("_target_", "").rsplit(".", 1)[-1]
    if target and target not in _TARGETS:
        raise ConvertError(
            f"config.json has a mixer {part['_target_']!r}, which is unknown; known: "
            f"{', '.join(_TARGETS)}."
        )
    return _TARGETS.get(target, default)
