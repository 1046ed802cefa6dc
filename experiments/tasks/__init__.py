"""The tasks by name: `TASKS[name](data_dir, cache_dir, **options)` gives a `base.Task`."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from experiments.tasks import image, listops, pathfinder, retrieval, text
from experiments.tasks.base import Task

TASKS: dict[str, Callable[..., Task]] = {
    "listops": listops.load,
    "text": text.load,
    "retrieval": retrieval.load,
    "image": image.load,
    "pathfinder": functools.partial(pathfinder.load, pathfinder.PATHFINDER),
    "pathx": functools.partial(pathfinder.load, pathfinder.PATHX),
}


def load(name: str, data_dir: str | None, cache_dir: str, options: Mapping[str, Any]) -> Task:
    """The task of a name, with its own options.

    Raises:
        ValueError: if the task has no such options, or refuses their values.
        DataError: if its data are missing or wrong.
    """
    try:
        inspect.signature(TASKS[name]).bind(data_dir, cache_dir, **options)
    except TypeError as error:
        raise ValueError(
            f"task_options={dict(options)} do not fit task={name!r}: {error}."
        ) from error
    return TASKS[name](data_dir, cache_dir, **options)
