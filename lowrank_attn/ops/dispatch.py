"""The choice of the implementation that computes a call."""

import functools
import warnings
from collections.abc import Sequence

import jax
from jax.extend import backend

from lowrank_attn.ops import pallas_gpu, pallas_tpu, reference, xla
from lowrank_attn.ops.arguments import Arguments, Method, State
from lowrank_attn.ops.block_sizes import tpu_name

IMPLEMENTATIONS = {
    "xla": xla,
    "pallas_tpu": pallas_tpu,
    "pallas_gpu": pallas_gpu,
    "reference": reference,
}
# The kernels of each platform that has some; `xla` computes everything else.
KERNELS = {"cuda": "pallas_gpu", "tpu": "pallas_tpu"}


def dispatch(
    op: str, args: Arguments, method: Method, implementation: str | Sequence[str] | None
) -> tuple[jax.Array, State]:
    """Compute `op` by a named implementation, the first of several that can, or by platform.

    Without a name, the kernels of a platform compute what is lowered for it, and `xla` the rest:
    all of it in a process without GPU and TPU. Calls that the kernels are not made for (float64,
    float32 on a GPU, a GPU that is no Hopper) go to `xla` without a word, other calls that they
    cannot do with a warning.

    Raises:
        ValueError: for an unknown name.
        NotImplementedError: if the one named implementation, or none of several, can do the call.
    """
    if implementation is None:
        return _by_platform(op, args, method)
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    return _by_name(op, args, method, names)


def devices() -> dict[str, int]:
    """The platforms of this process, and how many devices each has over all processes.

    Also that of the mesh in scope, which a program may be compiled for without having it.
    """
    found = {name: client.device_count() for name, client in backend.backends().items()}
    if "tpu" not in found and tpu_name():
        found["tpu"] = jax.sharding.get_abstract_mesh().size
    return found


def _by_name(op, args, method, names):
    for name in names:
        if name not in IMPLEMENTATIONS:
            known = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"implementation={name!r} is unknown; known: {known}.")
    reasons = []
    for i, name in enumerate(names):
        try:
            return getattr(IMPLEMENTATIONS[name], op)(args, method)
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
            if i + 1 < len(names):
                _warn(op, name, str(error), names[i + 1])
    raise NotImplementedError(f"{op}: no implementation can do this call. " + " ".join(reasons))


def _by_platform(op, args, method):
    portable = getattr(xla, op)
    present = devices()
    platforms = []
    for platform, name in KERNELS.items():
        module = IMPLEMENTATIONS[name]
        if platform not in present or getattr(module, op) is portable or module.unsuited(args):
            continue
        reason = module.unsupported(op, args, method) or _unpartitioned(present[platform])
        if reason is None:
            platforms.append(platform)
        else:
            _warn(op, name, reason, "xla")
    if not platforms:
        return portable(args, method)
    return _platform_dependent(args, op, method, tuple(platforms))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _platform_dependent(args, op, method, platforms):
    """Under `jit` also for eager calls, whose platform would else be that of the default device."""

    def branch(name):
        return functools.partial(getattr(IMPLEMENTATIONS[name], op), method=method)

    kernels = {platform: branch(KERNELS[platform]) for platform in platforms}
    return jax.lax.platform_dependent(args, default=branch("xla"), **kernels)


def _unpartitioned(count):
    """Why kernels cannot be chosen beside `count` devices, over which `jit` may spread a call."""
    if count == 1 or jax.sharding.get_abstract_mesh().are_all_axes_manual:
        return None
    return (
        f"there are {count} devices, and jit cannot partition kernels; call it inside "
        "jax.shard_map, or name the implementation for calls on one device"
    )


def _warn(op, name, reason, then):
    """Blame the caller of the public operation."""
    message = f"{op}: {name} cannot do this call ({reason.rstrip('.')}); trying {then}."
    warnings.warn(message, stacklevel=5)
