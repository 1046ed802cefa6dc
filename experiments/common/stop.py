"""Stopping on SIGTERM or SIGINT at a point from which the run can be continued."""

import concurrent.futures
import os
import shlex
import signal
import sys
from types import FrameType
from typing import NoReturn

import jax


class StopSignals:
    """Within this context SIGTERM and SIGINT only ask to stop; a second signal stops at once.

    `requested` is polled by the training loop, which saves and then calls `exit`. The exit code is
    128 plus the number of the signal, as shells have it: 143 after SIGTERM, 130 after SIGINT.
    """

    def __init__(self) -> None:
        """No signal yet."""
        self._signum: int | None = None

    def __enter__(self) -> "StopSignals":
        """Take over the two signals."""
        self._before = {n: signal.signal(n, self._ask) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception: object) -> None:
        """Give the two signals back."""
        for signum, handler in self._before.items():
            # None: not set from Python, such as that of `jax.distributed`
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None:
            self.__exit__()
            signal.raise_signal(signum)
        self._signum = signum

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signum is not None

    @property
    def signum(self) -> int:
        """The number of the signal that has come; 0: none."""
        return self._signum or 0

    def adopt(self, signum: int) -> None:
        """Take a signal that has come to another process, if it is not 0, as one's own."""
        if self._signum is None and signum:
            self._signum = signum

    def exit(self, where: str) -> NoReturn:
        """Say where the run stopped and how to continue it, and raise SystemExit."""
        raise SystemExit(self._announce(where))

    def compile(self, lowered: jax.stages.Lowered, where: str) -> jax.stages.Compiled:
        """Compile; a signal meanwhile ends the process at once, so all must be saved before.

        The compiler cannot be interrupted, hence it runs in a thread and the process does not wait
        for it to end.
        """
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(lowered.compile)
            while not future.done():
                if self.requested:
                    code = self._announce(where)
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
                concurrent.futures.wait([future], timeout=0.1)
            return future.result()

    def _announce(self, where: str) -> int:
        assert self._signum is not None
        name = signal.Signals(self._signum).name
        command = shlex.join(sys.orig_argv)
        print(f"stopped by {name} {where}. To continue: {command}", file=sys.stderr)
        return 128 + self._signum
