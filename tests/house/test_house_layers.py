"""Imports point down: by import-linter's contract, and by reading every import statement."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest
from house_files import LAYERS, ROOT, checkout, installed_path, module_name, project, sources

PLANTED_AT_THE_TOP = "from espalier.search.request import SearchRequest\n"
PLANTED_IN_A_FUNCTION = "def _planted() -> None:\n    from espalier.experiments import statistics\n"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter by the contract of `folder`'s pyproject.toml, over the `espalier` that lies there if one does."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--config", "pyproject.toml", "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The installed layout and the contract, to be edited."""
    for name in checkout():
        path = installed_path(name)
        if path is not None and path.suffix == ".py":
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / path)
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    return tmp_path


def test_import_linter_keeps_the_contracts():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 kept, 0 broken" in result.stdout


def test_the_contract_of_the_laboratory_names_every_other_room():
    (contract,) = (each for each in project()["tool"]["importlinter"]["contracts"] if each["type"] == "forbidden")
    rooms = {".".join(module_name(name).split(".")[:3]) for name in layered_sources() if name.startswith("experiments")}
    layers = {f"espalier.{layer}" for layer in LAYERS[:-1]}
    assert set(contract["source_modules"]) == layers | rooms - {"espalier.experiments", "espalier.experiments.lab"}


@pytest.mark.parametrize("planted", [PLANTED_AT_THE_TOP, PLANTED_IN_A_FUNCTION])
@pytest.mark.parametrize("module", ["espalier/kernels/layout.py", "espalier/prm/base.py"])
def test_import_linter_catches_an_upward_import(copy, module, planted):
    with (copy / module).open("a", encoding="utf-8") as stream:
        stream.write(f"\n\n{planted}")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 kept, 1 broken" in result.stdout


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names of everything imported anywhere in a module, functions and TYPE_CHECKING blocks included."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                base = resolve_name("." * level + (source or ""), package) if level else source or ""
                yield from (f"{base}.{alias.name}" for alias in names)
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
                yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def violations(text: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of `module` that its layer forbids: higher layers, the wire contract below search, bare layer names."""
    layer = module.split(".")[1]
    rank = LAYERS.index(layer)
    forbidden = {f"espalier.{name}" for name in LAYERS[rank + 1 :]} | set(LAYERS)
    if rank < LAYERS.index("search"):
        forbidden.add("espalier.v1")
    return [
        name
        for name in imports(ast.parse(text), module, is_package)
        if any(name == bad or name.startswith(f"{bad}.") for bad in forbidden)
    ]


def layered_sources() -> list[str]:
    return [name for name in sources() if name.split("/")[0] in LAYERS]


@pytest.mark.parametrize("layer", LAYERS)
def test_no_source_file_imports_a_layer_above_its_own(layer):
    names = [name for name in layered_sources() if name.startswith(f"{layer}/")]
    assert names
    found = {}
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        if bad := violations(text, module_name(name), is_package=name.endswith("__init__.py")):
            found[name] = bad
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "from espalier.search.request import SearchRequest",
        "import espalier.search",
        "from espalier import search",
        "from ..search import request",
        "def late():\n    from espalier.experiments.cli.main import main",
        "import importlib\nimportlib.import_module('espalier.search.request')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from espalier.prm.base import Family",
        "from search import request",
        "import engine.memory",
        "from espalier.v1 import search_pb2",
    ],
)
def test_the_reading_of_imports_sees_every_way_up(text):
    assert violations(text, "espalier.engine.engine")


@pytest.mark.parametrize(
    "text",
    [
        "from espalier.kernels import layout",
        "from espalier.engine.memory.blocks import KVPool",
        "from .pool import KVPool",
    ],
)
def test_the_reading_of_imports_lets_the_ways_down_pass(text):
    assert violations(text, "espalier.engine.engine") == []


def circles(modules: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import one another in a circle, late imports included; each circle once, sorted."""
    reached = {name: set(found) & modules.keys() for name, found in modules.items()}
    grown = True
    while grown:
        grown = False
        for found in reached.values():
            if more := set[str]().union(*(reached[name] for name in found)) - found:
                found |= more
                grown = True
    around = {name: {other for other in reached[name] if name in reached[other]} for name in reached}
    return [list(circle) for circle in sorted({tuple(sorted(found)) for found in around.values() if found})]


@pytest.mark.parametrize("layer", LAYERS)
def test_no_modules_of_a_layer_import_one_another_in_a_circle(layer: str):
    texts = {module_name(name): name for name in layered_sources() if name.startswith(f"{layer}/")}
    packages = {name for name, path in texts.items() if path.endswith("__init__.py")}
    found = {}
    for module, path in texts.items():
        names = set(imports(ast.parse((ROOT / path).read_text(encoding="utf-8")), module, module in packages))
        names |= {name.rpartition(".")[0] for name in names}
        # A package that a module lies in is always imported before it; it may take names from its modules late.
        found[module] = {name for name in names if name != module and not module.startswith(f"{name}.")}
    assert circles(found) == []


def test_the_rooms_of_experiments_import_one_another_in_no_circle():
    rooms: dict[str, set[str]] = {}
    for path in (name for name in layered_sources() if re.match(r"experiments/\w+/", name)):
        found = imports(ast.parse((ROOT / path).read_text(encoding="utf-8")), module_name(path), False)
        names = {name.split(".")[2] for name in found if name.startswith("espalier.experiments.")}
        rooms.setdefault(path.split("/")[1], set()).update(names - {path.split("/")[1]})
    assert circles(rooms) == []


def test_the_search_for_circles_finds_late_ones():
    assert circles({"a": {"b", "numpy"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_nothing_that_ships_imports_what_is_for_a_checkout_only():
    only = "espalier.experiments.lab"
    found = {}
    for name in layered_sources():
        if not (module := module_name(name)).startswith(only):
            names = imports(ast.parse((ROOT / name).read_text(encoding="utf-8")), module, name.endswith("__init__.py"))
            if bad := [each for each in names if each.startswith(only)]:
                found[name] = bad
    assert found == {}
