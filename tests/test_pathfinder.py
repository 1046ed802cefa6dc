"""The tasks `pathfinder` and `pathx`: published files, generated pictures, the cache in parts."""

import json
import os
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from PIL import Image

from experiments import lra, objectives, presets
from experiments.tasks import TASKS, base, image, pathfinder
from experiments.tasks import pathfinder_files as files
from lowrank_attn.models.encoder import Encoder

SMALL = {"num_train": 50, "num_validation": 20, "num_test": 30}
HARD = "curv_contour_length_14"


def write_level(folder, count=20, side=32, numbers=(9, 10), array=False, seed=0):
    """A level of `count` random pictures for each of the folders `numbers`; gives its path."""
    generator = np.random.default_rng(seed)
    (folder / "metadata").mkdir(parents=True)
    for number in numbers:
        (folder / f"imgs/{number}").mkdir(parents=True)
        rows = []
        for i in range(count):
            pixels = generator.integers(0, 256, (side, side), np.uint8)
            pixels[0, 0] = i % 2  # so that a picture knows its label
            name = f"sample_{i}.png"
            Image.fromarray(pixels).save(folder / f"imgs/{number}/{name}")
            rows.append(
                [f"imgs/{number}", name, i, i % 2, 1.0, 14, 4, 2, 0.5, 1, 1]  # 11 columns
            )
        path = folder / f"metadata/{number}.npy"
        if array:
            np.save(path, np.array(rows).astype("<U32"))
        else:
            path.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    return folder


def load(tmp_path, task="pathfinder", data="data", cache="cache", **options):
    data_dir = None if data is None else tmp_path / data
    return TASKS[task](data_dir, tmp_path / cache, progress=False, **options)


def rows_of(task):
    return {row["tokens"].tobytes() for split in task.splits.values() for row in split}


@pytest.mark.parametrize(
    "layout",
    [".", "pathfinder32", "lra_release/pathfinder32", "lra_release/lra_release/pathfinder32"],
)
def test_published_pictures_are_each_read_once(tmp_path, layout):
    level = write_level(tmp_path / "data" / layout / HARD)
    task = load(tmp_path)
    assert {name: len(split) for name, split in task.splits.items()} == {
        "train": 32, "validation": 4, "test": 4,
    }  # fmt: skip
    assert (task.max_length, task.num_classes, len(task.vocabulary)) == (1024, 2, 257)
    written = {np.asarray(Image.open(p)).tobytes() for p in level.rglob("*.png")}
    assert rows_of(task) == written and len(written) == 40
    for split in task.splits.values():
        assert [row["tokens"][0] for row in split] == split.labels.tolist()
        assert all(row["length"] == 1024 for row in split)
    assert not list((tmp_path / "cache").glob(".*"))


def test_pathx_has_pictures_of_128_pixels(tmp_path):
    write_level(tmp_path / "data/pathfinder128" / HARD, 6, side=128)
    task = load(tmp_path, "pathx")
    assert task.name == "pathx" and task.max_length == 16_384
    assert task.splits["test"][0]["tokens"].shape == (16_384,)
    with pytest.raises(base.DataError, match="no pathfinder32 files"):
        load(tmp_path)


def test_metadata_as_text_and_as_arrays_are_the_same(tmp_path):
    write_level(tmp_path / "data" / HARD)
    write_level(tmp_path / "arrays" / HARD, array=True)
    assert (tmp_path / "arrays" / HARD / "metadata/9.npy").read_bytes()[:6] == b"\x93NUMPY"
    text, arrays = (files.list_pictures(tmp_path / d / HARD) for d in ("data", "arrays"))
    assert [picture[:2] for picture in text] == [picture[:2] for picture in arrays]
    assert [p.name for p in text[::20]] == ["imgs/9/sample_0.png", "imgs/10/sample_0.png"]
    assert load(tmp_path).fingerprint == load(tmp_path, data="arrays").fingerprint


def test_the_split_is_a_function_of_names_and_seed():
    names = [f"imgs/{i}/sample_{j}.png" for i in range(2) for j in range(100)]
    split = pathfinder.split_names(names, 0)
    assert {name: len(places) for name, places in split.items()} == {
        "train": 160, "validation": 20, "test": 20,
    }  # fmt: skip
    assert sorted(sum(split.values(), [])) == list(range(200))
    assert split["test"][:5] == [3, 5, 30, 34, 37]
    backwards = pathfinder.split_names(names[::-1], 0)
    assert [[names[i] for i in split[s]] for s in split] == [
        [names[::-1][i] for i in backwards[s]][::-1] for s in split
    ]
    assert pathfinder.split_names(names, 1) != split
    fewer = pathfinder.split_names(names[:-1], 0)
    assert len(set(fewer["test"]) ^ set(split["test"])) <= 3


def test_the_seed_of_the_split_is_part_of_the_cache(tmp_path):
    write_level(tmp_path / "data" / HARD)
    tasks = [load(tmp_path, seed=seed) for seed in (0, 1)]
    assert rows_of(tasks[0]) == rows_of(tasks[1])
    assert tasks[0].fingerprint != tasks[1].fingerprint
    seeds = set()
    for path in (tmp_path / "cache").glob("*/manifest.json"):
        description = json.loads(path.read_text())["description"]
        seeds.add(description["source"]["split"]["seed"])
    assert seeds == {0, 1}


def test_the_inner_of_two_copies_is_used(tmp_path, caplog):
    write_level(tmp_path / "data/lra_release/pathfinder32" / HARD, seed=1)
    inner = write_level(tmp_path / "data/lra_release/lra_release/pathfinder32" / HARD)
    for data in ("data", "data/lra_release"):
        task = load(tmp_path, data=data)
        assert rows_of(task) == {np.asarray(Image.open(p)).tobytes() for p in inner.rglob("*.png")}
        assert "Two copies of pathfinder32: using" in caplog.text
        caplog.clear()


def test_difficulty_names_the_level(tmp_path):
    for seed, (difficulty, folder) in enumerate(files.LEVELS.items()):
        level = write_level(tmp_path / "data/pathfinder32" / folder, 10, seed=seed)
        written = {np.asarray(Image.open(p)).tobytes() for p in level.rglob("*.png")}
        assert rows_of(load(tmp_path, difficulty=difficulty)) == written
    assert rows_of(load(tmp_path)) == written  # hard, the last one, is the default
    with pytest.raises(ValueError, match="difficulty='simple' is unknown; known: easy, inter"):
        load(tmp_path, difficulty="simple")


def test_empty_pictures_are_left_out_aloud(tmp_path, caplog):
    level = write_level(tmp_path / "data" / HARD)
    (level / "imgs/10/sample_7.png").write_bytes(b"")
    task = load(tmp_path)
    assert sum(map(len, task.splits.values())) == 39
    assert "1 of 40 pictures" in caplog.text and "imgs/10/sample_7.png" in caplog.text


def test_pictures_in_colour_become_grey_by_the_formula_of_the_image_task(tmp_path):
    level = write_level(tmp_path / "data" / HARD)
    rgb = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(rgb).save(level / "imgs/9/sample_0.png")
    grey = image.to_grey(rgb.reshape(-1, 3).T)
    assert grey.tobytes() in rows_of(load(tmp_path))


def damage_truncate(level):
    path = level / "imgs/10/sample_2.png"
    os.truncate(path, path.stat().st_size // 2)
    return r"10.npy:3: .*imgs/10/sample_2.png is damaged"


def damage_other_format(level):
    (level / "imgs/10/sample_2.png").write_text("no picture")
    return r"10.npy:3: .*imgs/10/sample_2.png is damaged: cannot identify"


def damage_size(level):
    Image.new("L", (32, 16)).save(level / "imgs/10/sample_2.png")
    return r"10.npy:3: .*sample_2.png is damaged: 32 x 16 pixels(?s:.*)of 32 x 32 pixels"


def damage_depth(level):
    Image.fromarray(np.zeros((32, 32), np.uint16)).save(level / "imgs/10/sample_2.png")
    return r"10.npy:3: .*sample_2.png is damaged: its pixels are of the mode I;16"


def damage_missing(level):
    (level / "imgs/10/sample_2.png").unlink()
    return r"10.npy:3: there is no .*imgs/10/sample_2.png"


def edit_row(level, edit):
    path = level / "metadata/10.npy"
    lines = path.read_text().splitlines()
    lines[2] = edit(lines[2])
    path.write_text("\n".join(lines))


def damage_columns(level):
    edit_row(level, lambda line: line.rpartition(" ")[0])
    return r"10.npy:3: 10 columns(?s:.*)expected: 11 columns"


def damage_label(level):
    edit_row(level, lambda line: line.replace(" 2 0 ", " 2 2 "))
    return r"10.npy:3: label '2'(?s:.*)expected: label 0 or 1"


def damage_pickle(level):
    np.save(level / "metadata/10.npy", np.array([["imgs/10", 1]], object), allow_pickle=True)
    return r"10.npy: Object arrays cannot be loaded"


def damage_numbers(level):
    np.save(level / "metadata/10.npy", np.zeros((20, 11)))
    return r"10.npy: an array \(20, 11\) of float64, not a table of text"


def damage_bytes(level):
    (level / "metadata/10.npy").write_bytes(b"\xff\xfe\x00")
    return r"10.npy: 'utf-8' codec can't decode"


def damage_folder(level):
    (level / "metadata/10.npy").unlink()
    return r"imgs/10: there are no metadata of it(?s:.*)expected: metadata/10.npy"


def damage_all(level):
    for path in level.glob("imgs/*/*"):
        path.write_bytes(b"")
    return "0 pictures(?s:.*)at least 10"


def damage_metadata(level):
    for path in level.glob("metadata/*"):
        path.unlink()
    return "there are no metadata(?s:.*)files 0.npy"


@pytest.mark.parametrize(
    "damage", [value for name, value in list(globals().items()) if name.startswith("damage_")]
)
def test_damage_is_named(tmp_path, damage):
    message = damage(write_level(tmp_path / "data" / HARD))
    with pytest.raises(base.DataError, match=message):
        load(tmp_path)
    assert not list((tmp_path / "cache").glob("pathfinder-*"))


def test_records_of_tensorflow_datasets_are_refused(tmp_path):
    folder = tmp_path / "data/pathfinder32/1.0.0"
    folder.mkdir(parents=True)
    (folder / "pathfinder32-hard.tfrecord-00000-of-00010").write_bytes(b"records")
    with pytest.raises(
        base.DataError, match="`pathfinder_tfds`, whose format is not read"
    ) as error:
        load(tmp_path)
    assert f"pathfinder32/{HARD}/imgs" in str(error.value)


@pytest.mark.parametrize("task", ["pathfinder", "pathx"])
def test_missing_pictures_say_where_to_get_them(tmp_path, capsys, task):
    with pytest.raises(SystemExit) as stop:
        lra.main(["lra", f"--task={task}", "--preset=quick", f"--data_dir={tmp_path}"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    folder = {"pathfinder": "pathfinder32", "pathx": "pathfinder128"}[task]
    for part in (
        str(tmp_path / "lra_release/lra_release" / folder),
        str(tmp_path / folder),
        f"{HARD}/metadata",
        "lra_release.gz",
        "then pictures are generated",
    ):
        assert part in message


@pytest.mark.parametrize(("kernel", "options"), [("llops", {"num_features": 8}), ("softmax", {})])
def test_a_black_picture_is_no_padding(tmp_path, kernel, options):
    """An encoder gives the same finite numbers as without any mask."""
    level = write_level(tmp_path / "data" / HARD)
    for path in level.rglob("*.png"):
        Image.new("L", (32, 32)).save(path)
    batch = load(tmp_path).splits["test"].take(np.arange(2))
    assert not batch["tokens"].any()
    mask = objectives.real_tokens(batch)
    encoder = Encoder(
        257, 1024, num_layers=1, width=16, num_heads=2, mlp_width=16, kernel=kernel,
        options=options, positions="learned", rngs=nnx.Rngs(0),
    )  # fmt: skip
    with_mask, without = (encoder(jnp.asarray(batch["tokens"]), m) for m in (mask, None))
    assert_close(with_mask, without)  # finite, too


def test_masked_pixels_are_no_grey_level():
    """Tokens are bytes and the mask's id is 256, which is no byte."""
    seen = []

    def module(params):
        def predictor(tokens, mask, rngs):
            seen.append(np.asarray(tokens).astype(int))
            return jnp.zeros((*tokens.shape, 257))

        return predictor

    objective = objectives.token_prediction(module, "masked", 0.5, image.VOCABULARY.index("<mask>"))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 1024), np.uint8)
    batch = {"tokens": tokens, "length": np.full(2, 1024)}
    objective.loss(None, batch, jax.random.key(0))
    masked = seen[0] == 256
    assert 0.4 < masked.mean() < 0.6
    np.testing.assert_array_equal(seen[0][~masked], tokens[~masked])


def test_generated_pictures(tmp_path):
    task = load(tmp_path, data=None, **SMALL)
    assert [len(split) for split in task.splits.values()] == [50, 20, 30]
    assert len(rows_of(task)) == 100
    assert task.splits["train"].tokens.max() == 255
    assert set(task.reference_lines()) == {"majority class"}
    others = [
        load(tmp_path, data=None, **SMALL, seed=1),
        load(tmp_path, data=None, **SMALL, difficulty="easy"),
        load(tmp_path, "pathx", data=None, **dict.fromkeys(SMALL, 2)),
    ]
    assert len({task.fingerprint for task in [task, *others]}) == 4


def test_the_test_part_does_not_depend_on_the_size_of_the_others(tmp_path):
    small, large = (
        load(tmp_path, data=None, **(SMALL | {"num_train": count})) for count in (10, 50)
    )
    for name in ("validation", "test"):
        np.testing.assert_array_equal(small.splits[name].tokens, large.splits[name].tokens)


def test_what_is_loaded_is_told(tmp_path, capsys):
    TASKS["pathfinder"](None, tmp_path, **SMALL)
    message = capsys.readouterr().err
    assert "pathfinder: no data_dir, so pictures are generated" in message
    assert "pathfinder: 100%" in message
    assert re.search(r"50 pictures to train, \d\d.0% of one path", message)
    TASKS["pathfinder"](None, tmp_path, **SMALL)
    message = capsys.readouterr().err
    assert "generated" not in message and "30 pictures to test" in message


@pytest.mark.parametrize("name", ["seed", *SMALL])
def test_wrong_numbers(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=-1, expected"):
        load(tmp_path, data=None, **{name: -1})


@pytest.mark.parametrize("cores", [1, 3])
def test_an_interrupted_generation_goes_on(tmp_path, monkeypatch, cores):
    """Whole parts are not drawn again, damaged ones are; cores do not change the pictures."""
    monkeypatch.setattr(pathfinder, "PART", 10)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    whole = load(tmp_path, data=None, cache="whole", **SMALL).fingerprint
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    draw, drawn = pathfinder.generator.generate, []

    def interrupted(p, seed, count):
        drawn.append(seed)
        if len(drawn) == 4:
            raise KeyboardInterrupt
        return draw(p, seed, count)

    monkeypatch.setattr(pathfinder.generator, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, data=None, **SMALL)
    parts = sorted((tmp_path / "cache").glob(".pathfinder-parts-*/*.npz"))
    assert 1 <= len(parts) < 10 and not list((tmp_path / "cache").glob("pathfinder-*"))
    os.truncate(parts[0], parts[0].stat().st_size - 100)
    drawn[:] = [None] * 4  # no further interruption
    assert load(tmp_path, data=None, **SMALL).fingerprint == whole
    assert len(drawn) - 4 == 10 - (len(parts) - 1)
    assert not list((tmp_path / "cache").glob(".*"))


def test_runs_at_the_same_time(tmp_path, monkeypatch):
    """They share the parts, and none minds that the first to finish removes them."""
    monkeypatch.setattr(pathfinder, "PART", 5)
    alone = load(tmp_path, data=None, cache="alone", **SMALL).fingerprint
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(load, tmp_path, data=None, **SMALL) for _ in range(3)]
    assert {run.result().fingerprint for run in runs} == {alone}
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_split_in_parts_is_written_like_a_whole_one(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 99, 60, np.int16)
    lengths, labels = np.arange(1, 11, dtype=np.int32), np.arange(10, dtype=np.int32)
    rows = base.Split(tokens[:55], lengths, labels, 10)
    cuts = (0, 2, 3, 10)
    pieces = [
        base.Split(rows.tokens[rows.offsets[i] : rows.offsets[j]], lengths[i:j], labels[i:j], 10)
        for i, j in zip(cuts, cuts[1:])
    ]
    found = []
    for name, split in (("whole", rows), ("parts", iter(pieces))):
        build = {"train": split, "validation": rows, "test": rows}
        found.append(base.cached_splits(tmp_path, name, {}, 10, lambda build=build: build))
    assert found[0][1] == found[1][1]
    np.testing.assert_array_equal(found[1][0]["train"].tokens, rows.tokens)


def test_writing_parts_takes_the_memory_of_one(tmp_path):
    """64 pieces of 1 MB; the written pages of a memory-mapped file are not counted."""

    def piece(i):
        return base.Split(
            np.full(2**20, i, np.uint8), np.full(64, 2**14, np.int32), np.zeros(64, np.int32), 2**14
        )

    def build():
        return {name: map(piece, range(64 if name == "train" else 1)) for name in base.SPLITS}

    tracemalloc.start()
    splits, _ = base.cached_splits(tmp_path, "large", {}, 2**14, build)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(splits["train"]) == 64 * 64 and splits["train"].tokens[-1] == 63
    assert peak < 4 * 2**20


@pytest.mark.parametrize("preset", presets.PRESETS)
@pytest.mark.parametrize("task", ["pathfinder", "pathx"])
def test_every_preset_has_both_tasks(preset, task):
    settings = presets.PRESETS[preset][task]
    if preset.startswith("lra"):
        pictures = settings["steps"] * settings["batch_size"]
        assert pictures == pytest.approx(200 * 160_000, rel=2e-3)
        assert settings["steps"] == 200 * settings["warmup_steps"]


@pytest.mark.slow
def test_training_on_generated_pictures(tmp_path, capsys):
    lra.main([
        "lra", "--task=pathfinder", "--kernel=elu", "--preset=quick", "--steps=2", "--width=8",
        "--num_heads=1", "--mlp_width=8", "--head_width=8", "--batch_size=2", "--eval_every=2",
        "--task_options=num_train=8,num_validation=4,num_test=6",
        f"--cache_dir={tmp_path / 'cache'}", f"--run_dir={tmp_path / 'run'}",
    ])  # fmt: skip
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["task"] == "pathfinder"
    metrics = json.loads((tmp_path / "run/result.json").read_text())["metrics"]
    assert metrics["at_chance"] == ("AT CHANCE" in err)
