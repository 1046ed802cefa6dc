"""The program of training: K optimiser steps, and where their arrays lie on a mesh."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.common.data import batch_of_each_shape
from experiments.common.phase import Phase, TrainState
from experiments.common.placement import abstract, batch_shardings, on_mesh, replicated
from lowrank_attn import parallel


def jit_steps(phase: Phase, mesh: Mesh, key: jax.Array, state: TrainState) -> jax.stages.Wrapped:
    """`(state, batches of arrays [K, B, ...]) -> (state, metrics of arrays [K])` under `jax.jit`.

    Args:
        phase: the objective and the optimiser.
        mesh: over which devices; parameters and moments stay where `parallel.shardings` has them.
        key: of the steps' randomness.
        state: arrays or their shapes; the argument of a call is donated.
    """
    step = functools.partial(_step, phase.loss_fn, phase.optimizer, key)
    return jax.jit(
        on_mesh(lambda state, batches: jax.lax.scan(step, state, batches), mesh),
        donate_argnums=0,
        out_shardings=(parallel.shardings(state, mesh), replicated(mesh)),
    )


def new_state(phase: Phase, params: Any, mesh: Mesh) -> TrainState:
    """The state before the first step, on the mesh. The parameters are copied."""
    params = jax.device_put(params, parallel.shardings(params, mesh), may_alias=False)
    moments = jax.eval_shape(phase.optimizer.init, params)
    init = jax.jit(phase.optimizer.init, out_shardings=parallel.shardings(moments, mesh))
    step = jax.device_put(np.zeros((), np.int32), replicated(mesh))
    return TrainState(params, init(params), step)


def abstract_steps(
    phase: Phase, mesh: Mesh, steps: int = 1
) -> tuple[jax.stages.Wrapped, TrainState, dict[str, jax.ShapeDtypeStruct]]:
    """The program and the shapes of its arguments, for `lower`; nothing is computed.

    So it compiles ahead of time for devices that this process has not.

    Args:
        phase: its source needs one example; of several shapes the largest is taken.
        mesh: of any devices.
        steps: K.

    Returns:
        `jit_steps`, the state and the batches with their shardings.
    """
    key = jax.random.key(0)

    def make_state():
        params = phase.init(key, None)
        return TrainState(params, phase.optimizer.init(params), jnp.zeros((), jnp.int32))

    state = jax.eval_shape(make_state)
    state = abstract(state, parallel.shardings(state, mesh))
    *_, batches = batch_of_each_shape(phase.source, (steps, phase.batch_size))
    return (
        jit_steps(phase, mesh, key, state),
        state,
        abstract(batches, batch_shardings(batches, mesh, axis=1)),
    )


def _step(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    state: TrainState,
    batch: Mapping[str, jax.Array],
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimiser step; its randomness depends on the key and the number of the step alone."""
    key = jax.random.fold_in(key, state.step)
    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch, key)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.step + 1), {"loss": loss, **metrics}
