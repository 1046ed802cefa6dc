"""The documents in files of text, and where a file is damaged.

* `.txt`: the whole file is one document.
* `.jsonl`, `.jsonl.gz`, `.jsonl.zst`: one JSON object a line, the document under `text`.
* `.parquet`: one document a row, in the column `text`.

Text is UTF-8. The layout of SlimPajama-6B is parquet in a folder, that of SlimPajama `.jsonl.zst`.
"""

import fnmatch
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from experiments.tasks.base import DataError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


class BadText(ValueError):
    """A file of text is damaged. The message names the file, the place and the reason."""

    def __init__(self, path: Path, place: str, reason: object):
        """Put the message together; `place` is such as `byte 17` or `row 3`."""
        super().__init__(f"{path} is damaged at {place}: {reason}")


def find_texts(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Names of files of text below a folder, relative to it, sorted.

    Args:
        folder: where to look.
        patterns: each name matches one of them; `*` stands for anything, `/` too.

    Raises:
        DataError: if a pattern has no match.
    """
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.name.endswith(SUFFIXES) and path.is_file()
    )
    matching = [fnmatch.filter(names, pattern) for pattern in patterns]
    for pattern, found in zip(patterns, matching):
        if not found:
            raise DataError(
                f"none of the {len(names)} files of text matches {pattern!r}",
                tried=[folder],
                expected="files of " + ", ".join(SUFFIXES),
                remedy="name a folder that holds them at any depth, and patterns of their names.",
            )
    return sorted(set().union(*matching))


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a file in order, empty ones left out.

    Raises:
        BadText: at the first place that cannot be read.
        ImportError: if the format needs a package that is not installed.
    """
    if path.suffix == ".txt":
        documents = _read_txt(path)
    elif path.suffix == ".parquet":
        documents = _read_parquet(path)
    else:
        documents = _read_jsonl(path)
    return (text for text in documents if text)


def _read_txt(path):
    try:
        yield path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise BadText(path, f"byte {error.start}", error) from error


def _read_jsonl(path):
    """Offsets are those of the line in the uncompressed content."""
    offset = 0
    try:
        with path.open("rb") as file:
            for line in _decompressed(path, file):
                if line.strip():
                    yield _document(line)
                offset += len(line)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise BadText(path, f"byte {offset}", error) from error


def _document(line):
    record = json.loads(line)
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError("expected a JSON object with a string 'text'")
    # JSON can hold halves of surrogate pairs, which no encoding can
    return text.encode(errors="replace").decode()


def _decompressed(path: Path, file: BinaryIO) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(file)  # type: ignore[return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdFile(file))  # type: ignore[return-value]
    return file


class _ZstdFile(io.RawIOBase):
    """A file of Zstandard frames; unlike the package's reader it notices a missing end."""

    def __init__(self, file: BinaryIO):
        try:
            import zstandard
        except ImportError as error:
            raise ImportError("files of .zst need `pip install zstandard`.") from error
        self._file, self._zstandard = file, zstandard
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            self._input = self._input or self._file.read(1 << 16)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the compressed file ends in the middle of a frame")
                return 0
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._output = self._frame.decompress(self._input)
            except self._zstandard.ZstdError as error:
                raise ValueError(error) from error
            self._input = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


def _read_parquet(path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("files of .parquet need `pip install pyarrow`.") from error
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise ValueError(f"no column 'text' among {', '.join(file.schema_arrow.names)}")
            for batch in file.iter_batches(batch_size=1000, columns=["text"]):
                for text in batch.column("text").to_pylist():
                    if not isinstance(text, str):
                        raise ValueError(f"expected a string, found {type(text).__name__}")
                    yield text
                    row += 1
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        raise BadText(path, f"row {row}", error) from error
