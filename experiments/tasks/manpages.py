"""Pairs of manual pages: whether one page names the other under SEE ALSO.

A free stand-in for papers that cite each other. From a page's text are taken away: what `roff`
drops, SEE ALSO, sections about the package rather than the subject (authors, copyright, where to
report bugs), the page's names before the dash of NAME, and what looks like a reference, `open(2)`,
anywhere else. Pages that only redirect to another one count as names of that.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tqdm

from experiments.tasks import manpage_files, roff
from experiments.tasks.base import DataError, Split
from experiments.tasks.pairs import MAX_LENGTH, PairBuilder

VERSION = 1  # of what is made of the same pages
_DROPPED = {
    "SEE ALSO", "AUTHOR", "AUTHORS", "COLOPHON", "COPYRIGHT", "REPORTING BUGS", "BUG REPORTS",
}  # fmt: skip
_REFERENCE = re.compile(r"([\w.+:@-]+) ?\(([1-9][a-zA-Z]*)\)")
_REDIRECT = re.compile(r"(?:(?:[.'][ \t]*\\\".*)?\n)*\.so[ \t]+(?:\S*/)?(\S+)")
_HELD_OUT = 0.1
_TRIES = 100

Links = Sequence[tuple[str, str]]


class Corpus(NamedTuple):
    """`texts` of pages by file name, such as `open.2`, and `links`, pairs of two such names."""

    texts: Mapping[str, bytes]
    links: Links


def build(paths: Sequence[Path], seed: int, progress: bool) -> dict[str, Split]:
    """The splits that `draw_pairs` makes of the pages in packages or folders.

    Raises:
        DataError: if files are damaged, or have too few links for three splits.
    """
    files = tqdm.tqdm(
        manpage_files.read(paths), desc="manual pages", unit=" pages", disable=not progress
    )
    corpus = read_corpus(files)
    drawn = draw_pairs(corpus.links, seed)
    if not all(drawn.values()):
        counts = {name: len(rows) for name, rows in drawn.items()}
        raise DataError(
            f"{len(corpus.texts)} pages with {len(corpus.links)} links give {counts} pairs",
            tried=paths,
            expected="pages that name each other under SEE ALSO, some hundreds at least",
            remedy=manpage_files.REMEDY,
        )
    splits = {}
    for name, rows in drawn.items():
        builder = PairBuilder()
        for first, second, label in rows:
            builder.add(corpus.texts[first], corpus.texts[second], label)
        splits[name] = builder.split()
    return splits


def read_corpus(files: Iterable[manpage_files.File]) -> Corpus:
    """Texts and links of pages.

    Of files of one name the first counts. Pages whose texts begin with the same 4,000 bytes, which
    is all that a model sees, are one page.
    """
    texts: dict[str, bytes] = {}
    also: dict[str, str] = {}
    other_names: dict[str, str] = {}
    of_text: dict[bytes, str] = {}
    for file in files:
        source = file.source.decode("latin-1")  # bytes beyond ASCII come out as they went in
        redirect = _REDIRECT.match(source)
        link = file.links or (redirect[1].removesuffix(".gz") if redirect else "")
        if file.name in texts or file.name in other_names:
            continue
        if link:
            other_names[file.name] = link
            continue
        sections = roff.sections(source)
        text = subject(sections)
        same = of_text.setdefault(text[:MAX_LENGTH], file.name)
        if same != file.name:
            other_names[file.name] = same
        elif text:
            texts[file.name] = text
            also[file.name] = "\n".join(t for h, t in sections if h.upper() == "SEE ALSO")
    names = _pages_by_name(texts, other_names)
    links = set()
    for page, references in also.items():
        for name, number in _REFERENCE.findall(references):
            target = names.get(f"{name}.{number}") or names.get(f"{name}.{number[0]}")
            if target and target != page:
                links.add((min(page, target), max(page, target)))
    return Corpus(texts, sorted(links))


def subject(sections: Sequence[tuple[str, str]]) -> bytes:
    """The text of a page without what gives its links away, see above."""
    parts = []
    for heading, text in sections:
        if heading.upper() in _DROPPED:
            continue
        if heading.upper() == "NAME":
            text = re.split(r"(?:^|\s)-+\s", text, maxsplit=1)[-1]
        parts.append(f"{heading}\n{_REFERENCE.sub('', text)}\n")
    return "".join(parts).encode("latin-1", "replace")


def _pages_by_name(texts: Mapping[str, bytes], other_names: Mapping[str, str]) -> dict[str, str]:
    """The page of every name, also with the section cut to its digit (`ssl.1ssl` as `ssl.1`)."""
    names = {name: name for name in texts}
    for name, target in other_names.items():
        for _ in range(len(other_names)):
            if target not in other_names:
                break
            target = other_names[target]
        if target in texts:
            names[name] = target
    for name, page in sorted(names.items()):
        stem, _, section = name.rpartition(".")
        names.setdefault(f"{stem}.{section[0]}", page)
    return names


def draw_pairs(links: Links, seed: int) -> dict[str, list[tuple[str, str, int]]]:
    """Pairs of pages with label 1 if they are linked and 0 if not, half of each, shuffled.

    No page is in two splits. Validation and test get a tenth of the pages each, in groups that link
    among themselves (`communities`): of links between pages drawn one by one a hundredth would be
    left there. For every linked pair (a, b), in an order of the two that is drawn, there is one
    (a, c) that is not linked, where c is the second page of a linked pair drawn from the split and
    in the manual's section of b. So neither the sections nor how often a page occurs tell the
    label. A linked pair for which no such c is found in 100 draws is left out.

    The result is a function of the set of links and the seed.
    """
    draw = random.Random(seed)
    links = sorted(links)
    linked = set(links)
    part_of = _split_pages(links, draw)
    drawn: dict[str, list[tuple[str, str, int]]] = {}
    for part in ("train", "validation", "test"):
        inside = [(a, b) for a, b in links if part_of[a] == part_of[b] == part]
        positive = [(a, b) if draw.random() < 0.5 else (b, a) for a, b in inside]
        seconds = defaultdict(list)
        for _, b in positive:
            seconds[_section(b)].append(b)
        rows = {}
        for a, b in positive:
            candidates = seconds[_section(b)]
            for _ in range(_TRIES):
                c = candidates[int(draw.random() * len(candidates))]
                if c != a and (min(a, c), max(a, c)) not in linked and (a, c) not in rows:
                    rows[a, b], rows[a, c] = 1, 0
                    break
        drawn[part] = _shuffled([(*pair, label) for pair, label in rows.items()], draw)
    return drawn


def _split_pages(links: Links, draw: random.Random) -> dict[str, str]:
    groups = communities(links, draw)
    total = sum(map(len, groups))
    part_of: dict[str, str] = {}
    sizes = {"validation": 0, "test": 0}
    for group in _shuffled(groups, draw):
        fits = [part for part, size in sizes.items() if size + len(group) <= _HELD_OUT * total]
        part = min(fits, key=sizes.__getitem__, default="train")
        if part != "train":
            sizes[part] += len(group)
        part_of |= dict.fromkeys(group, part)
    return part_of


def communities(links: Links, draw: random.Random) -> list[list[str]]:
    """Groups of pages that link among themselves more than to others.

    Label propagation (Raghavan et al. 2007): every page starts as a group of its own and takes, in
    an order drawn anew each round, the group that most of its neighbours are in, until none
    changes, at most 20 rounds.
    """
    neighbours = defaultdict(list)
    for a, b in links:
        neighbours[a].append(b)
        neighbours[b].append(a)
    pages = sorted(neighbours)
    group = {page: page for page in pages}
    for _ in range(20):
        changed = False
        for page in _shuffled(pages, draw):
            counts = Counter(group[other] for other in neighbours[page])
            most = max(counts.values())
            best = sorted(name for name, count in counts.items() if count == most)
            if group[page] not in best:
                group[page] = best[int(draw.random() * len(best))]
                changed = True
        if not changed:
            break
    members = defaultdict(list)
    for page in pages:
        members[group[page]].append(page)
    return [members[name] for name in sorted(members)]


def _section(page: str) -> str:
    return page.rpartition(".")[2]


def _shuffled(items, draw):
    """A permutation by `random()` alone, whose numbers are the same in every Python version."""
    return sorted(items, key=lambda _: draw.random())
