"""Tokenizers from local files: the same ids whichever form the vocabulary has."""

import base64
import json
import pickle

import pytest

from experiments.common.tokenizer import load_tokenizer

TEXT = "The  theme's 12\n\n <|endoftext|> naïve 你好 \U0001f600"
# the first merges of a vocabulary, in GPT-2's spelling, where U+0120 is a space
MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("'", "s"), ("\u0120", "\u0120")]


def spelling():
    """The character that GPT-2's files have for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def write_folder(folder):
    tokens = [*spelling().values(), *("".join(pair) for pair in MERGES), "<|endoftext|>"]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, MERGES)]))
    return folder


def write_ranks(path):
    byte = {char: number for number, char in spelling().items()}
    tokens = [*spelling().values(), *("".join(pair) for pair in MERGES)]
    lines = [base64.b64encode(bytes(byte[c] for c in t)) + b" %d" % i for i, t in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines))
    return path


def check(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eot not in ids and max(ids) < tokenizer.vocab_size
    assert tokenizer.encode("") == []
    assert pickle.loads(pickle.dumps(tokenizer)).encode(TEXT) == ids
    return ids


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert check(tokenizer) == list(TEXT.encode())
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([72, 0xE4, 256, 105]) == "H\ufffdi"


def test_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_folder(tmp_path / "gpt2")
    tokenizer = load_tokenizer(folder)
    ids = check(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eot) == (262, 261)
    assert tokenizer.encode(" the the") == [258, 258]
    assert load_tokenizer(folder / "vocab.json").fingerprint == tokenizer.fingerprint

    whole = tokenizers.ByteLevelBPETokenizer.from_file(
        str(folder / "vocab.json"), str(folder / "merges.txt")
    )
    whole.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "whole").mkdir()
    whole.save(str(tmp_path / "whole" / "tokenizer.json"))
    same = load_tokenizer(tmp_path / "whole")
    assert check(same) == ids and same.eot == 261


def test_ranks(tmp_path):
    pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(write_ranks(tmp_path / "r.tiktoken"))
    check(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eot) == (262, 261)
    assert tokenizer.encode(" the the") == [258, 258]


def test_ranks_and_folder_agree(tmp_path):
    pytest.importorskip("tiktoken")
    pytest.importorskip("tokenizers")
    ranks, folder = write_ranks(tmp_path / "r.tiktoken"), write_folder(tmp_path / "gpt2")
    assert load_tokenizer(ranks).encode(TEXT) == load_tokenizer(folder).encode(TEXT)


def test_bad_sources_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere for vocab.json with merges.txt"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"r\.tiktoken: there is no such file"):
        load_tokenizer(tmp_path / "r.tiktoken")
    with pytest.raises(ValueError, match="tokenizer bytes has 257 ids, the model 97"):
        load_tokenizer("bytes").check_fits(97)


def test_damaged_ranks_are_refused(tmp_path):
    pytest.importorskip("tiktoken")
    path = write_ranks(tmp_path / "r.tiktoken")
    whole = path.read_bytes()
    path.write_bytes(whole[1000:])
    with pytest.raises(ValueError, match="r.tiktoken"):
        load_tokenizer(path)
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(b"%d" % i), i) for i in range(50257)))
    with pytest.raises(ValueError, match="another splitting"):
        load_tokenizer(path)
