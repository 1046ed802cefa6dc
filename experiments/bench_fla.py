"""Kernels of flash-linear-attention as rows of `experiments.bench`."""

import threading

import jax
import numpy as np

from experiments.bench_cases import Case
from experiments.bench_timing import Ready

# Triton's search for the fastest blocks fails when two threads do it at once.
_ONE_AT_A_TIME = threading.Lock()


def ready(case: Case, implementation: str) -> Ready:
    """A case as computed by `chunk_linear_attn`, `fused_chunk_based` or `parallel_based`.

    Args:
        case: of kernel features without a normaliser, or taylor with the sum.
        implementation: `fla_` and the name of the function.

    Raises:
        NotImplementedError: if torch, flash-linear-attention or an NVIDIA GPU is missing.
    """
    try:
        import torch
        from fla.ops.based import fused_chunk_based, parallel_based
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError as e:
        raise NotImplementedError(f"{e}; install lowrank-attn[fla]") from e
    if not torch.cuda.is_available():
        raise NotImplementedError("flash-linear-attention needs an NVIDIA GPU that torch can see")

    def linear(q, k, v):
        return chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]

    functions = {
        "fla_chunk_linear_attn": linear,
        "fla_fused_chunk_based": fused_chunk_based,
        "fla_parallel_based": parallel_based,
    }
    f = functions[implementation]

    def convert(inputs):
        jax.block_until_ready(inputs)
        tensors = {name: torch.from_dlpack(inputs[name]).clone() for name in ("q", "k", "v", "dy")}
        for name in "qkv":
            tensors[name].requires_grad_(case.backward)
        return tensors

    def call(inputs):
        with _ONE_AT_A_TIME:
            y = f(inputs["q"], inputs["k"], inputs["v"])
            if not case.backward:
                return (y,)
            of_inputs = torch.autograd.grad(y, [inputs[name] for name in "kqv"], inputs["dy"])
        return (y, *of_inputs)  # in the order of the leaves of our gradients

    def wait(outputs):
        torch.cuda.synchronize()

    def to_numpy(outputs):
        return [x.detach().float().cpu().numpy().astype(np.float64) for x in outputs]

    return Ready(call, wait, convert, to_numpy, float("nan"), float("nan"))
