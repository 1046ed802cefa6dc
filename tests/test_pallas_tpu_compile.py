"""The TPU kernels through the real TPU compiler, without a TPU: they compile, fit, and keep busy.

Every job runs in a process of its own, which sets libtpu up and survives a crash of the compiler.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowrank_attn.ops.block_sizes import TPU

ROOT = Path(__file__).parents[1]
CHIPS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "7x": "tpu7x:2x2x1",
}
# Milliseconds for 16 heads of 16,384 tokens, by the length of the schedule on one core.
MOST_MS = {
    ("v5e", "fused2", "forward"): 1.05,
    ("v6e", "fused2", "forward"): 0.50,
    ("v5e", "scan", "backward"): 1.45,
    ("v6e", "scan", "backward"): 0.78,
}
LEAST_MXU_BUSY = {"v4": 0.5, "v5e": 0.75, "v5p": 0.7, "v6e": 0.75, "7x": 0.7}
MOST_SPILLS = {"forward": 12_000, "backward": 24_000}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for TPUs needs libtpu: pip install 'jax[tpu]'",
)


def run(*arguments):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def check_schedule(chip, job, direction):
    output = run(
        "tpu_scripts/static_report.py",
        f"--chip={CHIPS[chip]}",
        f"--job={job}",
        f"--direction={direction}",
    )
    report = json.loads(output.splitlines()[-1])
    assert report["vmem_mib"] * 2**20 <= TPU[chip].vmem_bytes, report
    assert report["spills"] <= MOST_SPILLS[direction], report
    assert report["ms"] <= MOST_MS.get((chip, job, direction), float("inf")), report
    if report["mxu_busy"] is not None:
        assert report["mxu_busy"] >= LEAST_MXU_BUSY[chip], report


@pytest.mark.parametrize(("job", "direction"), [("fused2", "forward"), ("scan", "backward")])
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_schedule(chip, job, direction):
    check_schedule(chip, job, direction)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "job", "direction"),
    [
        *((c, "fused2", d) for c in CHIPS for d in ("forward", "backward")),
        *((c, "fused4", "forward") for c in CHIPS),
        # the backward kernels of these take the longest to compile: one chip
        ("v5e", "fused4", "backward"),
        ("v5e", "fused2_rms", "forward"),
        ("v5e", "fused2_rms", "backward"),
    ],
)
def test_schedule_of_fused_maps(chip, job, direction):
    check_schedule(chip, job, direction)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v4", "v5e", "7x"])
def test_every_form_compiles(chip):
    """All forms of the parity tests, and one call sharded over the devices of a host."""
    assert run("tests/compile_forms.py", CHIPS[chip]).splitlines()[-1] == "all compiled"
