"""The tasks by name: `TASKS[name](data_dir, cache_dir, **options)` gives a `base.Task`."""

from collections.abc import Callable

from experiments.tasks import image, listops, retrieval, text
from experiments.tasks.base import Task

TASKS: dict[str, Callable[..., Task]] = {
    "listops": listops.load,
    "text": text.load,
    "retrieval": retrieval.load,
    "image": image.load,
}
