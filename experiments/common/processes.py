"""Several processes that train together: how they start, and what they agree on."""

import contextlib
import dataclasses
import os
import re
import sys
import threading
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.common.flags import setting
from experiments.common.roll_call import RollCallError, roll_call

START_AGAIN = 75  # exit code where the same command may work later


class ProcessesError(RuntimeError):
    """A process that is to train with others cannot know of them."""


@dataclasses.dataclass(frozen=True)
class ProcessSettings:
    """How the processes of a run find each other; an experiment's settings inherit from them."""

    distributed: bool = setting(
        False, "several processes, which find each other on Cloud TPU, GKE and SLURM",
        group="processes", changes_result=False,
    )  # fmt: skip
    coordinator: str | None = setting(
        None, "host:port of process 0, elsewhere; needs the next two", group="processes",
        changes_result=False,
    )  # fmt: skip
    num_processes: int | None = setting(None, "of the run", group="processes", changes_result=False)
    process_id: int | None = setting(
        None, "of this process, from 0 on", group="processes", changes_result=False
    )
    start_timeout: int = setting(
        300, "seconds until all processes are there", group="processes", changes_result=False
    )

    def __post_init__(self) -> None:
        """Check what belongs together.

        Raises:
            ValueError: naming the setting.
        """
        given = {name: getattr(self, name) for name in ("num_processes", "process_id")}
        if (self.coordinator is None) != (None in given.values()) or (
            self.coordinator is None and set(given.values()) != {None}
        ):
            raise ValueError(
                f"coordinator={self.coordinator!r} with num_processes={self.num_processes}, "
                f"process_id={self.process_id}: expected all three or none of them."
            )
        if self.coordinator is not None and not re.fullmatch(r".+:\d+", self.coordinator):
            raise ValueError(f"coordinator={self.coordinator!r}, expected host:port.")
        if self.num_processes is not None and not 0 <= (self.process_id or 0) < self.num_processes:
            raise ValueError(
                f"process_id={self.process_id}, expected one of 0 to {self.num_processes - 1}."
            )
        if self.start_timeout < 1:
            raise ValueError(f"start_timeout={self.start_timeout}, expected at least 1 second.")


def start(settings: ProcessSettings) -> None:
    """Wait for the other processes of the run; call it before anything else of JAX.

    Where they are not all there in time, the process ends with exit code `START_AGAIN` and one
    message, which names those that are missing if the settings name the coordinator.

    Raises:
        ProcessesError: if there is nothing to wait for.
    """
    if not settings.distributed and settings.coordinator is None:
        return
    if settings.coordinator is not None:
        assert settings.num_processes is not None and settings.process_id is not None
        try:
            roll_call(
                settings.coordinator,
                settings.num_processes,
                settings.process_id,
                settings.start_timeout,
            )
        except RollCallError as error:
            _print_error(
                f"the processes did not meet (--start_timeout={settings.start_timeout}): {error}"
            )
            sys.exit(START_AGAIN)
    message = (
        f"waited {settings.start_timeout} seconds (--start_timeout) for all processes to meet at "
        f"the coordinator {settings.coordinator or 'that was detected'}: see that process 0 runs, "
        "that its port can be reached from here, and that all were started."
    )
    # JAX aborts the process after its own time-out
    limit = threading.Timer(settings.start_timeout, _give_up, [message])
    limit.daemon = True
    limit.start()
    try:
        jax.distributed.initialize(
            settings.coordinator,
            settings.num_processes,
            settings.process_id,
            initialization_timeout=settings.start_timeout + 60,
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessesError(
            f"no other processes: {error} Give --coordinator, --num_processes and --process_id, or "
            "neither these nor --distributed for one process."
        ) from error
    finally:
        limit.cancel()


def _print_error(message):
    print(f"error: {message}", file=sys.stderr, flush=True)


def _give_up(message):
    _print_error(message)
    os._exit(START_AGAIN)


def is_first() -> bool:
    """Whether this process writes what is written once: process 0."""
    return jax.process_index() == 0


def say(message: str) -> None:
    """Print to stderr, once for all processes."""
    if is_first():
        print(message, file=sys.stderr)


@contextlib.contextmanager
def first_alone(name: str) -> Iterator[None]:
    """Process 0 goes through first, then the others, who find what it left."""
    if jax.process_count() > 1 and not is_first():
        multihost_utils.sync_global_devices(name)
    yield
    if jax.process_count() > 1 and is_first():
        multihost_utils.sync_global_devices(name)


def largest(*numbers: int) -> list[int]:
    """The largest of each number over all processes, the same on all of them."""
    if jax.process_count() == 1:
        return list(numbers)
    every = multihost_utils.process_allgather(np.array(numbers, np.int32))
    return np.max(every, axis=0).tolist()
