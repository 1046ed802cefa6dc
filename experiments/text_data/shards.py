"""Token ids on disk: built once from files of text, resumable, memory-mapped.

A folder of shards holds for each shard, which covers some files of text in the order of their
names, `N.train` and `N.validation`, little-endian uint16, and `N.json`, written last, with their
sizes and hashes; and when all are there `text.json`. A document is the tokenizer's end-of-text id
and then the ids of its text: that id stands at the beginning of each, and nowhere else.
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tqdm
from absl import logging

from experiments.common.flags import setting
from experiments.common.record import read_json, write_json
from experiments.common.tokenizer import Tokenizer
from experiments.tasks.base import DataError
from experiments.tasks.files import file_hash
from experiments.text_data.documents import BadText, find_texts, read_documents

SPLITS = ("train", "validation")
DTYPE = np.dtype("<u2")
_FORMAT = 1
_SHARD_BYTES = 64 * 2**20  # small files are gathered into shards of so much text
_BATCH_CHARS = 4 * 2**20  # text that is tokenised at once


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """Which text, and what becomes of it; settings of an experiment inherit from them."""

    data: str = setting(
        "", "folder of text, or of shards made from it", group="data", changes_result=False
    )
    tokenizer: str = setting(
        "", "bytes, or GPT-2's .tiktoken, tokenizer.json or folder", group="data",
        changes_result=False,
    )  # fmt: skip
    files: str = setting(
        "*", "which files of the folder, such as data/train-*", group="data", changes_result=False
    )
    validation_files: str = setting(
        "", "which are for validation; default: documents are drawn from all", group="data",
        changes_result=False,
    )  # fmt: skip
    validation_share: float = setting(
        0.01, "of documents that are drawn", group="data", changes_result=False
    )
    data_seed: int = setting(0, "of that draw", group="data", changes_result=False)
    skip_bad_shards: bool = setting(
        False, "leave out damaged files", group="data", changes_result=False
    )
    cache_dir: str = setting("data", "folder for shards", group="data", changes_result=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: naming the setting.
        """
        if not self.data:
            raise ValueError("--data=FOLDER is needed: a folder of text.")
        if not self.tokenizer:
            raise ValueError(
                "--tokenizer is needed: 'bytes', or GPT-2's r50k_base.tiktoken or tokenizer.json."
            )
        if not 0 < self.validation_share < 1:
            raise ValueError(
                f"validation_share={self.validation_share}, expected a number between 0 and 1."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class TokenText:
    """Shards of tokens, memory-mapped.

    Attributes:
        folder: where they are.
        splits: `train` and `validation`, each a list of arrays [n] of ids.
        eot: the id before each document.
        skipped: damaged files that were left out, as messages.
        fingerprint: a hash of all tokens. Equal fingerprints, equal data.
    """

    folder: Path
    splits: Mapping[str, Sequence[np.ndarray]]
    eot: int
    skipped: Sequence[str]
    fingerprint: str


def load_text(settings: TextSettings, tokenizer: Tokenizer, progress: bool = True) -> TokenText:
    """Open the shards of some text, building those that are missing.

    The validation part is a function of the files' names and the seed. An interrupted build
    continues after its last whole shard; a damaged shard is built again, with a warning.

    Args:
        settings: what to read; `data` is a folder of text, or one of shards, such as
            `<cache_dir>/tokens-...`, which does not need the text any more.
        tokenizer: with at most 65,536 ids.
        progress: whether to show a bar.

    Raises:
        DataError: if there is no text; if shards without text are damaged or of another tokenizer.
        BadText: if a file is damaged and is not to be skipped; it names the file and the place.
        ImportError: if the format of a file needs a package that is not installed.
    """
    if tokenizer.vocab_size > np.iinfo(DTYPE).max + 1:
        raise ValueError(f"tokenizer={tokenizer.name} has {tokenizer.vocab_size} ids, over 65536.")
    data = Path(settings.data)
    if (data / "text.json").exists():
        return _open(data, _complete(data, tokenizer), tokenizer)
    patterns = [settings.files, *filter(None, [settings.validation_files])]
    names = find_texts(data, patterns)
    sizes = [(data / name).stat().st_size for name in names]
    source = {
        "format": _FORMAT,
        "files": hashlib.sha256(repr([*zip(names, sizes)]).encode()).hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "validation": settings.validation_files or [settings.validation_share, settings.data_seed],
    }
    key = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(settings.cache_dir) / f"tokens-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    groups = [*_groups(list(zip(names, sizes)))]
    records = _check_all(folder, len(groups))
    with tqdm.tqdm(
        total=sum(sizes), desc="tokens", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for number, group in enumerate(groups):
            found = records[number]
            if found is None or (found["skipped"] and not settings.skip_bad_shards):
                records[number] = _build(folder, number, group, settings, tokenizer, bar)
            else:
                bar.update(sum(size for _, size in group))
    write_json(folder / "text.json", {"source": source, "shards": len(groups)})
    return _open(folder, records, tokenizer)


def _groups(files: list[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    """Runs of files (name, size) of about `_SHARD_BYTES`; a larger file ends a run."""
    before = np.cumsum([0, *(size for _, size in files)]) // _SHARD_BYTES
    for _, run in itertools.groupby(zip(files, before), key=lambda pair: pair[1]):
        yield [file for file, _ in run]


def _build(folder, number, group, settings, tokenizer, bar) -> dict[str, Any]:
    """Tokenise some files into one shard, which appears when it is whole."""
    final = {split: folder / f"{number}.{split}" for split in SPLITS}
    # another process may build the same shard at the same time
    unfinished = {split: Path(f"{path}.{os.getpid()}.tmp") for split, path in final.items()}
    skipped = []
    try:
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(os.cpu_count()) as pool:
            files = {split: stack.enter_context(p.open("wb")) for split, p in unfinished.items()}
            for name, size in group:
                before = {split: file.tell() for split, file in files.items()}
                try:
                    _write_documents(name, files, settings, tokenizer, pool)
                except BadText as error:
                    if not settings.skip_bad_shards:
                        raise
                    logging.warning("Left out: %s", error)
                    skipped.append(str(error))
                    for split, file in files.items():
                        file.truncate(before[split])
                        file.seek(before[split])
                bar.update(size)
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for split, path in unfinished.items():
            os.replace(path, final[split])
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)
    hashes = {split: file_hash(path) for split, path in final.items()}
    record = {"sha256": hashes, "skipped": skipped}
    write_json(folder / f"{number}.json", record)
    return record


def _write_documents(name, files, settings, tokenizer, pool: Executor) -> None:
    """Append the documents of one file of text to the files of the splits."""

    def encode(document):
        number, text = document
        split = _split(f"{settings.data_seed}/{name}/{number}", settings.validation_share)
        if settings.validation_files:
            held = fnmatch.fnmatchcase(name, settings.validation_files)
            split = "validation" if held else "train"
        return split, np.array([tokenizer.eot, *tokenizer.encode(text)], DTYPE)

    documents = enumerate(read_documents(Path(settings.data) / name))
    while batch := [*_up_to(documents, _BATCH_CHARS)]:
        for split, tokens in pool.map(encode, batch):
            files[split].write(tokens.data)


def _up_to(documents, characters) -> Iterator[tuple[int, str]]:
    """The next documents until they have so many characters together."""
    for number, text in documents:
        yield number, text
        characters -= len(text)
        if characters <= 0:
            return


def _split(document: str, share: float) -> str:
    """The split of a document, by a hash of its name."""
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "big") < share * 2**64 else "train"


def _checked(folder: Path, number: int) -> dict[str, Any] | None:
    """What a shard's `N.json` says; None unless its files are as they were written."""
    try:
        record = read_json(folder / f"{number}.json")
        hashes = {split: file_hash(folder / f"{number}.{split}") for split in SPLITS}
    except FileNotFoundError:
        return None
    except ValueError:
        record, hashes = {"sha256": "unreadable"}, {}
    if record["sha256"] == hashes:
        return record
    logging.warning("Shard %s of %s is not as it was written.", number, folder)
    return None


def _check_all(folder: Path, count: int) -> list[dict[str, Any] | None]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [*pool.map(lambda number: _checked(folder, number), range(count))]


def _complete(folder: Path, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """The records of a folder of shards that has to do without its text."""
    about = read_json(folder / "text.json")
    if about["source"]["tokenizer"] != tokenizer.fingerprint:
        raise DataError(
            f"the shards were made with another tokenizer than {tokenizer.name}",
            tried=[folder],
            expected=f"the fingerprint {tokenizer.fingerprint}",
            remedy="name the tokenizer that they were made with, or the folder of the text.",
        )
    records = _check_all(folder, about["shards"])
    if bad := [number for number, record in enumerate(records) if record is None]:
        raise DataError(
            "shards are damaged or missing",
            tried=[folder / f"{number}.json" for number in bad],
            expected="files with the hashes that their .json has",
            remedy="name the folder of the text instead, to build them again.",
        )
    return records


def _open(folder, records, tokenizer) -> TokenText:
    splits = {
        split: [_map(folder / f"{number}.{split}") for number in range(len(records))]
        for split in SPLITS
    }
    hashes = json.dumps([record["sha256"] for record in records], sort_keys=True)
    return TokenText(
        folder,
        splits,
        tokenizer.eot,
        [message for record in records for message in record["skipped"]],
        hashlib.sha256(hashes.encode()).hexdigest()[:16],
    )


def _map(path: Path) -> np.ndarray:
    # an empty file cannot be mapped
    return np.memmap(path, DTYPE, "r") if path.stat().st_size else np.zeros(0, DTYPE)
