"""Training steps through the real TPU compiler, without a TPU; each in a process of its own."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for TPUs needs libtpu: pip install 'jax[tpu]'",
)
LM = (
    "experiments.lm", "--model=based-tiny", "--kernel=llops", "--tokenizer=bytes",
    "--kernel_options=num_features=128", "--length=128", "--batch_size=16", "--accumulate=1",
)  # fmt: skip

PARAMETERS = 975_616


def run_python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def run(*arguments):
    return run_python("-m", *arguments)


def report(*arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "mesh", "kinds"),
    [
        ("v5e:2x2", "data=4", {"all-reduce"}),
        ("v5p:2x2x1", "data=2,tensor=2", {"all-reduce"}),
        ("v6e:2x2", "fsdp=4", {"all-gather", "reduce-scatter", "all-reduce"}),
        (
            "v5e:4x4",
            "data=2,fsdp=2,tensor=2,context=2",
            {"all-gather", "all-reduce", "collective-permute"},
        ),
    ],
)
def test_a_step_of_a_language_model(topology, mesh, kinds):
    found = report(*LM, f"--aot={topology}", f"--mesh={mesh}")
    sizes = dict(part.split("=") for part in mesh.split(","))
    assert {name: str(size) for name, size in found["mesh"].items() if size > 1} == sizes
    assert found["devices"] == (16 if topology == "v5e:4x4" else 4)
    assert found["fits"] and 0 < found["peak_bytes"] < found["hbm_bytes"]
    assert found["collectives"].keys() >= kinds
    assert all(each["number"] > 0 for each in found["collectives"].values())
    # parameters and two moments of AdamW, float32, cut by fsdp and tensor (not all of them)
    whole = 12 * PARAMETERS
    parts = found["mesh"]["fsdp"] * found["mesh"]["tensor"]
    most = 1.01 * whole if parts == 1 else 0.75 * whole
    assert whole / parts <= found["state_bytes"] < most
    if mesh == "data=4":
        # every gradient once, in bfloat16 or float32; the table's from both of its uses
        assert 2 * PARAMETERS < found["collectives"]["all-reduce"]["payload"] < 5 * PARAMETERS


@needs_libtpu
@pytest.mark.slow
def test_a_step_of_an_encoder(tmp_path):
    found = report(
        "experiments.lra", "--aot=v5e:2x2", "--task=listops", "--preset=quick", "--num_layers=1",
        f"--cache_dir={tmp_path}", "--task_options=num_train=64,num_validation=16,num_test=16",
    )  # fmt: skip
    assert found["fits"] and set(found["collectives"]) == {"all-reduce"}


@needs_libtpu
@pytest.mark.slow
def test_what_does_not_fit_is_said():
    found = report(*LM, "--aot=v5e:1x1", "--batch_size=65536")
    assert found["fits"] is False and "HBM" in found["needed"]


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "devices"),
    [("v5e:1x1", 1), ("v5e:1x2", 2), ("v6e:2x4", 8), ("v4:1x1x1", 2), ("v5p:2x2x4", 16)],
)
def test_slices_smaller_and_larger_than_a_host(topology, devices):
    code = f"from experiments.aot import topology_devices as of; print(len(of({topology!r})))"
    assert run_python("-c", code).stdout.split() == [str(devices)]


@needs_libtpu
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--aot=v9:2x2"], "aot='v9:2x2', expected a generation (v4, v5e, v5p, v6e, tpu7x)"),
        (["--aot=v5e"], "aot='v5e', expected a generation"),
        (["--aot=v5e:2x2", "--mesh=fsdp=3"], "mesh='fsdp=3'"),
    ],
)
def test_wrong_settings_exit_with_2(arguments, message):
    done = run(*LM, *arguments)
    assert done.returncode == 2 and message in done.stderr
