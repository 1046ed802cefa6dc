"""Reading the published pairs of documents, and training on pairs from the command line."""

import json
import os

import jax
import numpy as np
import pytest

from experiments import lra, presets
from experiments.common.phase_run import PhaseRun
from experiments.lra_settings import Config
from experiments.tasks import TASKS, retrieval
from experiments.tasks.base import DataError

LAYOUTS = ["lra_release/lra_release/tsv_data", "lra_release/tsv_data", "tsv_data", "."]


def row(number, label, first=None, second=None):
    first = first or b"paper %d cites a work of its field" % number
    second = second or b"work %d of " % number + b"another field " * (number % 7)
    return b"%.1f\tP%d\tW%d\t%s\t%s\n" % (label, number, number, first, second)


def write_pairs(folder, train=24, rest=10):
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("eval", rest), ("test", rest)):
        lines = [row(i, i % 2) for i in range(count)]
        (folder / f"new_aan_pairs.{name}.tsv").write_bytes(b"".join(lines))
    return folder


def load(folder, cache=None):
    return retrieval.load(folder, cache or folder / "cache", progress=False)


def texts(split, i):
    """The two documents of row i, as bytes."""
    example = split[i]
    return [
        bytes((tokens[:length] - 1).astype(np.uint8))
        for tokens, length in zip(example["tokens"], example["length"], strict=True)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_level_of_the_archive_is_accepted(tmp_path, layout):
    assert TASKS["retrieval"] is retrieval.load
    write_pairs(tmp_path / layout)
    task = load(tmp_path)
    assert task.two_towers and task.num_classes == 2 and task.max_length == 4000
    assert {name: len(split) for name, split in task.splits.items()} == {
        "train": 24, "validation": 10, "test": 10,
    }  # fmt: skip
    split = task.splits["test"]
    assert texts(split, 3) == [
        b"paper 3 cites a work of its field",
        b"work 3 of " + b"another field " * 3,
    ]
    assert [int(example["label"]) for example in split] == [0, 1] * 5
    example = split[0]
    assert example["tokens"].shape == (2, 1024) and not example["tokens"][0, 33:].any()


def test_of_two_copies_the_inner_one_is_read(tmp_path):
    write_pairs(tmp_path / LAYOUTS[0], train=6)
    write_pairs(tmp_path / LAYOUTS[1], train=8)
    assert len(load(tmp_path).splits["train"]) == 6


def test_quotes_and_odd_bytes_are_text(tmp_path):
    """A row is a line: a lone quote, doubled quotes, a carriage return, bytes that are no UTF-8."""
    write_pairs(tmp_path)
    odd = [
        (b'a lone " quote', b'"starts with one'),
        (b'say ""this""', b'""'),
        (b'"', b"x\ry"),
        (b"\xff\x00\xe9", b"'"),
    ]
    content = b"".join(row(i, 1, *documents) for i, documents in enumerate(odd))
    (tmp_path / "new_aan_pairs.test.tsv").write_bytes(content[:-1])  # no newline at the end
    split = load(tmp_path).splits["test"]
    assert len(split) == content.count(b"\n") == 4
    assert [tuple(texts(split, i)) for i in range(4)] == odd
    assert split[3]["tokens"][0, :3].tolist() == [256, 1, 234]


def test_documents_are_cut_and_kept_once(tmp_path):
    write_pairs(tmp_path)
    long = b"a" + "é".encode() * 3000  # byte 4,000 is the first half of a character
    rows = [row(0, 1, long, b"b"), row(1, 0, b"b", long), row(2, 0, long, long + b"!")]
    (tmp_path / "new_aan_pairs.test.tsv").write_bytes(b"".join(rows))
    split = load(tmp_path).splits["test"]
    assert texts(split, 0) == [long[:4000], b"b"] and texts(split, 1) == [b"b", long[:4000]]
    assert texts(split, 2) == [long[:4000]] * 2
    assert split.tokens.size == 4001
    assert split.sizes.tolist() == [4000] * 3


def test_an_empty_document_is_a_space(tmp_path, caplog):
    write_pairs(tmp_path)
    (tmp_path / "new_aan_pairs.eval.tsv").write_bytes(b"1.0\ta\tb\t\ttext\n0.0\ta\tb\t\t\n")
    split = load(tmp_path).splits["validation"]
    assert texts(split, 0) == [b" ", b"text"] and texts(split, 1) == [b" ", b" "]
    assert "3 documents are empty" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1.0\tP1\tP2\n", "ids only, texts missing: 3 columns"),
        (b"1.0\tP1\tP2\ttext\n", "4 columns, expected 5"),
        (b"1.0\tP1\tP2\ttext\ta\ttab\n", "6 columns, expected 5"),
        (b"\n", "1 columns, expected 5"),
        (b"\tP1\tP2\ta\tb\n", "label '', expected 0.0 or 1.0"),
        (b"2.0\tP1\tP2\ta\tb\n", "label '2.0', expected 0.0 or 1.0"),
        (b"nan\tP1\tP2\ta\tb\n", "label 'nan'"),
        (b"0.5\tP1\tP2\ta\tb\n", "label '0.5'"),
        (b"label\tid1\tid2\ta\tb\n", "label 'label'"),
    ],
)
def test_wrong_rows_are_named(tmp_path, line, message):
    path = write_pairs(tmp_path) / "new_aan_pairs.eval.tsv"
    path.write_bytes(row(0, 1) + line + row(1, 1))
    with pytest.raises(DataError, match=f"eval.tsv:2: {message}"):
        load(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="eval.tsv is empty"):
        load(tmp_path)
    assert not list((tmp_path / "cache").glob("retrieval-*"))


def test_cache_is_found_again_and_knows_its_files(tmp_path, monkeypatch):
    folder = write_pairs(tmp_path / "data")
    first = load(folder, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(retrieval, "_read", None)
        again = load(folder, tmp_path / "cache")
    assert again.fingerprint == first.fingerprint
    for i in range(10):
        assert texts(again.splits["test"], i) == texts(first.splits["test"], i)
    path = folder / "new_aan_pairs.test.tsv"
    path.write_bytes(path.read_bytes().replace(b"paper 3", b"paper X"))
    os.utime(path, ns=(0, 0))
    assert load(folder, tmp_path / "cache").fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("options", "address"),
    [("", "lra_release.gz"), ("source=manpages", "apt-get download manpages manpages-dev")],
)
def test_without_data_the_message_says_where_to_get_them(tmp_path, capsys, options, address):
    for folder in ([], [f"--data_dir={tmp_path}"]):
        with pytest.raises(SystemExit) as stop:
            lra.main(["lra", "--task=retrieval", f"--task_options={options}",
                      f"--cache_dir={tmp_path / 'cache'}", *folder])  # fmt: skip
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert address in message and "--data_dir" in message
        assert not folder or str(tmp_path / "usr" if options else tmp_path / "tsv_data") in message


@pytest.mark.parametrize(
    ("option", "problem"), [({"source": "web"}, "'web'"), ({"seed": -1}, "-1")]
)
def test_wrong_options_are_named(tmp_path, option, problem):
    with pytest.raises(ValueError, match=f"{next(iter(option))}={problem}, expected"):
        retrieval.load(tmp_path, tmp_path, **option)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_preset_builds(tmp_path, preset):
    """The published sizes, seen in the shapes of parameters that are never computed."""
    settings = presets.resolve(preset, "retrieval", "softmax", "gpu")[1]
    config = Config(task="retrieval", kernel="softmax", **settings)
    phases, _ = lra.make_phases(config, load(write_pairs(tmp_path)))
    params = jax.eval_shape(lambda key: phases[-1].init(key, None), jax.random.key(0))
    shapes = {leaf.shape for leaf in jax.tree.leaves(params["head"])}
    assert (
        shapes
        == {
            "quick": {(256, 64), (64,), (64, 2), (2,)},
            "skyformer": {(256, 128), (128,), (128, 2), (2,)},
            "spt": {(512, 128), (128,), (128, 2), (2,)},
            "spt-causal": {(512, 128), (128,), (128, 2), (2,)},
            "spt-small": {(256, 64), (64,), (64, 2), (2,)},
            "lra-paper": {(256, 512), (512,), (512, 256), (256,), (256, 2), (2,)},
            "lra-repo": {(256, 512), (512,), (512, 256), (256,), (256, 2), (2,)},
        }[preset]
    )
    assert len(phases) == (2 if preset.startswith("spt") else 1)


@pytest.mark.slow
def test_training_on_pairs_and_going_on(tmp_path, capsys):
    """Pretrained, and stopped after half of the steps on labels: the same curves."""
    folder = write_pairs(tmp_path / "data")
    arguments = [
        "lra", "--task=retrieval", f"--data_dir={folder}", "--preset=quick", "--steps=8",
        "--pretrain_steps=4", f"--cache_dir={tmp_path / 'cache'}", "--batch_size=4",
        "--eval_every=4", "--width=8", "--mlp_width=8", "--num_heads=1", "--kernel=elu",
        "--log_every=1", "--steps_per_dispatch=2", "--checkpoint_every=4",
    ]  # fmt: skip
    curves, accuracies = [], []
    for name in ("whole", "parts"):
        run_dir = tmp_path / name
        if name == "parts":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PhaseRun, "_dispatch", stopping(PhaseRun._dispatch))
                with pytest.raises(KeyboardInterrupt):
                    lra.main([*arguments, f"--run_dir={run_dir}"])
        lra.main([*arguments, f"--run_dir={run_dir}"])
        accuracies.append(json.loads(capsys.readouterr().out.splitlines()[-1])["test_accuracy"])
        files = [*sorted(run_dir.glob("*_train.csv")), *sorted(run_dir.glob("*_eval.csv"))]
        curves.append([path.read_bytes() for path in files])
    assert curves[0] == curves[1] and len(curves[0]) == 4
    assert accuracies[0] == accuracies[1]
    assert accuracies[0] * 10 == pytest.approx(round(accuracies[0] * 10))
    lines = json.loads((run_dir / "result.json").read_text())["metrics"]["reference"]
    assert set(lines) == {"majority class", "shared words"}


def stopping(dispatch):
    def dispatch_or_stop(self):
        if self.phase.name == "train" and self.step == 4:
            raise KeyboardInterrupt
        dispatch(self)

    return dispatch_or_stop
