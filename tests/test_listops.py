"""The ListOps task: generated data, splits, reference lines and the cache."""

import os
import subprocess
import sys

import grain
import numpy as np
import pytest

from experiments.tasks import TASKS, base, listops
from experiments.tasks import listops_grammar as grammar

SIZES = {"num_train": 500, "num_validation": 60, "num_test": 60}


def load(cache_dir, data_dir=None, **kwargs):
    return listops.load(data_dir, cache_dir, progress=False, **(SIZES | kwargs))


def sequence(split, i):
    return split.tokens[split.offsets[i] : split.offsets[i + 1]]


def python(code, **env):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        stdout=subprocess.PIPE,
        text=True,
    )


def load_code(cache_dir):
    return (
        "from experiments.tasks import listops\n"
        f"task = listops.load(None, {str(cache_dir)!r}, progress=False, **{SIZES})\n"
        "print(task.fingerprint)\n"
    )


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return load(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_not_change_the_data(workers):
    one, many = (listops.generate(5, 1200, w, progress=False) for w in (1, workers))
    assert len(one) == 1200
    for field in ("tokens", "lengths", "labels"):
        np.testing.assert_array_equal(getattr(one, field), getattr(many, field))


def test_duplicates_are_dropped(monkeypatch):
    draw = grammar.generate_block
    monkeypatch.setattr(grammar, "generate_block", lambda seed, block: draw(seed, block // 2))
    rows = listops.generate(0, 500, 1, progress=False)
    assert len({sequence(rows, i).tobytes() for i in range(500)}) == 500


def test_hash_seed_does_not_change_the_data_and_jax_is_not_needed(tmp_path):
    code = "import sys\n{}assert 'jax' not in sys.modules"
    runs = [
        python(code.format(load_code(tmp_path / seed)), PYTHONHASHSEED=seed) for seed in ("0", "1")
    ]
    fingerprints = [run.communicate()[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert fingerprints[0] == fingerprints[1] != ""


def test_task(task):
    assert TASKS["listops"] is listops.load
    assert (task.name, task.num_classes, task.max_length) == ("listops", 10, 2000)
    assert task.vocabulary == grammar.VOCABULARY
    assert not task.two_towers
    assert {name: len(split) for name, split in task.splits.items()} == {
        "train": 500,
        "validation": 60,
        "test": 60,
    }
    rows = {sequence(s, i).tobytes() for s in task.splits.values() for i in range(len(s))}
    assert len(rows) == 620


def test_rows_are_whole_and_padded(task):
    for row in task.splits["test"]:
        assert row["tokens"].shape == (2000,) and row["tokens"].dtype == np.uint8
        assert 501 <= row["length"] <= 1999
        assert (row["tokens"] != 0).sum() == row["length"]
        tokens = grammar.decode(row["tokens"][: row["length"]])
        assert grammar.evaluate(tokens) == row["label"]


@pytest.mark.parametrize("i", [-1, 60])
def test_index_out_of_range(task, i):
    with pytest.raises(IndexError, match="of 60"):
        task.splits["test"][i]


def test_pairs():
    tokens = np.arange(1, 11, dtype=np.uint8)
    split = base.Split(tokens, np.array([[1, 2], [3, 4]], np.int32), np.array([0, 1]), 4)
    assert len(split) == 2
    np.testing.assert_array_equal(split[1]["tokens"], [[4, 5, 6, 0], [7, 8, 9, 10]])
    np.testing.assert_array_equal(split[1]["length"], [3, 4])
    assert split[1]["label"] == 1


def test_grain_reads_every_row_once(task):
    split = task.splits["test"]
    dataset = grain.MapDataset.source(split).shuffle(seed=1).batch(32)
    batches = [dataset[i] for i in range(len(dataset))]
    assert [b["tokens"].shape for b in batches] == [(32, 2000), (28, 2000)]
    rows = {row.tobytes() for batch in batches for row in batch["tokens"]}
    assert rows == {row["tokens"].tobytes() for row in split}
    labels = np.concatenate([b["label"] for b in batches])
    np.testing.assert_array_equal(np.bincount(labels), np.bincount(split.labels))


def test_reference_lines(tmp_path):
    """Near the accuracies on 100,000 rows; 4 standard deviations of 1,000 test rows."""
    lines = load(tmp_path, num_train=2000, num_test=1000).reference_lines()
    expected = {
        "majority class": 0.170,
        "first token": 0.362,
        "one level": 0.453,
        "two levels": 0.664,
    }
    assert list(lines) == list(expected)
    for name, p in expected.items():
        assert lines[name] == pytest.approx(p, abs=4 * np.sqrt(p * (1 - p) / 1000)), name


@pytest.mark.parametrize("name", ["seed", "num_train", "num_validation", "num_test"])
def test_bad_arguments(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=-1, expected"):
        load(tmp_path, **{name: -1})


def test_second_load_reads_the_cache(tmp_path, monkeypatch):
    first = load(tmp_path)
    monkeypatch.setattr(listops, "generate", None)
    second = load(tmp_path)
    assert second.fingerprint == first.fingerprint
    assert isinstance(second.splits["train"].tokens, np.memmap)
    assert not list(tmp_path.glob(".*"))


def test_other_parameters_other_data(tmp_path):
    tasks = [load(tmp_path), load(tmp_path, seed=1), load(tmp_path, num_train=400)]
    assert len({task.fingerprint for task in tasks}) == 3
    assert len(list(tmp_path.iterdir())) == 3


def damage_truncate(folder):
    os.truncate(folder / "train.tokens.npy", 1000)


def damage_flip(folder):
    with (folder / "test.labels.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x09")


def damage_remove(folder):
    (folder / "validation.lengths.npy").unlink()


def damage_manifest(folder):
    os.truncate(folder / "manifest.json", 50)


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_remove, damage_manifest])
def test_damaged_cache_is_rebuilt(tmp_path, caplog, damage):
    first = load(tmp_path).fingerprint
    (folder,) = tmp_path.iterdir()
    damage(folder)
    assert load(tmp_path).fingerprint == first
    assert "damaged and will be rebuilt" in caplog.text
    caplog.clear()
    assert load(tmp_path).fingerprint == first
    assert not caplog.text


def test_foreign_cache_is_refused(tmp_path):
    load(tmp_path)
    (folder,) = tmp_path.iterdir()
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 8'))
    with pytest.raises(base.DataError, match="holds other data.*'seed': 8"):
        load(tmp_path)


def test_unwritable_cache(tmp_path):
    load(tmp_path)
    (folder,) = tmp_path.iterdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / folder.name).write_text("a file where the folder should be")
    with pytest.raises(base.DataError, match="could not be written"):
        load(other)


def test_a_killed_write_leaves_no_cache(tmp_path):
    kill = (
        "import numpy, os\n"
        "save, saved = numpy.save, []\n"
        "def save_five(*args):\n"
        "    saved.append(save(*args))\n"
        "    if len(saved) == 5: os._exit(9)\n"
        "numpy.save = save_five\n"
    )
    run = python(kill + load_code(tmp_path))
    run.communicate()
    assert run.returncode == 9
    assert not list(tmp_path.glob("listops-*"))
    assert load(tmp_path).fingerprint


def test_two_processes_at_once(tmp_path):
    runs = [python(load_code(tmp_path)) for _ in range(3)]
    fingerprints = {run.communicate()[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert fingerprints == {load(tmp_path).fingerprint}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_full_size(tmp_path):
    task = listops.load(None, tmp_path, progress=False)
    sizes = [len(split) for split in task.splits.values()]
    assert sizes == [96_000, 2_000, 2_000]
    for split in task.splits.values():
        assert split.lengths.min() == 501 and split.lengths.max() <= 1999
        assert split.offsets[-1] == len(split.tokens)
