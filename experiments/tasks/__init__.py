"""The tasks by name: `TASKS[name](data_dir, cache_dir, **options)` gives a `base.Task`."""

import functools
from collections.abc import Callable

from experiments.tasks import image, listops, pathfinder, text
from experiments.tasks.base import Task

TASKS: dict[str, Callable[..., Task]] = {
    "listops": listops.load,
    "text": text.load,
    "image": image.load,
    "pathfinder": functools.partial(pathfinder.load, pathfinder.PATHFINDER),
    "pathx": functools.partial(pathfinder.load, pathfinder.PATHX),
}
