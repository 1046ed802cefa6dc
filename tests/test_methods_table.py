"""README's tables of methods are those of the registries, and every method has an oracle."""

import importlib
import json
from pathlib import Path

import pytest

from experiments.methods import ROOT, with_tables
from lowrank_attn.features import FEATURE_MAPS
from lowrank_attn.layers import ATTENTION, GATINGS
from lowrank_attn.ops import RULES

TESTS = Path(__file__).parent
ERRORS = json.loads((TESTS / "golden/errors.json").read_text())


def marks_of(function):
    """The marks of a test and of its parameters."""
    for mark in getattr(function, "pytestmark", []):
        yield mark
        if mark.name == "parametrize":
            for value in mark.args[1]:
                yield from getattr(value, "marks", ())


def test_every_method_has_a_marked_oracle_and_its_measured_error():
    """`pytest -m oracle --oracle_errors=tests/golden/errors.json` measures them."""
    marked: dict[str, set[str]] = {}
    for path in TESTS.glob("test_*.py"):
        if "oracle" in path.read_text():
            for function in vars(importlib.import_module(path.stem)).values():
                for mark in marks_of(function):
                    for method in mark.args if mark.name == "oracle" else ():
                        marked.setdefault(method, set()).add(mark.kwargs["source"])
    assert set(marked) == {*FEATURE_MAPS, *ATTENTION, *GATINGS}
    assert {method: set(oracles) for method, oracles in ERRORS.items()} == marked
    assert {gating.rule for gating in GATINGS.values()} == set(RULES)


def test_the_readme_has_these_tables():
    """`python -m experiments.methods` writes them."""
    readme = (ROOT / "README.md").read_text()
    assert with_tables(readme, ERRORS) == readme


def test_a_readme_without_marks_is_refused():
    with pytest.raises(ValueError, match="README.md has no <!-- methods -->"):
        with_tables("", ERRORS)
