"""What a run leaves to look at: CSV rows, TensorBoard events and a progress bar."""

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping

from tensorboardX import SummaryWriter
from tqdm import tqdm


class CsvLog:
    """A CSV file whose first column is `step`; each row reaches the file in one write."""

    def __init__(self, path: pathlib.Path, step: int):
        """Open the file, dropping rows after `step` and a last line that was cut short."""
        self.path = path
        self._header: list[str] | None = None
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n")]
            rows = [line for line in kept[1:] if int(line.split(",")[0]) <= step]
            if kept and rows:
                self._header = kept[0].rstrip("\n").split(",")
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text("".join([*kept[:1], *rows] if rows else []))
            os.replace(temporary, path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row; float32 values survive exactly.

        Raises:
            ValueError: if the names are not those of the rows before.
        """
        header = ["step", *values]
        text = ",".join([str(step), *(f"{value:.9g}" for value in values.values())]) + "\n"
        if self._header is None:
            self._header = header
            text = ",".join(header) + "\n" + text
        if header != self._header:
            raise ValueError(f"{self.path} has columns {self._header}, the new row has {header}.")
        os.write(self._file, text.encode())

    def sync(self) -> None:
        """Make sure that the rows survive a crash of the machine."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Clock:
    """Where the wall time of training went, evaluation and checkpoints of the loop left out.

    * `input_wait_fraction`: the share of it in which the loop stood waiting for the next batch.
    * `host_fraction`: the share in which the devices may have had nothing to do, an upper bound. A
      dispatch counts if the one before had ended when it was enqueued; then the time since the
      devices were last seen busy counts in full.
    """

    def __init__(self) -> None:
        """Start the first interval."""
        self._last_busy = self._since = time.perf_counter()
        self._waited = self._idle = self._paused = 0.0
        self._tokens = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for a batch."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training."""
        start = time.perf_counter()
        yield
        self._last_busy = time.perf_counter()
        self._paused += self._last_busy - start

    def enqueued(self, was_idle: bool) -> None:
        """A dispatch was handed over; `was_idle`: the one before had ended by then."""
        now = time.perf_counter()
        if was_idle:
            self._idle += now - self._last_busy
        self._last_busy = now

    def computed(self, tokens: int) -> None:
        """A dispatch of so many tokens has ended."""
        self._tokens += tokens

    def seen_busy(self) -> None:
        """The devices are working."""
        self._last_busy = time.perf_counter()

    def read(self) -> dict[str, float]:
        """The numbers since the last call."""
        now = time.perf_counter()
        seconds = max(now - self._since - self._paused, 1e-9)
        numbers = {
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds,
            "input_wait_fraction": self._waited / seconds,
            "host_fraction": min(self._idle / seconds, 1.0),
        }
        self._since = now
        self._waited = self._idle = self._paused = 0.0
        self._tokens = 0
        return numbers


class RunLog:
    """The logs of one phase: `<phase>_{train,eval,timing}.csv`, TensorBoard, a bar on stderr.

    The first two files depend on the run's settings alone and are the same, byte for byte, whether
    or not the run was interrupted; all that depends on the clock is in the third.
    """

    def __init__(
        self, run_dir: pathlib.Path, phase: str, step: int, steps: int, evaluated_step: int
    ):
        """Open the logs of a phase that continues after `step`.

        Rows after that step are dropped, and so are evaluations after `evaluated_step`: both will
        be written again.
        """
        last = {"train": step, "eval": evaluated_step, "timing": step}
        self._csv = {kind: CsvLog(run_dir / f"{phase}_{kind}.csv", last[kind]) for kind in last}
        folder = str(run_dir / "tensorboard" / phase)
        self._board = SummaryWriter(folder, purge_step=step + 1)
        interval = 0.5 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(
            desc=phase,
            initial=step,
            total=steps,
            unit="step",
            mininterval=interval,
            file=sys.stderr,
        )
        self._shown: dict[str, str] = {}

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Add a row to the CSV file of a kind (`train`, `eval` or `timing`) and to TensorBoard."""
        self._csv[kind].append(step, values)
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)
        for name in ("loss", "accuracy", "tokens_per_second"):
            if name in values:
                shown = name if kind != "eval" else f"eval_{name}"
                self._shown[shown] = f"{values[name]:.4g}"
        self._bar.set_postfix(self._shown, refresh=False)

    def progress(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(step - self._bar.n)

    def sync(self) -> None:
        """Make sure that the rows survive a crash of the machine."""
        for file in self._csv.values():
            file.sync()

    def close(self) -> None:
        """Close everything."""
        self._bar.close()
        self._board.close()
        for file in self._csv.values():
            file.close()


class NoLog:
    """In place of `RunLog` in processes whose numbers are those of another one."""

    def __init__(self, *arguments: object):
        """Open nothing."""

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Leave it to the other process."""

    def progress(self, step: int) -> None:
        """Leave it to the other process."""

    def sync(self) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """Nothing was opened."""
