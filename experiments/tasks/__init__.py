"""The tasks by name: `TASKS[name](data_dir, cache_dir)` gives a `base.Task`."""

from experiments.tasks import listops

TASKS = {"listops": listops.load}
