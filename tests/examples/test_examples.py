"""Every example runs as it stands."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
ONE_THREAD = {**os.environ, "ESPALIER_THREADS": "1"}


def run(script: str, *arguments: str, folder: Path = FOLDER) -> str:
    """What an example prints."""
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, cwd=folder, env=ONE_THREAD, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def endpoint() -> Iterator[str]:
    """HOST:PORT of a server of the bundled pair."""
    command = [sys.executable, "-m", "espalier.experiments.cli.main", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ONE_THREAD) as server:
        assert server.stdout is not None
        yield re.findall(r"127\.0\.0\.1:\d+", server.stdout.readline())[0]
        server.terminate()


def test_problems_are_solved_in_python() -> None:
    printed = run("solve.py")
    assert printed.startswith("73, score ")
    assert re.findall(r"^(\S+): 73 in ", printed, re.MULTILINE) == ["majority", "best-of-n"]


def test_a_client_asks_a_server(endpoint: str) -> None:
    printed = run("client.py", endpoint).splitlines()
    assert re.fullmatch(r"depth 1: \d+ scored, [12] kept", printed[0])
    assert "answer 73" in printed
    assert printed[-2:] == ["59", "95"]


def test_an_algorithm_of_ones_own_is_found_beside_its_script(tmp_path: Path) -> None:
    assert run("own_algorithm.py", folder=tmp_path).startswith("own_algorithm:Halving: 73 of ")


def test_every_example_is_in_the_table_and_has_its_test() -> None:
    listed = re.findall(r"`(\w+\.py)` \|", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(file.name for file in FOLDER.glob("*.py"))
    tests = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in listed if f'run("{name}"' not in tests] == []
