"""Document retrieval of Long Range Arena: whether one paper cites the other, from their texts.

Reads the published pairs of the ACL Anthology Network (147,086 / 18,090 / 17,437 rows), bytes as
they are, the first 4,000 of each document; or makes pairs of manual pages, which are free.

Source: Tay et al., "Long Range Arena" (2020). The two documents go through one encoder apart from
each other and meet in the head only.
"""

import dataclasses
import functools
from pathlib import Path

import tqdm
from absl import logging

from experiments.tasks import manpage_files, manpages, pairs
from experiments.tasks.base import DataError, Split, Task, cached_splits
from experiments.tasks.files import find_files
from experiments.tasks.text import VOCABULARY

FILES = {
    "train": "new_aan_pairs.train.tsv",
    "validation": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
_FOLDERS = ("lra_release/lra_release/tsv_data", "lra_release/tsv_data", "tsv_data", ".")
_REMEDY = (
    "unpack `lra_release.gz` (really a tar.gz of 8 GB, linked from the README of "
    "github.com/google-research/long-range-arena; `tsv_data` is enough, but its "
    "`*.only_ids.tsv` have no texts) and name its folder with --data_dir; or take pairs of manual "
    "pages with --task_options=source=manpages."
)
_EXPECTED = "5 columns separated by tabs: 0.0 or 1.0, two ids, two texts"


def load(
    data_dir: Path | str | None,
    cache_dir: Path | str,
    source: str = "aan",
    seed: int = 0,
    progress: bool = True,
) -> Task:
    """Load the pairs.

    Args:
        data_dir: for `aan` the archive's root, its `lra_release` or its `tsv_data`; where the
            archive's doubled tree has two copies the inner one is used. For `manpages` a folder of
            .deb files or a tree of `man1`, `man2`, ..., or what holds it as `usr/share/man`.
        cache_dir: folder in which the arrays are kept and found again.
        source: `aan`, or `manpages` for pairs as in `manpages.draw_pairs`.
        seed: of the draw of pairs of manual pages; unused for `aan`.
        progress: whether to show a bar while reading.

    Raises:
        DataError: if files are missing, or a row has no 5 columns or no label 0 or 1.
        ValueError: if `source` is neither, or seed < 0.
    """
    if source not in ("aan", "manpages"):
        raise ValueError(f"source={source!r}, expected 'aan' or 'manpages'.")
    if seed < 0:
        raise ValueError(f"seed={seed}, expected a non-negative integer.")
    if source == "aan":
        folder = find_files(data_dir, _FOLDERS, tuple(FILES.values()), "retrieval", _REMEDY)
        paths = {name: folder / file for name, file in FILES.items()}
        stats = {path.name: path.stat() for path in paths.values()}
        files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        described: dict[str, object] = {"from": source, "files": files}

        def build() -> dict[str, Split]:
            return {name: _read(path, progress) for name, path in paths.items()}
    else:
        found = manpage_files.find(data_dir)
        described = {
            "from": source,
            "version": manpages.VERSION,
            "files": manpage_files.fingerprint(found),
            "seed": seed,
        }

        def build() -> dict[str, Split]:
            return manpages.build(found, seed, progress)

    splits, fingerprint = cached_splits(
        Path(cache_dir), "retrieval", described, pairs.MAX_LENGTH, build
    )
    splits = {n: dataclasses.replace(split, buckets=pairs.BUCKETS) for n, split in splits.items()}
    return Task(
        name="retrieval",
        vocabulary=VOCABULARY,
        num_classes=2,
        max_length=pairs.MAX_LENGTH,
        splits=splits,
        fingerprint=fingerprint,
        reference_lines=functools.partial(pairs.reference_lines, splits["train"], splits["test"]),
    )


def _read(path: Path, progress: bool) -> Split:
    """The pairs of a file, a line each: quotes are characters like others."""
    builder = pairs.PairBuilder()
    number = empty = 0
    with (
        path.open("rb") as file,
        tqdm.tqdm(
            total=path.stat().st_size, desc=path.name, unit="B", unit_scale=True,
            disable=not progress,
        ) as bar,
    ):  # fmt: skip
        for number, line in enumerate(file, 1):
            try:
                label, first, second = _parse(line.rstrip(b"\r\n"))
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: {error}", tried=[path], expected=_EXPECTED, remedy=_REMEDY
                ) from None
            builder.add(first, second, label)
            empty += (not first) + (not second)
            bar.update(len(line))
    if not number:
        raise DataError(f"{path} is empty", tried=[path], expected=_EXPECTED, remedy=_REMEDY)
    if empty:
        logging.warning("%s: %d documents are empty and are read as one space.", path, empty)
    return builder.split()


def _parse(line: bytes) -> tuple[int, bytes, bytes]:
    columns = line.split(b"\t")
    if len(columns) == 3:
        raise ValueError("ids only, texts missing: 3 columns, expected 5")
    if len(columns) != 5:
        raise ValueError(f"{len(columns)} columns, expected 5: {line[:80]!r}")
    label, _, _, first, second = columns
    try:
        value = float(label)
    except ValueError:
        value = -1.0
    if value not in (0.0, 1.0):
        raise ValueError(f"label {label[:80].decode('latin-1')!r}, expected 0.0 or 1.0")
    return int(value), first, second
