"""Every example runs as it stands."""

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_thread import ServerThread

from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.service.settings import ServerSettings

FOLDER = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example as Python would, but in this process, and returns what it prints."""

    def run_script(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.syspath_prepend(FOLDER)
        runpy.run_path(str(FOLDER / script), run_name="__main__")
        return capsys.readouterr().out

    return run_script


@pytest.fixture
def endpoint() -> Iterator[str]:
    """HOST:PORT of a server of the bundled pair."""
    server = ServerThread(lambda: load_orchestrator(RuntimeSettings(kv_memory=2**28)), ServerSettings(port=0))
    server.wait_loaded()
    yield server.address
    server.close()


def test_problems_are_solved_in_python(run: Callable[..., str]) -> None:
    printed = run("solve.py")
    assert printed.startswith("73, score ")
    assert re.findall(r"^(\S+): 73 in ", printed, re.MULTILINE) == ["majority", "best-of-n"]


def test_a_client_asks_a_server(run: Callable[..., str], endpoint: str) -> None:
    printed = run("client.py", endpoint).splitlines()
    assert re.fullmatch(r"depth 1: \d+ scored, [12] kept", printed[0])
    assert "answer 73" in printed
    assert printed[-2:] == ["59", "95"]


def test_an_algorithm_of_ones_own_is_found_beside_its_script(run: Callable[..., str]) -> None:
    assert run("own_algorithm.py").startswith("own_algorithm:Halving: 73 of ")


def test_steps_are_scored_by_a_function_of_ones_own(run: Callable[..., str]) -> None:
    printed = run("own_verifier.py")
    assert printed.startswith("73, score 1.00")
    scores = dict(re.findall(r"^  (\S+)  \(a\) (\S+)$", printed, re.MULTILINE))
    assert set(scores) <= {"0.0", "1.0"}
    assert scores["1.0"] == "38+47=85"


@pytest.mark.slow
def test_a_generator_trained_on_its_own_solutions_solves_more(run: Callable[..., str], tmp_path: Path) -> None:
    settings = ServerSettings(port=0, reload_folder=tmp_path)
    server = ServerThread(lambda: load_orchestrator(RuntimeSettings(kv_memory=2**28, verifier="")), settings)
    server.wait_loaded()
    try:
        printed = run("train.py", server.address, str(tmp_path))
    finally:
        server.close()
    assert re.search(r"^reloaded: \w{12}$", printed, re.MULTILINE)
    ((gained, low, high),) = re.findall(r"(\S+) points \((\S+) to (\S+)\)", printed)
    assert 0 < float(low) < float(gained) < float(high)


def test_every_example_is_in_the_table_and_has_its_test() -> None:
    listed = re.findall(r"`(\w+\.py)` \|", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(file.name for file in FOLDER.glob("*.py"))
    tests = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in listed if f'run("{name}"' not in tests] == []
