"""What is wrong with a checkpoint of another library."""

from collections.abc import Mapping
from typing import Any


class ConvertError(ValueError):
    """A checkpoint that is damaged, unsafe to read, or not of the layout that it should have."""


def expect(config: Mapping[str, Any], name: str, value: Any, why: str) -> None:
    """Refuse a `config.json` with another value; a missing one counts as this.

    Raises:
        ConvertError: if it has one.
    """
    if config.get(name, value) != value:
        raise ConvertError(f"config.json has {name}={config[name]!r}, expected {value!r}: {why}.")
