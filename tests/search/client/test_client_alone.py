"""What runs where only the packages of `search/client/README.md` are installed, and what is said of the others."""

import json
import re
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions, requires
from pathlib import Path

import pytest

README = Path(__file__).parents[3] / "search/client/README.md"
ALONE = """
import sys

class Absent:
    def find_spec(self, name, *_):
        top = name.partition(".")[0]
        if not top.startswith("_") and top not in {installed!r} and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = {argv!r}
from espalier.experiments.cli import run
run()
"""


def named() -> list[str]:
    """The packages that the README has installed for a client and its commands."""
    (line,) = re.findall(r"^pip install (annotated-types .*)$", README.read_text(), re.MULTILINE)
    return line.split()


def modules_of(packages: list[str]) -> set[str]:
    """Top-level modules of packages and of what they depend on."""
    found, waiting = set[str](), list(packages)
    while waiting:
        name = re.split(r"[ ;<>=!~\[(]", waiting.pop())[0].lower().replace("_", "-")
        if name not in found:
            found.add(name)
            waiting += [each for each in requires(name) or () if "extra ==" not in each and is_wanted(each)]
    spelled = packages_distributions().items()
    return {top for top, owners in spelled if {owner.lower().replace("_", "-") for owner in owners} & found}


def is_wanted(requirement: str) -> bool:
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate()


def alone(packages: list[str], *argv: object) -> subprocess.CompletedProcess[str]:
    code = ALONE.format(installed=sorted(modules_of(packages) | {"espalier"}), argv=["espalier", *map(str, argv)])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_the_commands_of_a_client_need_no_other_packages(start):
    address = start().address
    ran = alone(named(), "solve", "--endpoint", address, "1+1?", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["answer"] == "42"
    ran = alone(named(), "solve", "--endpoint", address)  # shows a problem of the bundled benchmark, and the tree
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "answer" in ran.stdout
    ran = alone(named(), "health", "--endpoint", address)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("without", "argv"), [("typer", ["--version"]), ("nothing", ["solve", "1+1?"])])
def test_what_is_not_installed_is_named_with_what_to_install(without: str, argv: list[str]):
    ran = alone([name for name in named() if name != without], *argv)
    assert ran.returncode == 1
    assert re.fullmatch(r"(problem .*\n\n)?", ran.stdout)
    assert ran.stderr.startswith("error: the package of '")
    assert "pip install typer" in ran.stderr
    assert "pip install espalier-search" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_entry_point_is_the_guarded_one():
    (script,) = [each for each in distribution("espalier-search").entry_points if each.group == "console_scripts"]
    assert script.value == "espalier.experiments.cli:run"
