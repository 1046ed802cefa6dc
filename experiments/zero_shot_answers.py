"""Answers of a model to requests, kept in a file from which a killed run goes on."""

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from lowrank_attn.models.decoder_configs import DecoderConfig

Key = str


class Answers:
    """An append-only file of JSON lines [key, answer], read again at the start.

    A line that is damaged, such as the last one after a crash, is named and answered anew.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Read what is there; the folder is made if need be."""
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._known: dict[Key, Any] = {}
        content = self.path.read_bytes() if self.path.exists() else b""
        for number, line in enumerate(content.splitlines(), 1):
            try:
                key, answer = json.loads(line)
                self._known[key] = answer
            except (ValueError, TypeError):
                logging.warning("%s, line %d is damaged: it is answered anew.", path, number)
        if content and not content.endswith(b"\n"):
            self._append(b"\n")  # what follows the damaged line is a line of its own

    def __contains__(self, key: Key) -> bool:
        """Whether there is an answer."""
        return key in self._known

    def __getitem__(self, key: Key) -> Any:
        """The answer, as JSON has it."""
        return self._known[key]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._known)

    def add(self, answers: Mapping[Key, Any]) -> None:
        """Keep answers: when this returns, they are on disk."""
        lines = (json.dumps([key, answer]) + "\n" for key, answer in answers.items())
        self._append("".join(lines).encode())
        self._known.update(answers)

    def _append(self, content: bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def request_key(fingerprint: str, kind: str, request: Any) -> Key:
    """The name of a request to a model: equal requests of one kind have the same one."""
    text = json.dumps([fingerprint, kind, request], separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def model_fingerprint(config: DecoderConfig, params: Mapping[str, Any], *more: str) -> str:
    """A hash of all that a model's answers depend on.

    Args:
        config: the model.
        params: every parameter and constant by path.
        more: what else answers depend on, such as the dtype of the computation.
    """
    digest = hashlib.sha256(repr((config, more)).encode())
    for name, array in sorted(params.items()):
        array = np.asarray(array)
        digest.update(f"{name} {array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
