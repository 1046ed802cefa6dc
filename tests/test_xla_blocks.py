"""`xla` with all chunks of a span at once, as on GPUs, gives what one chunk after another gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ops
from conftest import assert_close

from lowrank_attn import ops
from lowrank_attn.ops import block_sizes, xla
from lowrank_attn.ops.block_sizes import XLABlocks

RULES = [name for name, rule in ops.RULES.items() if rule.parts is not None]


@pytest.fixture(autouse=True)
def all_at_once(monkeypatch):
    monkeypatch.setattr(xla, "xla_blocks", lambda chunk_size: XLABlocks(chunk_size, at_once=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", ["plain", "sum_packed_padded_grouped"])
def test_it_matches_the_reference(case, rule):
    trained, fixed = test_ops.inputs(case)
    trained["gates"] = test_ops.gates_of(rule)
    found, expected = (
        test_ops.value_and_grads(
            functools.partial(ops.causal, implementation=name), trained, rule=rule, **fixed
        )
        for name in ("xla", "reference")
    )
    assert_close(found, expected)


def test_bfloat16_error_is_that_of_the_reference():
    """Outputs within 1.5 times its own, gradients within 2: scores and theirs are rounded."""
    trained, fixed = test_ops.inputs("sum")
    low = dict(trained)
    for name in ("q", "k", "v"):
        low[name] = trained[name].astype(jnp.bfloat16)
        trained[name] = low[name].astype(jnp.float32)
    call = functools.partial(ops.causal, implementation="reference")
    exact = test_ops.value_and_grads(call, trained, **fixed)

    def errors(name):
        call = functools.partial(ops.causal, implementation=name)
        found = test_ops.value_and_grads(call, low, **fixed)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        return [np.linalg.norm(np.asarray(f, np.float64) - np.asarray(e, np.float64))
                for f, e in pairs]  # fmt: skip

    outputs = len(jax.tree.leaves(exact[0]))
    for i, (found, allowed) in enumerate(zip(errors("xla"), errors("reference"), strict=True)):
        assert found <= (1.5 if i < outputs else 2.0) * allowed


def test_memory_vmap_remat_and_forward_mode():
    test_ops.test_training_keeps_no_states_inside_a_span()
    test_ops.test_jit_vmap_remat_and_forward_mode()
    test_ops.test_any_length(1025)


@pytest.mark.parametrize("chunk_size, expected", [(64, 64), (128, 256), (512, 512)])
def test_gpus_take_larger_chunks(chunk_size, expected, monkeypatch):
    assert block_sizes.xla_blocks(chunk_size) == (chunk_size, False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert block_sizes.xla_blocks(chunk_size) == (expected, True)
