"""A Flax NNX model as a pair of pure functions over a plain tree of arrays."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from lowrank_attn.layers.nnx import Constant


class PureModule:
    """What the training loop needs of a model: `init(key)` and `module(params)`.

    Args:
        make: `make(rngs)` builds the model.
    """

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module]):
        """Trace the model once, without computing its parameters."""
        self._make = make
        abstract = nnx.eval_shape(lambda: make(nnx.Rngs(params=0)))
        self._graph, self._state = nnx.split(abstract)
        self._constants = {
            "/".join(map(str, path))
            for path, variable in nnx.to_flat_state(self._state)
            if isinstance(variable, Constant)
        }

    def init(self, key: jax.Array) -> Any:
        """New parameters and constants, as a nested dict of arrays."""
        return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(self._make(nnx.Rngs(params=key)))))(
            key
        )

    def module(self, params: Any) -> Any:
        """The model with these parameters."""
        state = jax.tree.map(lambda x: x, self._state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state)

    def is_constant(self, name: str) -> bool:
        """Whether a leaf, named by its path such as `encoder/blocks/0/...`, is never trained."""
        return name in self._constants
