"""Checkpoints of a run: what is written, what is kept, and what is refused on the way back.

A run's folder holds `run.json` (settings, vocabulary, format) and, if they are not elsewhere,
`checkpoints/<phase>/<step>/` with three items: `state` (flat names of leaves, such as
`params/encoder/kernel`, to arrays), `data` (state of the batch iterator) and `meta` (settings,
vocabulary, format, evaluations so far). The two newest and the best checkpoints of a phase are
kept.
"""

import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from experiments.common.optimizer import leaf_names
from experiments.common.record import read_json, write_json

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or does not fit this run."""


def open_run(run_dir: pathlib.Path, description: Mapping[str, Any]) -> float:
    """Make a run's folder, or check that the one that is there belongs to the same run.

    Args:
        run_dir: the folder.
        description: what `describe` gives for this run.

    Returns:
        When the run was first started, in seconds since the epoch.

    Raises:
        CheckpointError: if the folder has checkpoints but no `run.json`, or if its settings,
            vocabulary or format differ; every difference is named. Nothing is changed then.
    """
    path = run_dir / "run.json"
    if path.exists():
        found = read_json(path)
        check_description(found, description, path)
        return found["started"]
    if (run_dir / "checkpoints").exists():
        raise CheckpointError(
            f"{run_dir} has checkpoints but no run.json, so what they belong to is unknown: "
            "choose another run folder."
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    started = time.time()
    write_json(path, {**description, "started": started})
    return started


def describe(config: Mapping[str, Any], vocabulary: Any) -> dict[str, Any]:
    """What identifies a run, as JSON gives it back (tuples are lists)."""
    description = {"format": FORMAT, "config": dict(config), "vocabulary": vocabulary}
    return json.loads(json.dumps(description))


def check_description(
    found: Mapping[str, Any], description: Mapping[str, Any], where: object
) -> None:
    """Raise a CheckpointError that names every way in which `found` is not this run."""
    if found.get("format") != FORMAT:
        raise CheckpointError(
            f"{where} has format {found.get('format')}, this version reads format {FORMAT}."
        )
    was, now = found["config"], description["config"]
    changed = [
        f"{name}: {was.get(name, '(absent)')!r} there, {now.get(name, '(absent)')!r} now"
        for name in sorted({*was, *now})
        if name not in was or name not in now or was[name] != now[name]
    ]
    if found["vocabulary"] != description["vocabulary"]:
        changed.append(
            f"vocabulary: {found['vocabulary']!r} there, {description['vocabulary']!r} now"
        )
    if changed:
        raise CheckpointError(
            f"{where} belongs to a run with other settings ({'; '.join(changed)}): "
            "use the same settings to continue it, or another run folder to start a new one."
        )


class Checkpoints:
    """The checkpoints of one phase, written in the background by Orbax."""

    def __init__(self, folder: str | pathlib.Path):
        """Open or make the folder; unfinished checkpoints of a killed process are cleaned up.

        Args:
            folder: or a bucket path, `gs://...`.

        Raises:
            CheckpointError: if a bucket cannot be reached.
        """
        path = epath.Path(folder)
        # bucket paths are absolute
        self.folder = path if path.is_absolute() else path.absolute()
        self._keep = _LatestAndBest()
        try:
            self._manager = ocp.CheckpointManager(
                self.folder,
                item_handlers={
                    "state": ocp.StandardCheckpointHandler(),
                    "data": ocp.JsonCheckpointHandler(),
                    "meta": ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=self._keep, cleanup_tmp_directories=True
                ),
            )
        except Exception as error:
            if "://" not in str(folder):
                raise
            raise CheckpointError(
                f"checkpoint_dir: {folder} cannot be opened; see that gcsfs is installed (pip "
                "install 'lowrank-attn[gcs]'), the bucket exists, and this machine may write to "
                f"it. ({type(error).__name__}: {str(error)[:300]})"
            ) from error

    def latest_step(self) -> int | None:
        """The newest complete checkpoint."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: Any, data: Mapping, meta: Mapping, best_step: int | None
    ) -> None:
        """Start to write a checkpoint; the arrays may be donated once this returns.

        Args:
            step: its number.
            state: a pytree of arrays.
            data: state of the batch iterator, for JSON.
            meta: for JSON.
            best_step: the checkpoint to keep besides the newest two (it may be this one).
        """
        self._manager.wait_until_finished()
        self._keep.best_step = best_step
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_flat(state)),
                data=ocp.args.JsonSave(dict(data)),
                meta=ocp.args.JsonSave(dict(meta)),
            ),
        )

    def restore(self, step: int, like: Any) -> Any:
        """The state at a step.

        Args:
            step: the checkpoint's number.
            like: a pytree of arrays of the structure, shapes, dtypes and shardings to restore to.

        Raises:
            CheckpointError: if the checkpoint is damaged, or if leaves are missing, extra or of
                another shape or dtype; every such leaf is named with what was expected and found.
        """
        try:
            # not by the manager: in a bucket it takes these items for those that it wrote last
            found = ocp.StandardCheckpointHandler().metadata(self.folder / str(step) / "state").tree
        except Exception as error:
            raise self._damaged(step, error) from error
        expected = _flat(like)
        _check_leaves(found, expected, self.folder / str(step))
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in expected.items()
        }
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        try:
            flat = self._manager.restore(step, args=args)["state"]
        except Exception as error:
            raise self._damaged(step, error) from error
        return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in expected])

    def read(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The items `data` and `meta` of a checkpoint.

        Raises:
            CheckpointError: if they cannot be read.
        """
        args = ocp.args.Composite(data=ocp.args.JsonRestore(), meta=ocp.args.JsonRestore())
        try:
            items = self._manager.restore(step, args=args)
        except Exception as error:
            raise self._damaged(step, error) from error
        return items["data"], items["meta"]

    def wait(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait until everything is on disk, and free the threads."""
        self._manager.close()

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        others = [other for other in self._manager.all_steps() if other != step]
        way_out = f"continue from step {max(others)}" if others else "start again"
        return CheckpointError(
            f"checkpoint {self.folder / str(step)} is damaged and was left as it is: move that "
            f"folder elsewhere to {way_out}. ({type(error).__name__}: {str(error)[:300]})"
        )


class _LatestAndBest:
    """Orbax's preservation policy: the two newest and the best."""

    best_step: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        newest = len(checkpoints) - 2
        return [i >= newest or info.step == self.best_step for i, info in enumerate(checkpoints)]


def _flat(tree: Any) -> dict[str, Any]:
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree)))


def _check_leaves(found: Mapping[str, Any], expected: Mapping[str, Any], where: object) -> None:
    def described(leaf: Any) -> str:
        return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"

    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is not part of this model" for name in found if name not in expected]
    wrong += [
        f"{name}: expected {described(leaf)}, found {described(found[name])}"
        for name, leaf in expected.items()
        if name in found and described(leaf) != described(found[name])
    ]
    if wrong:
        raise CheckpointError(f"checkpoint {where} does not fit this model: {'; '.join(wrong)}.")
