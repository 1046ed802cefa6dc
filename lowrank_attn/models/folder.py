"""A decoder on disk: a folder with `decoder.json` and the parameters in Orbax's format."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from lowrank_attn.models.decoder import Decoder
from lowrank_attn.models.decoder_configs import DecoderConfig

Arrays = Mapping[str, Any]


def shapes_of(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter and constant of a model by its path `blocks/0/...`."""
    return {name: variable.shape for name, variable in _leaves(_abstract(config))[1].items()}


def build(config: DecoderConfig, params: Arrays, **arguments: Any) -> Decoder:
    """A model with these parameters.

    Args:
        config: the model.
        params: every parameter and constant by path, see `shapes_of`.
        arguments: the other arguments of `Decoder`, without rngs.

    Raises:
        ValueError: if parameters are missing, unknown or of another shape; each is named.
    """
    model = _abstract(config, **arguments)
    state, leaves = _leaves(model)
    wrong = [f"{name} is missing" for name in leaves if name not in params]
    wrong += [f"{name} is not part of this model" for name in params if name not in leaves]
    wrong += [
        f"{name}: expected {list(leaf.shape)}, found {list(params[name].shape)}"
        for name, leaf in leaves.items()
        if name in params and params[name].shape != leaf.shape
    ]
    if wrong:
        raise ValueError(f"the parameters do not fit this model: {'; '.join(wrong)}.")
    for name, variable in leaves.items():
        variable.set_value(jnp.asarray(params[name], variable.dtype))
    nnx.update(model, state)
    return model


def arrays_of(model: Decoder) -> dict[str, jax.Array]:
    """Every parameter and constant of a model by its path."""
    return {name: variable[...] for name, variable in _leaves(model)[1].items()}


def save_decoder(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    params: Arrays,
    source: Mapping[str, Any] | None = None,
) -> None:
    """Write a model into a folder that is not there yet.

    `decoder.json` comes last, so a folder that has one is complete.

    Args:
        folder: where to.
        config: the model.
        params: every parameter and constant by path.
        source: where the model came from, for JSON; `convert` needs it on the way back.

    Raises:
        FileExistsError: if there is something of that name.
    """
    folder = pathlib.Path(folder).absolute()
    folder.mkdir(parents=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", dict(params))
    text = {"decoder": dataclasses.asdict(config), "source": source}
    unfinished = folder / "decoder.json.tmp"
    unfinished.write_text(json.dumps(text, indent=1) + "\n")
    unfinished.replace(folder / "decoder.json")


def load_decoder(
    folder: str | os.PathLike[str],
) -> tuple[DecoderConfig, dict[str, jax.Array], dict[str, Any] | None]:
    """What `save_decoder` wrote: the model, its parameters, and where it came from.

    Raises:
        FileNotFoundError: if the folder holds no complete model.
    """
    folder = pathlib.Path(folder).absolute()
    if not (folder / "decoder.json").exists():
        raise FileNotFoundError(
            f"{folder} has no decoder.json: it holds no decoder, or an unfinished one."
        )
    text = json.loads((folder / "decoder.json").read_text())
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(folder / "params")
    return DecoderConfig.from_dict(text["decoder"]), params, text["source"]


def _abstract(config, **arguments):
    return nnx.eval_shape(lambda: config.make(rngs=nnx.Rngs(params=0), **arguments))


def _leaves(model):
    state = nnx.state(model)
    return state, {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
