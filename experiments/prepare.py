"""Builds the data of Long Range Arena's tasks and says what is in them.

    python -m experiments.prepare --task=all --data_dir=FOLDER

Training builds what it needs by itself; this does it ahead of time, and is the check to make before
a long run: counts, lengths, balance of labels, and what trivial predictors reach. A cache is either
whole or absent: stopped at any time, the same command starts the unfinished task again and finds
the finished ones.
"""

import dataclasses
import signal
import sys
from typing import NoReturn

import numpy as np

from experiments import tasks
from experiments.common import flags
from experiments.common.flags import setting
from experiments.tasks.base import DataError, Split, Task


@dataclasses.dataclass(frozen=True)
class Config:
    """Build the data of one task, or of all whose files are there.

    The folder of published files, as their archives unpack (each task also finds its own folder if
    that is named, and the inner `lra_release` if there are two):

        FOLDER/
          lra_release/lra_release/
            listops-1000/basic_{train,val,test}.tsv
            tsv_data/new_aan_pairs.{train,eval,test}.tsv
            pathfinder{32,128}/curv_contour_length_14/{imgs/N/sample_M.png,metadata/N.npy}
          aclImdb/{train,test}/{pos,neg}/ID_RATING.txt
          cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin
    """

    task: str = setting("all", "what to build", choices=("all", *tasks.TASKS))
    data_dir: str | None = setting(None, "folder of the published files; default: generated data")
    cache_dir: str = setting("data", "folder for prepared data")
    task_options: str = setting("", "of the task, such as validation=test for text")

    def __post_init__(self) -> None:
        """Refuse options for all tasks at once.

        Raises:
            ValueError: naming the setting.
        """
        flags.parse_options("task_options", self.task_options)
        if self.task == "all" and self.task_options:
            raise ValueError(
                f"task_options={self.task_options!r} with task='all': options are of one task; "
                f"name it: {', '.join(tasks.TASKS)}."
            )


def describe(task: Task) -> str:
    """What is in a task: counts, lengths, balance of labels, fingerprint, reference lines."""
    lines = [f"{task.name}: {task.num_classes} classes, {len(task.vocabulary)} token ids"]
    lines += [f"  {name + ':':<12}{_describe(split)}" for name, split in task.splits.items()]
    reached = (f"{name} {accuracy:.1%}" for name, accuracy in task.reference_lines().items())
    return "\n".join(
        [*lines, f"  reference:  {', '.join(reached)}", f"  data:       {task.fingerprint}"]
    )


def _describe(split: Split) -> str:
    lengths = split.lengths
    values, counts = np.unique(split.labels, return_counts=True)
    balance = ", ".join(f"{v} {n / len(split):.1%}" for v, n in zip(values, counts))
    return (
        f"{len(split):,} examples of {lengths.min():,} to {lengths.max():,} tokens "
        f"(mean {lengths.mean():,.0f}); labels {balance}"
    )


def main(argv: list[str]) -> None:
    """Run the command line.

    Missing or wrong data end with exit code 2 and one message; with `--task=all` the other tasks
    are built first, and the code is 2 only if there was none.
    """
    config = flags.parse(Config, argv)
    signal.signal(signal.SIGTERM, _exit)  # unwinds, so that nothing half-written stays
    options = flags.parse_options("task_options", config.task_options)
    names = list(tasks.TASKS) if config.task == "all" else [config.task]
    failed = []
    for name in names:
        try:
            task = tasks.load(name, config.data_dir, config.cache_dir, options)
        except (DataError, ValueError) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            failed.append(name)
        else:
            print(describe(task), flush=True)
    if config.task == "all":
        print(f"not built: {', '.join(failed) or 'none'}", file=sys.stderr)
    if len(failed) == len(names):
        sys.exit(2)


def _exit(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)


if __name__ == "__main__":
    main(sys.argv)
