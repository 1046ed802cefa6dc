"""Reading aclImdb and CIFAR-10 as their publishers lay them out."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import lra, objectives
from experiments.common.phase_run import PhaseRun
from experiments.common.plot import read_rows
from experiments.tasks import image, text
from experiments.tasks.base import DataError
from experiments.tasks.files import hold_out


def write_cifar(folder, count=20, seed=0):
    """Six files of `count` random pictures; returns the records."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    files = {}
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        records = generator.integers(0, 256, (count, 3073), np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)
        files[name] = records
    return files


def write_reviews(folder, count=20):
    for part in ("train", "test"):
        for name in ("neg", "pos"):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                review = f"{part} {name} {i} <br /> " * (i + 1)
                (folder / part / name / f"{i}_{i % 11}.txt").write_bytes(review.encode())


def test_grey_levels_of_five_pixels():
    """Worked out by hand from floor(255.5 (0.2989 R + 0.587 G + 0.114 B) / 255)."""
    rgb = np.array([[0, 255, 10, 255, 100], [0, 255, 20, 0, 150], [0, 255, 30, 0, 200]], np.uint8)
    np.testing.assert_array_equal(image.to_grey(rgb), [0, 255, 18, 76, 141])


@pytest.mark.parametrize("layout", [".", "cifar-10-batches-bin"])
def test_image_reads_every_picture_once(tmp_path, layout):
    files = write_cifar(tmp_path / "data" / layout)
    task = image.load(tmp_path / "data", tmp_path / "cache")
    assert {name: len(split) for name, split in task.splits.items()} == {
        "train": 90, "validation": 10, "test": 20,
    }  # fmt: skip
    assert task.max_length == 1024 and task.num_classes == 10
    records = files["test_batch.bin"]
    for row, record in zip(task.splits["test"], records, strict=True):
        np.testing.assert_array_equal(row["tokens"], image.to_grey(record[1:].reshape(3, 1024)))
        assert row["label"] == record[0] and row["length"] == 1024
    read = [
        row["tokens"].tobytes() for name in ("train", "validation") for row in task.splits[name]
    ]
    written = [
        image.to_grey(record[1:].reshape(3, 1024)).tobytes()
        for name, records in files.items() if name != "test_batch.bin" for record in records
    ]  # fmt: skip
    assert sorted(read) == sorted(written)
    same = image.load(tmp_path / "data", tmp_path / "other")
    assert same.fingerprint == task.fingerprint
    assert image.load(tmp_path / "data", tmp_path / "other", seed=1).fingerprint != same.fingerprint


def test_black_pixels_are_no_padding(tmp_path):
    """Every token of an all-black picture is real."""
    write_cifar(tmp_path / "data", 2)
    np.zeros((2, 3073), np.uint8).tofile(tmp_path / "data" / "test_batch.bin")
    split = image.load(tmp_path / "data", tmp_path / "cache").splits["test"]
    batch = split.take(np.arange(2))
    assert batch["tokens"].shape == (2, 1024) and not batch["tokens"].any()
    assert jnp.all(objectives.real_tokens(batch))


def test_damaged_pictures_are_named(tmp_path):
    write_cifar(tmp_path / "data", 3)
    path = tmp_path / "data" / "data_batch_2.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"(?s)data_batch_2.bin has 9218 bytes.*records of 3073"):
        image.load(tmp_path / "data", tmp_path / "cache")
    path.write_bytes(whole[:3073] + b"\x0a" + whole[3074:])
    with pytest.raises(DataError, match="picture 1 has the label 10"):
        image.load(tmp_path / "data", tmp_path / "cache")


@pytest.mark.parametrize("layout", [".", "aclImdb"])
def test_text_reads_bytes(tmp_path, layout):
    write_reviews(tmp_path / "data" / layout)
    task = text.load(tmp_path / "data", tmp_path / "cache", progress=False)
    assert {name: len(split) for name, split in task.splits.items()} == {
        "train": 36, "validation": 4, "test": 40,
    }  # fmt: skip
    row = task.splits["test"][0]
    assert bytes((row["tokens"][: row["length"]] - 1).astype(np.uint8)) == b"test neg 0 <br /> "
    assert not row["tokens"][row["length"] :].any()
    assert [int(row["label"]) for row in task.splits["test"]] == [0] * 20 + [1] * 20
    assert task.reference_lines()["majority class"] == 0.5
    compatible = text.load(tmp_path / "data", tmp_path / "cache", validation="test", progress=False)
    assert len(compatible.splits["train"]) == 40
    np.testing.assert_array_equal(
        compatible.splits["validation"].tokens, compatible.splits["test"].tokens
    )


def test_repeated_reviews_are_left_out_on_demand(tmp_path):
    write_reviews(tmp_path, 20)
    first, again = (tmp_path / "train/pos" / f"{i}_{i % 11}.txt" for i in (0, 1))
    again.write_bytes(first.read_bytes())
    of_test = (tmp_path / "test/neg/5_5.txt").read_bytes()
    (tmp_path / "train/neg/7_7.txt").write_bytes(of_test)
    cache = tmp_path / "cache"
    whole = text.load(tmp_path, cache, validation="test", progress=False)
    unique = text.load(tmp_path, cache, validation="test", unique=True, progress=False)
    assert len(whole.splits["train"]) == 40 and len(unique.splits["train"]) == 38
    texts = {
        name: [row["tokens"][: row["length"]].tobytes() for row in unique.splits[name]]
        for name in ("train", "test")
    }
    assert len(set(texts["train"])) == 38 and not {*texts["train"]} & {*texts["test"]}
    assert len(texts["test"]) == 40


def test_text_is_cut_by_bytes():
    """Also inside a character of several bytes."""
    ids = text.encode("é".encode() * 3000)
    assert len(ids) == 4096 and ids[-1] == 0xA9 + 1
    assert len(text.encode("aé".encode() * 2000)) == 4096
    assert text.encode(bytes(range(256))).tolist() == list(range(1, 257))


def test_empty_reviews_and_folders_are_named(tmp_path):
    write_reviews(tmp_path, 3)
    (tmp_path / "train/pos/1_1.txt").write_bytes(b"")
    with pytest.raises(DataError, match="1_1.txt is empty"):
        text.load(tmp_path, tmp_path / "cache", progress=False)
    for path in tmp_path.rglob("*.txt"):
        path.unlink()
    with pytest.raises(DataError, match="no reviews"):
        text.load(tmp_path, tmp_path / "cache", progress=False)


@pytest.mark.parametrize(
    ("task", "address"), [("text", "aclImdb_v1"), ("image", "cifar-10-binary")]
)
def test_without_data_the_message_says_where_to_get_them(tmp_path, capsys, task, address):
    for arguments in ([], [f"--data_dir={tmp_path}"]):
        with pytest.raises(SystemExit) as stop:
            lra.main(["lra", f"--task={task}", f"--cache_dir={tmp_path / 'cache'}", *arguments])
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert address in message and "--data_dir" in message


def test_wrong_task_options_are_named(tmp_path, capsys):
    write_reviews(tmp_path, 3)
    for option, message in (
        ("validation=none", "validation='none', expected 'train' or 'test'"),
        ("size=3", "task_options={'size': 3} do not fit task='text'"),
    ):
        with pytest.raises(SystemExit) as stop:
            lra.main(["lra", "--task=text", f"--data_dir={tmp_path}", f"--task_options={option}",
                      f"--cache_dir={tmp_path / 'cache'}"])  # fmt: skip
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_training_in_buckets_and_going_on(tmp_path, capsys):
    """Reviews of two sizes; stopped after half of the steps, the loss curve is the same."""
    write_reviews(tmp_path / "data", 40)
    arguments = [
        "lra", "--task=text", f"--data_dir={tmp_path / 'data'}", "--preset=quick", "--steps=8",
        f"--cache_dir={tmp_path / 'cache'}", "--batch_size=4", "--eval_every=4", "--width=16",
        "--kernel=elu", "--log_every=1", "--steps_per_dispatch=2", "--checkpoint_every=4",
    ]  # fmt: skip
    curves = []
    for name, stops in (("whole", ()), ("parts", (4,))):
        folder = tmp_path / name
        for step in stops:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PhaseRun, "_dispatch", stop_at(step, PhaseRun._dispatch))
                with pytest.raises(KeyboardInterrupt):
                    lra.main([*arguments, f"--run_dir={folder}"])
        lra.main([*arguments, f"--run_dir={folder}"])
        curves.append((folder / "train_train.csv").read_text())
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_pictures_are_pretrained_as_levels(tmp_path):
    write_cifar(tmp_path / "data", 4)
    run_dir = tmp_path / "run"
    lra.main([
        "lra", "--task=image", f"--data_dir={tmp_path / 'data'}", "--preset=spt-small",
        f"--cache_dir={tmp_path / 'cache'}", f"--run_dir={run_dir}", "--kernel=elu", "--width=8",
        "--num_layers=1", "--mlp_width=8", "--head_width=8", "--batch_size=2", "--dtype=float32",
        "--pretrain_steps=4", "--steps=2", "--eval_every=2", "--log_every=1",
    ])  # fmt: skip
    rows = read_rows(run_dir / "pretrain_eval.csv")
    assert [set(row) for row in rows] == 2 * [{"step", "loss", "squared_error"}]
    assert all(0 < row["squared_error"] < 9 for row in rows)


@pytest.mark.parametrize("argument", ["--embed=levels", "--pretrain_loss=l1"])
def test_reviews_are_no_levels(tmp_path, capsys, argument):
    write_reviews(tmp_path, 10)
    arguments = [f"--{name}_dir={tmp_path / name}" for name in ("cache", "run")]
    with pytest.raises(SystemExit) as stop:
        lra.main(["lra", "--task=text", f"--data_dir={tmp_path}", argument, "--pretrain_steps=4",
                  *arguments])  # fmt: skip
    assert stop.value.code == 2
    assert "task='text', whose tokens are no levels" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def stop_at(step, dispatch):
    def stopping(self):
        if self.step == step:
            raise KeyboardInterrupt
        dispatch(self)

    return stopping


def test_held_out_examples_are_a_function_of_count_and_seed():
    held = hold_out(1000, 0.1, 3)
    assert held.sum() == 100
    np.testing.assert_array_equal(held, hold_out(1000, 0.1, 3))
    assert (held != hold_out(1000, 0.1, 4)).any()
    with pytest.raises(ValueError, match="seed=-1"):
        hold_out(10, 0.1, -1)
    with pytest.raises(ValueError, match="9 examples are too few to hold out 10% of them"):
        hold_out(9, 0.1, 0)
