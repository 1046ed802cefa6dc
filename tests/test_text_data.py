"""Files of text to shards of tokens to rows: nothing lost, nothing damaged goes by unseen."""

import gzip
import json
import re

import numpy as np
import pytest

from experiments import prepare_text
from experiments.common.data import train_iterator
from experiments.common.tokenizer import load_tokenizer
from experiments.tasks.base import DataError
from experiments.text_data import shards
from experiments.text_data.documents import BadText, read_documents
from experiments.text_data.rows import Rows
from experiments.text_data.shards import TextSettings, load_text

BYTES = load_tokenizer("bytes")
DOCUMENTS = [f"document {i} says " + "é\n" * i for i in range(40)]


def lines(documents):
    return "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in documents).encode()


def write_zst(path, content):
    path.write_bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(content))


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)


@pytest.fixture
def folder(tmp_path):
    """Text in a folder: a file in another folder, an empty document, a damaged file to be."""
    (tmp_path / "text" / "b").mkdir(parents=True)
    (tmp_path / "text" / "a.jsonl").write_bytes(lines([*DOCUMENTS[:20], ""]))
    (tmp_path / "text" / "b" / "c.jsonl.gz").write_bytes(gzip.compress(lines(DOCUMENTS[20:39])))
    (tmp_path / "text" / "d.txt").write_text(DOCUMENTS[39], encoding="utf-8")
    (tmp_path / "text" / "readme.md").write_text("no document")
    return tmp_path / "text"


def settings(folder, **others):
    given = {"cache_dir": str(folder.parent / "cache"), "validation_share": 0.2, **others}
    return TextSettings(data=str(folder), tokenizer="bytes", **given)


def load(folder, **others):
    return load_text(settings(folder, **others), BYTES, progress=False)


def documents(text, split):
    """The documents of a split, decoded."""
    tokens = np.concatenate(text.splits[split])
    parts = np.split(tokens, np.flatnonzero(tokens == text.eot))
    assert len(parts[0]) == 0
    return [BYTES.decode(part.tolist()) for part in parts[1:]]


def test_every_document_is_in_one_split(folder):
    text = load(folder)
    train, validation = (documents(text, split) for split in ("train", "validation"))
    assert sorted([*train, *validation]) == sorted(DOCUMENTS)
    assert 2 <= len(validation) <= 16 and train == [x for x in DOCUMENTS if x in {*train}]


def test_validation_depends_on_names_and_seed_alone(folder, tmp_path):
    first = documents(load(folder), "validation")
    others = load(folder, data_seed=1)
    assert documents(others, "validation") != first
    # other text, other files, the same names: the same numbers are drawn
    changed = [text.upper() for text in DOCUMENTS]
    (folder / "a.jsonl").write_bytes(lines(changed[:20]))
    (folder / "d.txt").unlink()
    again = documents(load(folder), "validation")
    expected = [changed[i] if i < 20 else DOCUMENTS[i] for i in range(39) if DOCUMENTS[i] in first]
    assert again == expected


def test_validation_files_are_whole(folder):
    text = load(folder, files="*.jsonl", validation_files="b/*")
    assert documents(text, "train") == DOCUMENTS[:20]
    assert documents(text, "validation") == DOCUMENTS[20:39]


def test_all_formats_hold_the_same(tmp_path):
    content = lines(DOCUMENTS)
    (tmp_path / "x.jsonl").write_bytes(content)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("x.jsonl", "x.jsonl.gz"):
        assert [*read_documents(tmp_path / name)] == DOCUMENTS


def test_zst_holds_the_same(tmp_path):
    content = lines(DOCUMENTS)
    path = tmp_path / "x.jsonl.zst"
    compress = pytest.importorskip("zstandard").ZstdCompressor().compress
    path.write_bytes(compress(content[:1000]) + compress(content[1000:]))  # two frames
    assert [*read_documents(path)] == DOCUMENTS


def test_parquet_holds_the_same(tmp_path):
    write_parquet(tmp_path / "x.parquet", {"meta": [1] * 40, "text": DOCUMENTS})
    assert [*read_documents(tmp_path / "x.parquet")] == DOCUMENTS


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b"}\n')
    assert [*read_documents(tmp_path / "x.jsonl")] == ["a?b"]


LENGTHS = [len(line) for line in lines(DOCUMENTS).splitlines(keepends=True)]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("x.txt", b"good \xff bad", "byte 5"),
        ("x.jsonl", lines(DOCUMENTS[:3]) + b'{"text": "cu', f"byte {sum(LENGTHS[:3])}"),
        ("x.jsonl", lines(DOCUMENTS[:2]) + b'{"txt": "x"}\n', f"byte {sum(LENGTHS[:2])}"),
        ("x.jsonl", lines(DOCUMENTS[:1]) + b"\xff\xfe\n", f"byte {LENGTHS[0]}"),
        ("x.jsonl.gz", gzip.compress(lines(DOCUMENTS))[:-20], r"byte \d+"),
        ("x.jsonl.gz", b"no gzip", "byte 0"),
    ],
)
def test_damage_is_named(tmp_path, name, content, place):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadText, match=f"{name} is damaged at {place}: "):
        list(read_documents(tmp_path / name))


def test_damaged_zst_is_named(tmp_path):
    path = tmp_path / "x.jsonl.zst"
    write_zst(path, lines(DOCUMENTS))
    whole = path.read_bytes()
    for content in (whole[:-5], b"no zst" + whole):
        path.write_bytes(content)
        with pytest.raises(BadText, match=r"x\.jsonl\.zst is damaged at byte \d+: "):
            list(read_documents(path))


def test_damaged_parquet_is_named(tmp_path):
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["a", "b", None]})
    with pytest.raises(BadText, match="at row 2: expected a string, found NoneType"):
        list(read_documents(path))
    write_parquet(path, {"content": ["a"]})
    with pytest.raises(BadText, match="at row 0: no column 'text' among content"):
        list(read_documents(path))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadText, match="at row 0: "):
        list(read_documents(path))


def test_damaged_file_stops_unless_it_is_skipped(folder, monkeypatch):
    """What comes before the damage is left out too; shards that are whole are kept."""
    monkeypatch.setattr(shards, "_SHARD_BYTES", 1)
    content = (folder / "b" / "c.jsonl.gz").read_bytes()
    (folder / "b" / "c.jsonl.gz").write_bytes(content[:-9])
    with pytest.raises(BadText, match=r"c\.jsonl\.gz is damaged at byte"):
        load(folder)
    (cache,) = (folder.parent / "cache").iterdir()
    assert {path.name for path in cache.iterdir()} == {"0.train", "0.validation", "0.json"}
    written = (cache / "0.train").stat().st_mtime_ns
    text = load(folder, skip_bad_shards=True)
    assert (cache / "0.train").stat().st_mtime_ns == written
    found = documents(text, "train") + documents(text, "validation")
    assert sorted(found) == sorted([*DOCUMENTS[:20], DOCUMENTS[39]])
    assert len(text.skipped) == 1 and "c.jsonl.gz" in text.skipped[0]
    with pytest.raises(BadText):  # what was skipped once is not skipped unasked
        load(folder)
    monkeypatch.setattr(shards, "_SHARD_BYTES", 2**20)  # the files in one shard
    again = load(folder, skip_bad_shards=True, cache_dir=str(cache.parent / "one"))
    assert len(again.splits["train"]) == 1
    assert documents(again, "train") == documents(text, "train")


def test_damaged_shard_is_built_again(folder, monkeypatch):
    monkeypatch.setattr(shards, "_SHARD_BYTES", 1)
    text = load(folder)
    fingerprint, path = text.fingerprint, text.folder / "1.train"
    kept = (text.folder / "0.train").stat().st_mtime_ns
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"\0\0")
    with pytest.raises(DataError, match=r"(?s)damaged.*1\.json"):
        load(text.folder)  # without the text it cannot be
    assert load(folder).fingerprint == fingerprint
    assert path.read_bytes() == content
    assert (text.folder / "0.train").stat().st_mtime_ns == kept


def test_shards_do_without_their_text(folder):
    text = load(folder)
    moved = text.folder.rename(folder.parent / "moved")
    again = load(moved)
    assert again.fingerprint == text.fingerprint
    assert documents(again, "train") == documents(load(folder), "train")


def test_shards_of_another_tokenizer_are_refused(folder):
    text = load(folder)
    about = json.loads((text.folder / "text.json").read_text())
    about["source"]["tokenizer"] = "other"
    (text.folder / "text.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match="made with another tokenizer than bytes"):
        load(text.folder)


def test_folder_without_text_says_so(tmp_path):
    with pytest.raises(DataError, match=r"none of the 0 files of text matches '\*'"):
        load(tmp_path)


@pytest.mark.parametrize("length", [1, 7, 64])
def test_rows_are_the_stream(folder, monkeypatch, length):
    """Across shards, every token but the first is a target once, up to the last whole row."""
    monkeypatch.setattr(shards, "_SHARD_BYTES", 1)
    text = load(folder)
    assert len(text.splits["train"]) == 3
    stream = np.concatenate(text.splits["train"])
    rows = Rows(text.splits["train"], length)
    assert len(rows) == (len(stream) - 1) // length
    tokens, targets = (
        np.concatenate([row[name] for row in map(rows.__getitem__, range(len(rows)))])
        for name in ("tokens", "targets")
    )
    assert np.array_equal(tokens, stream[: len(rows) * length])
    assert np.array_equal(targets, stream[1 : len(rows) * length + 1])


def test_few_rows_are_spread(folder):
    text = load(folder)
    every, few = (Rows(text.splits["train"], 7, limit) for limit in (None, 5))
    assert 2 <= len(few) <= 5
    assert np.array_equal(few[1]["tokens"], every[-(-len(every) // 5)]["tokens"])


def test_too_little_text_says_what_to_do(folder):
    with pytest.raises(DataError, match="(?s)less than a row.*--validation_share"):
        Rows(load(folder).splits["validation"], 10**6)


def test_batches_continue_exactly(folder):
    rows = Rows(load(folder).splits["train"], 7)
    batches = train_iterator(rows, 4, 2, seed=3)
    next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    expected = [next(batches) for _ in range(30)]  # several epochs
    batches.close()
    again = train_iterator(rows, 4, 2, seed=3)
    again.set_state(state)
    for batch in expected:
        found = next(again)
        assert all(np.array_equal(found[name], batch[name]) for name in batch)
    again.close()


def test_command_prepares_and_describes(folder, capsys):
    arguments = ["prepare_text", f"--data={folder}", "--tokenizer=bytes",
                 f"--cache_dir={folder.parent / 'cache'}", "--validation_share=0.2"]  # fmt: skip
    prepare_text.main(arguments)
    out = capsys.readouterr().out
    text = load(folder)
    count = len(documents(text, "train"))
    assert re.search(rf"train: +{count} documents, {len(text.splits['train'][0]):,} tokens", out)
    assert text.fingerprint in out and str(text.folder) in out

    (folder / "d.txt").write_bytes(b"\xff")
    with pytest.raises(SystemExit) as stop:
        prepare_text.main(arguments)
    assert stop.value.code == 2
    assert re.search("d.txt is damaged at byte 0: .* --skip_bad_shards", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": ""}, "--data=FOLDER is needed"),
        ({"tokenizer": ""}, "--tokenizer is needed: 'bytes', or"),
        ({"validation_share": 0.0}, "validation_share=0.0, expected a number between 0 and 1"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TextSettings(**{"data": "x", "tokenizer": "bytes", **change})
