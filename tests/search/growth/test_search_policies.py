"""Path policies: one that waits for something outside of the engine, and those that a search does not load."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from search_runs import BEAM, BEST_OF_N, MAJORITY, outcome
from search_runs import run as run_whole

from espalier.search.growth import tree
from espalier.search.growth.policies import Branch, Expansion, PathPolicy, PolicyContext
from espalier.search.growth.tree import make_policies
from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult, StopReason
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.tree import Node, Termination

Make = Callable[..., Orchestrator]


class Waits(PathPolicy):
    """Holds every expansion of one search until a thread has waited for `open_gate`."""

    def __init__(self, context: PolicyContext, open_gate: threading.Event, asked: list[str]) -> None:
        self._context, self._open, self._asked = context, open_gate, asked

    def holds(self, expansion: Expansion) -> bool:
        def wait() -> str:
            self._asked.append(threading.current_thread().name)
            assert self._open.wait(30)
            return "done"

        def take(answer: str) -> None:
            assert answer == "done"
            self.tree.resume(expansion)

        self._context.call_outside(wait, take)
        return True


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[str]]]:
    """An event that the searches with an even seed wait for before each expansion; and the threads that wait."""
    event, asked = threading.Event(), list[str]()

    def with_waiting(context: PolicyContext) -> list[PathPolicy]:
        waits = [Waits(context, event, asked)] if context.resolved.request.seed % 2 == 0 else []
        return [*make_policies(context), *waits]

    monkeypatch.setattr(tree, "make_policies", with_waiting)
    yield event, asked
    event.set()


def ended(orchestrator: Orchestrator, search_id: str) -> SearchResult:
    results: dict[str, SearchResult] = {}
    while search_id not in results:
        results |= {result.search_id: result for result in orchestrator.step()}  # pyright: ignore[reportAssignmentType]
    return results[search_id]


@pytest.mark.parametrize("request_", [BEAM, BEST_OF_N, MAJORITY], ids=lambda request: str(request.algorithm))
def test_a_policy_that_waits_outside_holds_up_no_other_search_and_changes_nothing(
    request_: SearchRequest, gate: tuple[threading.Event, list[str]], make_orchestrator: Make
):
    event, asked = gate
    waiting, free = replace(request_, seed=4), replace(request_, seed=5)
    orchestrator = make_orchestrator()
    first = orchestrator.submit(waiting)
    second = ended(orchestrator, orchestrator.submit(free))
    assert second.stop_reason is StopReason.FINISHED
    assert first in orchestrator._searches
    assert asked
    assert threading.current_thread().name not in asked
    event.set()
    late = ended(orchestrator, first)
    orchestrator.engine.check_drained()
    plain = run_whole(make_orchestrator(), replace(waiting, seed=5), replace(waiting, problem=waiting.problem)).results
    assert outcome(second) == outcome(plain[0])
    assert outcome(late) == outcome(plain[1])


def test_a_search_is_cancelled_while_its_policy_waits(gate: tuple[threading.Event, list[str]], make_orchestrator: Make):
    event, _ = gate
    orchestrator = make_orchestrator()
    waiting = orchestrator.submit(replace(BEAM, seed=4))
    for _ in range(5):
        orchestrator.step()
    orchestrator.cancel(waiting)
    assert ended(orchestrator, waiting).stop_reason is StopReason.CANCELLED
    orchestrator.engine.check_drained()
    event.set()
    assert ended(orchestrator, orchestrator.submit(replace(BEAM, seed=5))).stop_reason is StopReason.FINISHED


def test_an_error_outside_fails_its_search_alone(monkeypatch: pytest.MonkeyPatch, make_orchestrator: Make):
    class Fails(PathPolicy):
        def __init__(self, context: PolicyContext) -> None:
            self._context = context

        def holds(self, expansion: Expansion) -> bool:
            self._context.call_outside(lambda: 1 // 0, lambda _: self.tree.resume(expansion))
            return True

    monkeypatch.setattr(
        tree, "make_policies", lambda context: [Fails(context)] if context.resolved.request.seed == 4 else []
    )
    orchestrator = make_orchestrator()
    names = [orchestrator.submit(replace(BEAM, seed=seed)) for seed in (4, 5)]
    reasons: dict[str, StopReason] = {}
    while orchestrator.busy:
        reasons |= {result.search_id: result.stop_reason for result in orchestrator.step()}
    assert [reasons[name] for name in names] == [StopReason.FAILED, StopReason.FINISHED]
    orchestrator.engine.check_drained()


class StopsLong(PathPolicy):
    """Ends the open paths of a round that are longer than its shortest one."""

    def __init__(self) -> None:
        self.rounds: list[list[tuple[int, ...]]] = []

    def round_ended(self, nodes: Sequence[Node]) -> None:
        self.rounds.append([node.path for node in nodes])
        shortest = min(node.path_tokens() for node in nodes)
        for node in nodes:
            if node.open and node.path_tokens() > shortest:
                node.termination = Termination.PRUNED


def test_a_policy_that_compares_a_rounds_paths_may_end_some(monkeypatch: pytest.MonkeyPatch, make_orchestrator: Make):
    policy = StopsLong()
    monkeypatch.setattr(tree, "make_policies", lambda _: [policy])
    result = run_whole(make_orchestrator(), replace(BEAM, seed=4)).results[0]
    assert isinstance(result, SearchResult)
    assert policy.rounds == [[record.path for record in each.told] for each in result.rounds]
    ended = [record.path for each in result.rounds for record in each.told if record.termination == "pruned"]
    assert ended
    assert not {path for each in result.rounds for path in each.kept} & set(ended)


def test_two_policies_may_hold_one_score(monkeypatch: pytest.MonkeyPatch, make_orchestrator: Make):
    held: list[str] = []

    class Holds(PathPolicy):
        def __init__(self, context: PolicyContext, name: str) -> None:
            self._context, self._name = context, name

        def holds_score(self, branch: Branch) -> bool:
            assert not branch.scored
            held.append(self._name)
            self._context.call_outside(lambda: None, lambda _: self.tree.score(branch))
            return True

    monkeypatch.setattr(tree, "make_policies", lambda context: [Holds(context, "first"), Holds(context, "second")])
    found = run_whole(make_orchestrator(), replace(BEAM, seed=4)).results[0]
    assert held.count("first") == held.count("second") > 0
    monkeypatch.undo()
    plain = run_whole(make_orchestrator(), replace(BEAM, seed=4)).results[0]
    assert outcome(found) == outcome(plain)


def test_a_plain_search_loads_no_policy():
    """In a process of its own: modules of policies are loaded by the searches that need them."""
    script = """
import sys
from espalier.search.solver import Solver
with Solver() as solver:
    assert solver.solve("Tom has 38 coins. (a) He finds 47 more.", beam_width=2, merge_duplicates=False).nodes
print(sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("espalier.search.growth.")))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "['endings', 'policies', 'search', 'tree']", ran.stdout
