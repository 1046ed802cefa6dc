"""Reading ListOps files as Long Range Arena published them."""

import re

import numpy as np
import pytest

from experiments.tasks import base, listops
from experiments.tasks import listops_grammar as grammar


def load(cache_dir, data_dir):
    return listops.load(data_dir, cache_dir, progress=False)


def to_source(tokens):
    """Write tokens as the published files do: a left-nested binary tree in parentheses."""
    stack = []
    for token in tokens:
        stack.append(token)
        if token == "]":
            start = max(i for i, t in enumerate(stack) if t in grammar.OPERATORS)
            text = stack[start]
            for part in stack[start + 1 :]:
                text = f"( {text} {part} )"
            stack[start:] = [text]
    (source,) = stack
    return source


def write_files(folder, split, newline="\r\n"):
    """Write the first 30 rows of a split as the three published files of 10 rows each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{to_source(grammar.decode(split[i]['tokens'][: split.lengths[i]]))}\t{split.labels[i]}"
        for i in range(30)
    ]
    for j, name in enumerate(listops.FILES.values()):
        lines = ["Source\tTarget", *rows[10 * j : 10 * j + 10], ""]
        (folder / name).write_bytes(newline.join(lines).encode())


@pytest.fixture(scope="module")
def train():
    return listops.generate(0, 200, 1, progress=False)


@pytest.mark.parametrize(
    "layout",
    [".", "listops-1000", "lra_release/listops-1000", "lra_release/lra_release/listops-1000"],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_published_files(train, tmp_path, layout, newline):
    write_files(tmp_path / "data" / layout, train, newline)
    read = load(tmp_path / "cache", tmp_path / "data")
    for j, split in enumerate(read.splits.values()):
        assert len(split) == 10
        for i, row in enumerate(split):
            np.testing.assert_array_equal(row["tokens"], train[10 * j + i]["tokens"])
            assert row["label"] == train[10 * j + i]["label"]
    assert load(tmp_path / "other", tmp_path / "data").fingerprint == read.fingerprint


def test_inner_copy_is_used(train, tmp_path, caplog):
    later = base.Split(
        train.tokens[train.offsets[100] :], train.lengths[100:], train.labels[100:], 2000
    )
    write_files(tmp_path / "lra_release/listops-1000", later)
    write_files(tmp_path / "lra_release/lra_release/listops-1000", train)
    for data_dir in (tmp_path, tmp_path / "lra_release"):
        read = load(tmp_path / "cache", data_dir)
        np.testing.assert_array_equal(read.splits["train"][0]["tokens"], train[0]["tokens"])
        assert "Two copies" in caplog.text
        caplog.clear()


def test_missing_files(train, tmp_path):
    write_files(tmp_path / "listops-1000", train)
    (tmp_path / "listops-1000/basic_val.tsv").unlink()
    with pytest.raises(base.DataError) as error:
        load(tmp_path / "cache", tmp_path)
    text = str(error.value)
    for part in (
        "basic_train.tsv, basic_val.tsv, basic_test.tsv",
        str(tmp_path / "listops-1000"),
        str(tmp_path / "lra_release/lra_release/listops-1000"),
        "lra_release.gz",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "1 columns, expected 2"),
        ("[MAX 1 2 ]", "1 columns, expected 2"),
        ("[MAX 1 2 ]\t2\t2", "3 columns, expected 2"),
        ("[MAX 1 X ]\t1", "unknown token 'X'"),
        ('"7"\t7', "unknown token '\"7\"'"),
        ("( ( [MAX 1 ) 2 )\t2", "unbalanced brackets: 1 operators"),
        ("1 ]\t1", "unbalanced brackets: a `]`"),
        ("( [MAX ] )\t0", "operator `[MAX` without arguments"),
        ("3 4\t3", "2 expressions in a row"),
        ("\t3", "0 expressions in a row"),
        ("7\t", "target '', expected a digit"),
        ("7\t7.0", "target '7.0', expected a digit"),
        ("7\t17", "target '17', expected a digit"),
        ("[MED 1 4 5 9 ]\t5", "target 5, but the expression's value is 4"),
        ("[MAX " + "1 " * 1999 + "]\t1", "2001 tokens, expected at most 2000"),
    ],
)
def test_malformed_row(train, tmp_path, line, problem):
    write_files(tmp_path, train)
    path = tmp_path / "basic_val.tsv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:], ""]))
    with pytest.raises(base.DataError, match=re.escape(f"{path}:3: {problem}")):
        load(tmp_path / "cache", tmp_path)


def test_longest_row_is_kept_whole(train, tmp_path):
    write_files(tmp_path, train)
    path = tmp_path / "basic_test.tsv"
    path.write_text("Source\tTarget\n[MAX " + "1 " * 1998 + "]\t1\n")
    row = load(tmp_path / "cache", tmp_path).splits["test"][0]
    assert row["length"] == 2000 and (row["tokens"] != 0).all()


@pytest.mark.parametrize(
    ("content", "problem"),
    [("", "header ''"), ("Target\tSource\n", "header"), ("Source\tTarget\n", "no rows")],
)
def test_malformed_header(train, tmp_path, content, problem):
    write_files(tmp_path, train)
    (tmp_path / "basic_test.tsv").write_text(content)
    with pytest.raises(base.DataError, match=f"basic_test.tsv:1: {problem}"):
        load(tmp_path / "cache", tmp_path)
