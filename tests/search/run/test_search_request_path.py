"""Modules that one beam request enters in a process of its own; `pytest -s` lists them.

Counted are Espalier's modules of which a Python function runs between `submit` and the result, with the bundled pair.
Not counted is what only loading or a process's first request runs, and functions that numba has compiled.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import FrameType

import pytest

from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings

MAX_MODULES = 60
"""One of them, `kernels.cpu.products.tiles`, on processors without AMX only."""
OFF = (
    "prm.families.eurus",
    "prm.families.thinkprm",
    "prm.full_rescore",
    "prm.scorers",
    "search.algorithms.own",
    "search.growth.early_stop",
    "search.grading.equality",
    "search.grading.math_verify",
    "search.service",
    "search.trace",
    "search.voting.equivalence",
    *(f"search.algorithms.{name}" for name in ("adaptive", "auto", "dvts", "independent", "lookahead", "mcts")),
)
"""Rooms and modules of what this request does not use."""


def request(coins: int, **fields: object) -> SearchRequest:
    problem = f"Tom has {coins} coins. (a) He finds 31 more. (b) He loses 14. How many coins does he have now?"
    return SearchRequest(problem, beam_width=2, expansion=2, **fields)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def orchestrator() -> Iterator[Orchestrator]:
    made = load_orchestrator(RuntimeSettings(kv_memory=2**28, threads=1))
    yield made
    made.close()


def modules_entered(orchestrator: Orchestrator, first: SearchRequest, second: SearchRequest) -> set[str]:
    """Modules that the second of two requests enters."""
    entered: set[str] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("espalier."):
            entered.add(module.removeprefix("espalier."))

    def solve(request: SearchRequest) -> None:
        orchestrator.submit(request)
        while not (ended := orchestrator.step()):
            pass
        assert ended[0].answer

    solve(first)
    before = sys.getprofile()
    sys.setprofile(record)
    try:
        solve(second)
    finally:
        sys.setprofile(before)
    return entered


def test_one_beam_request_enters_few_modules_and_none_of_what_it_does_not_use(orchestrator: Orchestrator):
    assert all(find_spec(f"espalier.{name}") for name in OFF)
    entered = modules_entered(orchestrator, request(12), request(25))
    print(*sorted(entered), f"{len(entered)} modules", sep="\n")
    assert {name.split(".")[0] for name in entered} >= {"search", "prm", "engine", "kernels"}
    assert not {name for name in entered if name.startswith(OFF)}
    assert len(entered) <= MAX_MODULES, "\n".join(sorted(entered))


def test_a_search_of_independent_paths_enters_the_gate_that_the_beam_does_not(orchestrator: Orchestrator):
    """The recorder sees what a feature adds."""
    majority = {"algorithm": AlgorithmName.MAJORITY}
    entered = modules_entered(orchestrator, request(12, **majority), request(25, **majority))
    assert {"search.growth.early_stop", "search.algorithms.independent"} <= entered
