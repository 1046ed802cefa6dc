"""AdamW with the schedules and the clipping that the experiments use."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

SCHEDULES = ("cosine", "linear", "constant", "rsqrt")
CLIPPINGS = ("norm", "value", "none")

# Names of parameters without weight decay, up to a number at their end.
NOT_DECAYED = (
    "b", "gain", "lambda", "scale", "exponent", "conv_bias", "position", "cls", "A_log", "dt_bias",
    "decay_bias",
)  # fmt: skip


def leaf_names(tree: Any) -> list[str]:
    """The path of every leaf of a tree, such as `encoder/0/kernel`, in the order of its leaves."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def learning_rate_schedule(
    schedule: str, peak: float, warmup_steps: int, total_steps: int, last: float = 0.0
) -> optax.Schedule:
    """The learning rate of every step.

    It rises linearly from 0 at step 0 to `peak` at `warmup_steps`. Then it stays (`constant`),
    falls to `last` at `total_steps` along half a cosine or linearly, or falls as
    peak * sqrt(warmup_steps / step) (`rsqrt`, which needs a warm-up).

    Raises:
        ValueError: if the name is unknown or the warm-up is longer than the run.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; known: {', '.join(SCHEDULES)}.")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} must be between 0 and total_steps={total_steps}."
        )
    if schedule == "rsqrt" and warmup_steps == 0:
        raise ValueError("warmup_steps=0 with schedule='rsqrt', expected at least 1.")
    rest = max(total_steps - warmup_steps, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest, last / peak),
        "linear": optax.linear_schedule(peak, last, rest),
        "constant": optax.constant_schedule(peak),
        "rsqrt": lambda step: peak * jnp.sqrt(warmup_steps / (warmup_steps + jnp.maximum(step, 0))),
    }[schedule]
    if warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(0.0, peak, warmup_steps)
    return optax.join_schedules([warmup, after], [warmup_steps])


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    weight_decay: float = 0.0,
    no_decay: Callable[[str], bool] = lambda name: False,
    frozen: Callable[[str], bool] = lambda name: False,
    clip: str = "norm",
    clip_at: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW with clipping, in the dtype of the parameters (float32).

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the first moment.
        b2: decay of the second moment.
        weight_decay: decoupled decay, of arrays with two or more dimensions only: biases, gains
            and other vectors are spared.
        no_decay: names of parameters (as `leaf_names` gives them) that are spared as well.
        frozen: names of parameters that never change, such as fixed random projections; they have
            no moments and no part in the gradient's norm.
        clip: `norm` scales all gradients down to a joint norm of `clip_at`, `value` limits each
            element to it, `none` leaves them.
        clip_at: > 0.

    Raises:
        ValueError: if `clip` is unknown.
    """
    if clip not in CLIPPINGS:
        raise ValueError(f"clip={clip!r} is unknown; known: {', '.join(CLIPPINGS)}.")

    def decayed(params: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        named = zip(leaf_names(params), leaves)
        decays = [leaf.ndim >= 2 and not no_decay(name) for name, leaf in named]
        return jax.tree.unflatten(structure, decays)

    def labels(params: Any) -> Any:
        names = ["frozen" if frozen(name) else "trained" for name in leaf_names(params)]
        return jax.tree.unflatten(jax.tree.structure(params), names)

    clipping = {
        "norm": optax.clip_by_global_norm(clip_at),
        "value": optax.clip(clip_at),
        "none": optax.identity(),
    }[clip]
    update = optax.adamw(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decayed)
    return optax.partition(
        {"trained": optax.chain(clipping, update), "frozen": optax.set_to_zero()}, labels
    )
