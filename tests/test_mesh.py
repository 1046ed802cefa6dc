"""Models and training over meshes of simulated devices: against one device, and what is refused."""

import csv
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from conftest import FLOAT32_TOLERANCE, normal
from flax import nnx
from small_lm import SMALL, write_text

from experiments import scaling
from experiments.common import placement, plot
from experiments.common.train_step import abstract_steps
from experiments.lm_settings import Config, check_mesh
from lowrank_attn.layers import ATTENTION, over_mesh
from lowrank_attn.models.decoder import Decoder
from lowrank_attn.models.decoder_configs import CONFIGS
from lowrank_attn.parallel.mesh import AXES, make_mesh

ROOT = pathlib.Path(__file__).parent.parent


def python(*arguments, devices=1):
    """Run a script of these tests on so many simulated devices; its output."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_logits_and_gradients_are_those_of_one_device():
    """Sums over devices are taken in another order, as those of `conftest`'s tolerance."""
    report = json.loads(python("tests/mesh_forms.py", devices=8))
    wrong = {
        (model, mesh): error
        for model, errors in report.items()
        for mesh, error in errors.items()
        if error > FLOAT32_TOLERANCE
    }
    assert not wrong
    assert sum(len(errors) for errors in report.values()) == 8


@pytest.mark.slow
def test_training_over_a_mesh_is_that_of_one_device(tmp_path):
    """Losses of every step, also where a run goes on over another mesh and number of devices."""

    def run(name, devices, *arguments):
        python(
            "tests/small_lm.py", f"--data={write_text(tmp_path)}", "--tokenizer=bytes",
            "--validation_share=0.2",
            f"--cache_dir={tmp_path / 'cache'}", f"--run_dir={tmp_path / name}", "--batch_size=4",
            "--length=32", "--log_every=1", "--steps=6", "--eval_every=3", "--accumulate=2",
            "--learning_rate=0.01", "--validation_rows=8", *arguments, devices=devices,
        )  # fmt: skip
        return [plot.read_rows(tmp_path / name / f"train_{kind}.csv") for kind in ("train", "eval")]

    expected = run("one", 1)
    assert expected[0][-1]["loss"] < 0.98 * expected[0][0]["loss"]
    for name, devices, mesh in (
        ("sharded", 8, "data=1,fsdp=2,tensor=2,context=2"),
        ("long", 4, "context=4"),
    ):
        found = run(name, devices, f"--mesh={mesh}")
        for rows, others in zip(found, expected, strict=True):
            for row, other in zip(rows, others, strict=True):
                assert row == pytest.approx(other, rel=1e-4)
    # a folder of 8 devices, read by one
    checkpoints = tmp_path / "sharded" / "checkpoints" / "train"
    (checkpoints / "6").rename(tmp_path / "newest")
    found = run("sharded", 1)
    for rows, others in zip(found, expected, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert row == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
def test_parameters_restored_by_fewer_devices_are_the_same_bits(tmp_path):
    found = [
        json.loads(python("tests/restore_forms.py", tmp_path, str(step), mesh, devices=devices))
        for step, (devices, mesh) in enumerate(
            [(8, "fsdp=4,tensor=2"), (4, "fsdp=2,tensor=2"), (1, "data=1"), (8, "data=4,tensor=2")],
            start=1,
        )
    ]
    digests, devices, cuts = zip(*found)
    assert devices == (8, 4, 1, 8) and len(set(digests)) == 1
    assert all("('tensor', 'fsdp')" in cut for cut in cuts[:2])


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("rows=2", "mesh='rows=2': rows=2, expected a number of devices for one of data"),
        ("fsdp=two", "fsdp='two', expected a number"),
        ("data=2", "mesh='data=2': data=2, fsdp=1, context=1, tensor=1 for 1 devices"),
    ],
)
def test_meshes_that_are_none(mesh, message):
    with pytest.raises(ValueError, match=message):
        placement.make_mesh(mesh)


@pytest.mark.parametrize(
    ("mesh", "model", "message"),
    [
        ("data=3", "based-tiny", "mesh='data=3' cuts batch_size=8 into data x fsdp = 3 parts"),
        ("data=4", "based-tiny", "batch_size / accumulate=2 into data x fsdp = 4 parts"),
        ("context=3", "based-tiny", "length=64 into context = 3 parts, expected a multiple of 3"),
        ("tensor=8", "attn-tiny", "num_heads of softmax layers=4 into tensor = 8 parts"),
        ("context=2", "mamba-tiny", "mamba layers read them whole: set context=1"),
    ],
)
def test_meshes_that_do_not_divide_are_refused(mesh, model, message):
    """The message names the flag; the mesh of so many devices is an abstract one."""
    sizes = dict.fromkeys(AXES, 1) | {mesh.split("=")[0]: int(mesh.split("=")[1])}
    abstract = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    config = Config(
        data="x", tokenizer="bytes", batch_size=8, accumulate=4, length=64, mesh=mesh, model=model
    )
    with pytest.raises(ValueError, match=message):
        check_mesh(config, CONFIGS[model], abstract)


def over(context):
    """A mesh of so many devices along the sequence, for tracing."""
    sizes = dict.fromkeys(AXES, 1) | {"context": context}
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), AXES, axis_types=kinds)
    return jax.sharding.use_abstract_mesh(mesh)


def test_layers_that_read_all_tokens_refuse_a_cut_sequence():
    q = normal(0, 2, 8, 2, 4)
    with over(4), pytest.raises(ValueError, match="context=4, but this kernel reads all tokens"):
        over_mesh.method_over_mesh(ATTENTION["softmax"](), {}, q, q, q, causal=True)
    with over(4), pytest.raises(ValueError, match="context=4.* Set causal=True, or context=1"):
        over_mesh.attention_over_mesh(lambda **x: None, None, {"q": q, "k": q, "v": q})


def test_kernels_see_shards():
    """The operation is traced inside shard_map, where kernels may run."""
    model = Decoder(16, 8, ("linear",), {"linear": {"num_heads": 2}}, rngs=nnx.Rngs(0))
    with over(2):
        jaxpr = str(jax.make_jaxpr(lambda x: model(x)[0])(jax.numpy.zeros((2, 8), int)))
    assert "shard_map" in jaxpr and "all_gather" in jaxpr


def test_program_without_running():
    """`abstract_steps` lowers from shapes alone."""
    from toy_run import ToyConfig, toy_phases

    mesh = make_mesh(devices=jax.devices()[:1])
    steps, state, batches = abstract_steps(toy_phases(ToyConfig())[0], mesh, steps=2)
    assert batches["tokens"].shape == (2, 6, 12)
    assert all(isinstance(x.sharding.mesh, jax.sharding.Mesh) for x in jax.tree.leaves(state))
    _, metrics = steps.lower(state, batches).out_info
    assert metrics["loss"].shape == (2,)
    assert placement.place({"x": normal(0, 3, 2)}, 3, mesh)["x"].sharding.mesh == mesh


def test_scaling_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(CONFIGS, "based-tiny", SMALL)
    arguments = [
        "scaling", "--model=based-tiny", "--batch_size=2", "--length=16", "--steps=1",
        "--repeats=1", "--dtype=float32", f"--out={tmp_path / 'table'}",
    ]  # fmt: skip
    scaling.main([*arguments, "--meshes=fsdp=1"])
    one, other = csv.DictReader((tmp_path / "table.csv").read_text().splitlines())
    assert (one["mesh"], one["efficiency"], other["mesh"]) == ("data=1", "1.0", "fsdp=1")
    ratio = float(other["tokens_per_second"]) / float(one["tokens_per_second"])
    assert float(other["efficiency"]) == pytest.approx(ratio)
    assert one["loss"] == other["loss"] and one["length"] == "16"
    assert "| fsdp=1 |" in (tmp_path / "table.md").read_text()
    with pytest.raises(SystemExit) as stop:
        scaling.main([*arguments, "--meshes=context=2"])
    assert stop.value.code == 2 and "mesh='context=2'" in capsys.readouterr().err
