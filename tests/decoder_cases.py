"""Small decoders with random parameters, and golden checkpoints in their published layouts."""

import json
import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from lowrank_attn.convert.safetensors import write_safetensors
from lowrank_attn.models.decoder_configs import DecoderConfig

GOLDEN = pathlib.Path(__file__).parent / "golden"
MAMBA = {
    "d_model": 48,
    "n_layer": 3,
    "vocab_size": 97,
    "pad_vocab_size_multiple": 1,
    "ssm_cfg": {"d_state": 16, "d_conv": 4, "expand": 2, "dt_rank": 3},
    "rms_norm": True,
    "tie_embeddings": True,
}


def every_mixer(vocab_size):
    """A configuration with a layer of each mixer."""
    return DecoderConfig(
        vocab_size,
        16,
        ("short_conv", "linear", "sliding_window", "softmax", "mamba"),
        {
            "linear": {"num_heads": 2, "qk_dim": 4, "kernel": "taylor"},
            "sliding_window": {"num_heads": 2, "window": 6},
            "softmax": {"num_heads": 2},
            "mamba": {"state_size": 4},
        },
        mlp_width=32,
        vocab_multiple=8,
    )


def random_model(config, seed=1, deviation=0.3, around_one=("scale",), **arguments):
    """A model with normal parameters, made without compiling the draws of its layers."""
    model = nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(0), **arguments))
    random = np.random.default_rng(seed)
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        draw = deviation * random.normal(size=variable.shape) + (path[-1] in around_one)
        variable.set_value(jnp.asarray(draw, variable.dtype))
    nnx.update(model, state)
    return model


def golden(name):
    """The weights by name, float32, the configuration, and the other arrays."""
    arrays = np.load(GOLDEN / f"{name}.npz")
    weights = {}
    for key in arrays.files:
        if key.startswith("param.") and key != "param.meta":
            bits = arrays[key].dtype == np.uint16
            array = arrays[key].view(ml_dtypes.bfloat16) if bits else arrays[key]
            weights[key.removeprefix("param.")] = array.astype(np.float32)
    config = json.loads(str(arrays["config"])) if "config" in arrays else MAMBA
    return weights, config, arrays


def write_published(folder, weights, config):
    """A folder with a checkpoint, as it is published."""
    folder.mkdir(exist_ok=True)
    shapes = {name: (array.shape, array.dtype) for name, array in weights.items()}
    write_safetensors(folder / "model.safetensors", shapes, iter(weights.items()))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
