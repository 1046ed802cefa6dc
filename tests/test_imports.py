"""Packages import in one direction only."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# package -> the packages of ours that it may import
ALLOWED = {
    "lowrank_attn.features": {"lowrank_attn.features"},
    "lowrank_attn.ops": {"lowrank_attn.ops"},
    "lowrank_attn.parallel": {"lowrank_attn.parallel", "lowrank_attn.ops"},
    "lowrank_attn.layers": {
        "lowrank_attn.layers",
        "lowrank_attn.features",
        "lowrank_attn.ops",
        "lowrank_attn.parallel",
    },
    "lowrank_attn.theory": {"lowrank_attn.theory", "lowrank_attn.features"},
    "lowrank_attn.convert": {
        "lowrank_attn.convert",
        "lowrank_attn.models",
        "lowrank_attn.layers",
        "lowrank_attn.features",
    },
    "lowrank_attn.models": {
        "lowrank_attn.models",
        "lowrank_attn.layers",
        "lowrank_attn.features",
        "lowrank_attn.ops",
        "lowrank_attn.parallel",
    },
}


def imported(path: pathlib.Path) -> set[str]:
    """Full names of all modules of ours that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in ("lowrank_attn", "experiments")}


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_downwards_only(package):
    files = list((ROOT / package.replace(".", "/")).rglob("*.py"))
    assert files
    for path in files:
        for name in imported(path):
            if name.count(".") == 1 and name.startswith("lowrank_attn."):
                name = name + "."  # `from lowrank_attn import ops`
            fits = any(f"{name}.".startswith(f"{allowed}.") for allowed in ALLOWED[package])
            assert fits, f"{path.relative_to(ROOT)} imports {name}"


def test_the_library_never_imports_experiments():
    for path in (ROOT / "lowrank_attn").rglob("*.py"):
        assert not any(name.startswith("experiments") for name in imported(path)), path


def test_every_package_of_the_library_has_a_rule():
    packages = {f"lowrank_attn.{path.parent.name}"
                for path in (ROOT / "lowrank_attn").glob("*/__init__.py")}  # fmt: skip
    assert packages == set(ALLOWED)
