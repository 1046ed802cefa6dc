"""Manual pages as they are packed: Debian packages, or a tree such as `/usr/share/man`."""

import gzip
import hashlib
import io
import lzma
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.tasks.base import DataError
from experiments.tasks.files import file_hash

_TREES = ("usr/share/man", "share/man", "man", ".")
_PAGE = re.compile(r"man[1-9][^/]*/(?P<name>[^/]+\.[1-9][^/.]*)(?P<gz>\.gz)?")
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
REMEDY = (
    "on Debian or Ubuntu, in an empty folder:\n"
    "      apt-get download manpages manpages-dev\n"
    "    (more packages give more pages) and name that folder with --data_dir, or name an unpacked "
    "tree such as --data_dir=/usr/share/man."
)


class File(NamedTuple):
    """A file in a folder `man*`: its roff `source`, or the file name that it `links` to."""

    name: str  # such as "open.2"
    source: bytes = b""
    links: str = ""


def find(data_dir: Path | str | None) -> list[Path]:
    """The packages in a folder, or else the `man*` folders of a tree, sorted.

    Pages in other languages lie in folders of other names and are left out.

    Raises:
        DataError: if there are neither, naming what was tried.
    """
    tried = [] if data_dir is None else [Path(data_dir) / tree for tree in _TREES]
    if data_dir is not None and (packages := sorted(Path(data_dir).glob("*.deb"))):
        return packages
    for tree in tried:
        if folders := sorted(path for path in tree.glob("man[1-9]*") if path.is_dir()):
            return folders
    raise DataError(
        f"data_dir={None if data_dir is None else str(data_dir)!r} has no manual pages",
        tried=tried,
        expected="files *.deb, or folders man1, man2, ...",
        remedy=REMEDY,
    )


def fingerprint(paths: Sequence[Path]) -> str:
    """A hash of the content of packages, or of the names and sizes of the files in folders."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\n".encode())
        if not path.is_dir():
            digest.update(file_hash(path).encode())
            continue
        for file in sorted(path.iterdir()):
            digest.update(f"{file.name} {file.lstat().st_size}\n".encode())
    return digest.hexdigest()


def read(paths: Sequence[Path]) -> Iterator[File]:
    """All the files of the packages or folders.

    Raises:
        DataError: if a package or a compressed page is damaged.
    """
    for path in paths:
        try:
            yield from _read_folder(path) if path.is_dir() else _read_package(path)
        except (ValueError, tarfile.TarError, *_DAMAGED) as error:
            raise DataError(
                f"{path} cannot be read: {error}",
                tried=[path],
                expected="a Debian package with data.tar.xz or .gz, or a folder of pages",
                remedy=f"get it again, or unpack it with `dpkg-deb -x PACKAGE FOLDER`; {REMEDY}",
            ) from error


def _read_folder(folder: Path) -> Iterator[File]:
    for path in sorted(folder.iterdir()):
        if page := _PAGE.fullmatch(f"{folder.name}/{path.name}"):
            if path.is_symlink():
                yield File(page["name"], links=path.resolve().name.removesuffix(".gz"))
            elif path.is_file():
                yield File(page["name"], _unpacked(path.name, path.read_bytes(), page["gz"]))


def _read_package(path: Path) -> Iterator[File]:
    compression, archive = data_member(path.read_bytes())
    mode: Any = f"r:{compression}"
    with tarfile.open(fileobj=io.BytesIO(archive), mode=mode) as tar:
        for member in tar:
            page = _PAGE.fullmatch(member.name.partition("usr/share/man/")[2])
            if page is None:
                continue
            if member.issym() or member.islnk():
                links = posixpath.basename(member.linkname).removesuffix(".gz")
                yield File(page["name"], links=links)
            elif file := tar.extractfile(member):
                yield File(page["name"], _unpacked(member.name, file.read(), page["gz"]))


def data_member(package: bytes) -> tuple[str, bytes]:
    """The compression and the content of `data.tar.*` in a package, which is an `ar` archive.

    Headers have 60 bytes: the name in 16, the size as decimal digits in 10 from byte 48, and at the
    end 0x60 0x0a. Members start at even places.
    """
    if not package.startswith(b"!<arch>\n"):
        raise ValueError("no Debian package: it does not begin with '!<arch>'")
    place = 8
    while header := package[place : place + 60]:
        if len(header) < 60 or header[58:] != b"`\n":
            raise ValueError(f"broken header at byte {place}")
        size = int(header[48:58])
        member = package[place + 60 : place + 60 + size]
        if len(member) < size:
            raise ValueError(f"cut short after {len(package)} bytes")
        if header.startswith(b"data.tar"):
            return header[:16].decode("latin-1").rstrip(" /")[len("data.tar.") :], member
        place += 60 + size + size % 2
    raise ValueError("it has no member data.tar.*")


def _unpacked(name: str, content: bytes, compressed: str | None) -> bytes:
    try:
        return gzip.decompress(content) if compressed else content
    except _DAMAGED as error:
        raise ValueError(f"{name}: {error}") from error
