"""Pairs of manual pages: reading pages, their links, and how pairs are drawn from them."""

import gzip
import io
import tarfile
from collections import Counter

import numpy as np
import pytest

from experiments.tasks import manpage_files, manpages, retrieval, roff
from experiments.tasks.base import DataError

OPEN = rb""".\" A comment: see \(co below
.de XX
macro body
..
.TH OPEN 2 2023-02-05 "Linux man-pages 6.03"
.SH NAME
open, creat \- open a \fIfile\fP
.SH "RETURN VALUE"
.nf
.BI "int open(const char *" path ", int " flags );
.PP
Returns a descriptor, see \fBread\fP(2) and
.BR close (2).
.TP
.B O_EXCL
Fails, "if it" isn\(aqt new\c
\&.
.ig
not shown
..
.TS
l l.
T{
one
T}	two
.TE
.if n \{\
.RS 4
.\}
caf\['e] \s-1NULL\s0 \n[x] C:\e0 caf\xc3\xa9
.SH SEE ALSO
.BR read (2),
.BR close (2),
.BR missing (3),
.BR open (2),
.UR http://example.org
.SH COLOPHON
Part of a project.
""".replace(rb"\xc3\xa9", b"\xc3\xa9")

MDOC = b""".Dd May 1
.Dt CAT 1
.Os
.Sh NAME
.Nm cat
.Nd concatenate files
.Sh DESCRIPTION
.Op Fl benst
The
.Nm cat
utility reads
.Ar file
.Pq or input .
.Sh SEE ALSO
.Xr read 2 ,
.Xr head 1
"""


def test_man_page_as_text():
    sections = roff.sections(OPEN.decode("latin-1"))
    assert [heading for heading, _ in sections] == ["NAME", "RETURN VALUE", "SEE ALSO", "COLOPHON"]
    texts = dict(sections)
    assert texts["NAME"] == "open, creat - open a file"
    assert texts["RETURN VALUE"].split("\n") == [
        "int open(const char *path, int flags);",
        "Returns a descriptor, see read(2) and",
        "close(2).",
        "O_EXCL",
        'Fails, "if it" isn\'t new',
        ".",
        "one",
        "\ttwo",
        "caf NULL  C:\\0 caf\xc3\xa9",
    ]
    assert texts["SEE ALSO"] == "read(2),\nclose(2),\nmissing(3),\nopen(2),"
    assert manpages.subject(sections).decode().split("\n")[:5] == [
        "NAME",
        "open a file",
        "RETURN VALUE",
        "int open(const char *path, int flags);",
        "Returns a descriptor, see  and",
    ]


def test_mdoc_page_as_text():
    texts = dict(roff.sections(MDOC.decode()))
    assert texts["DESCRIPTION"] == "benst\nThe\ncat\nutility reads\nfile\nor input ."
    assert texts["SEE ALSO"] == "read(2) ,\nhead(1) "
    assert manpages.subject(list(texts.items())).startswith(b"NAME\nconcatenate files\nDESCR")


def page(name, also, text=None):
    lines = [f".SH NAME\n{name} \\- {text or name}\n.SH SEE ALSO", *(f".BR {a} ," for a in also)]
    return "\n".join(lines).encode()


def library(groups=20, size=6, seed=0):
    """Pages of several sections: groups in which most are linked, and a page that links to all."""
    draw = np.random.default_rng(seed)
    pages = {}
    for group in range(groups):
        names = [(f"p{group}x{i}", 1 + i % 3) for i in range(size)]
        for i, (name, section) in enumerate(names):
            other = [f"{a} ({s})" for a, s in names[:i] if draw.random() < 0.7 or i < 2]
            pages[f"{name}.{section}"] = page(name, other)
    return pages


def files(pages, **redirects):
    return [
        *(manpage_files.File(name, source) for name, source in pages.items()),
        *(manpage_files.File(name, links=target) for name, target in redirects.items()),
    ]


def test_links_follow_redirects_and_cut_sections():
    pages = {
        "open.2": OPEN,
        "read.2": page("read", ["creat (2)", "x (1)", "x (1x)", "gone (1)"]),
        "creat.2": b'.\\" redirect\n.so man2/open.2\n',
        "x.1ssl": page("x", []),
        "y.1": page("x", []),  # the text of x
        "z.1": page("z", ["y (1)", "loop (1)", "close (2)"]),
        "empty.1": b"",
        "loop.1": b".so man1/loop.1",
    }
    corpus = manpages.read_corpus(files(pages, **{"close.2": "open.2", "open.2": "z.1"}))
    assert sorted(corpus.texts) == ["open.2", "read.2", "x.1ssl", "z.1"]
    assert corpus.links == [
        ("open.2", "read.2"), ("open.2", "z.1"), ("read.2", "x.1ssl"), ("x.1ssl", "z.1"),
    ]  # fmt: skip
    for name, text in corpus.texts.items():
        assert b"SEE ALSO" not in text and b"COLOPHON" not in text and b"(2)" not in text, name


@pytest.mark.parametrize("seed", [0, 1])
def test_pairs_are_balanced_and_no_page_is_in_two_splits(seed):
    links = manpages.read_corpus(files(library())).links
    drawn = manpages.draw_pairs(links, seed)
    linked, pages = {frozenset(link) for link in links}, {}
    assert list(drawn) == ["train", "validation", "test"] and all(drawn.values())
    for name, rows in drawn.items():
        pages[name] = {end for a, b, _ in rows for end in (a, b)}
        assert len({(a, b) for a, b, _ in rows}) == len(rows)
        assert all((frozenset((a, b)) in linked) == (label == 1) and a != b for a, b, label in rows)
        # what sections the two pages are of, and how often a page is first, tell nothing
        for read in (lambda a, b: (a[-1], b[-1]), lambda a, b: a):
            counts = [Counter(read(a, b) for a, b, x in rows if x == label) for label in (0, 1)]
            assert counts[0] == counts[1]
    assert not pages["train"] & pages["validation"] | pages["test"] & pages["train"]
    assert not pages["test"] & pages["validation"]
    assert len(drawn["train"]) > len(links)
    assert manpages.draw_pairs([(a, b) for a, b in reversed(links)], seed) == drawn
    assert manpages.draw_pairs(links, seed + 2) != drawn


def package(path, pages, compression="xz", **symlinks):
    """A .deb: an ar archive of a version, control files and files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compression}") as tar:
        for name, source in {"notes.txt": b"no page", **pages}.items():
            content = gzip.compress(source)
            info = tarfile.TarInfo(f"./usr/share/man/man{name[-1]}/{name}.gz")
            if not name[-1].isdigit():
                info.name = f"./usr/share/doc/{name}.gz"
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target in symlinks.items():
            info = tarfile.TarInfo(f"./usr/share/man/man{name[-1]}/{name}.gz")
            info.type, info.linkname = tarfile.SYMTYPE, f"{target}.gz"
            tar.addfile(info)
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": b"odd",
        f"data.tar.{compression}": data.getvalue(),
    }
    content = b"!<arch>\n"
    for name, member in members.items():
        content += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(member):<10}`\n".encode()
        content += member + b"\n" * (len(member) % 2)
    path.write_bytes(content)


def load(folder, cache, **options):
    return retrieval.load(folder, cache, source="manpages", progress=False, **options)


@pytest.mark.parametrize("layout", [".", "man", "usr/share/man"])
def test_packages_and_trees_give_the_same_pairs(tmp_path, layout):
    pages = library()
    names = sorted(pages)
    (tmp_path / "debs").mkdir()
    package(tmp_path / "debs" / "a.deb", {n: pages[n] for n in names[::2]})
    package(tmp_path / "debs" / "b.deb", {n: pages[n] for n in names[1::2]}, "gz",
            **{"also.1": "p0x0.1"})  # fmt: skip
    tree = tmp_path / "tree" / layout
    for i, name in enumerate(names):
        folder = tree / f"man{name[-1]}"
        folder.mkdir(parents=True, exist_ok=True)
        if i % 3:
            (folder / f"{name}.gz").write_bytes(gzip.compress(pages[name]))
        else:
            (folder / name).write_bytes(pages[name])
    (tree / "man1" / "also.1").symlink_to("p0x0.1")
    (tree / "man1" / "broken.1").symlink_to("nowhere.1")
    (tree / "de" / "man1").mkdir(parents=True)
    (tree / "de" / "man1" / "p0x0.1").write_bytes(b"kein Roff")
    packed = load(tmp_path / "debs", tmp_path / "cache")
    unpacked = load(tmp_path / "tree", tmp_path / "cache")
    assert packed.fingerprint == unpacked.fingerprint
    assert load(tmp_path / "debs", tmp_path / "cache", seed=1).fingerprint != packed.fingerprint
    assert packed.two_towers and packed.splits["test"].labels.mean() == 0.5
    lines = packed.reference_lines()
    assert lines["majority class"] == 0.5 and 0.3 < lines["shared words"] < 0.7


def test_damaged_packages_are_named(tmp_path):
    path = tmp_path / "a.deb"
    package(path, library())
    whole = path.read_bytes()
    at = whole.index(b"data.tar")
    for content, message in (
        (b"PK" + whole, "does not begin with '!<arch>'"),
        (whole[:-100], "cut short after"),
        (whole[:at], "no member data.tar"),
        (whole[: at + 20], "broken header at byte"),
        (whole[: at + 60] + b"\0" * (len(whole) - at - 60), "a.deb cannot be read: not an lzma"),
        (whole.replace(b"data.tar.xz ", b"data.tar.odd"), "a.deb cannot be read: unknown compress"),
        (whole[: at + 200] + b"\0" * 50 + whole[at + 250 :], "a.deb cannot be read"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load(tmp_path, tmp_path / "cache")


def test_damaged_pages_and_too_few_links_are_named(tmp_path):
    folder = tmp_path / "man1"
    folder.mkdir()
    (folder / "a.1").write_bytes(page("a", ["b (1)"]))
    (folder / "b.1").write_bytes(page("b", []))
    with pytest.raises(DataError, match="2 pages with 1 links"):
        load(tmp_path, tmp_path / "cache")
    (folder / "c.1.gz").write_bytes(gzip.compress(b"text")[:-4])
    with pytest.raises(DataError, match="c.1.gz"):
        load(tmp_path, tmp_path / "cache")
