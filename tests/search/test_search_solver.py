"""The Python entry: one load, one problem or many, and what is left when something goes wrong."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import espalier
from espalier import EspalierError, SearchRequest, SearchResult, Solver
from espalier.engine.errors import CheckpointError, InvalidRequestError, MisuseError
from espalier.engine.models.hub import locate
from espalier.search.growth.search import RunningSearch
from espalier.search.result import Event, Finished, Started

PROBLEMS = [
    f"Tom has {n} coins. (a) He finds 31 more. (b) He loses 14. How many coins does he have now?" for n in (25, 31, 46)
]
SMALL = {"beam_width": 2, "expansion": 2, "max_step_tokens": 32}


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    with Solver(kv_memory=2**28, threads=1) as solver:
        yield solver


@pytest.fixture(autouse=True)
def drained(solver: Solver) -> Iterator[None]:
    yield
    with solver.held() as orchestrator:
        assert not orchestrator.busy
        orchestrator.engine.check_drained()


def test_one_problem_is_solved_by_the_bundled_pair(solver: Solver) -> None:
    assert solver.solve(PROBLEMS[0], **SMALL).answer == "42"


def test_a_search_of_the_callers_own_is_named_by_module_and_class(
    solver: Solver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "callers_search.py").write_text(
        "from espalier.search.algorithms.independent import IndependentPaths\n"
        "class Pair(IndependentPaths):\n"
        "    scores = 'none'\n"
        "    @classmethod\n"
        "    def candidates(cls, request): return 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    one = solver.solve(PROBLEMS[0], algorithm="callers_search:Pair", **SMALL)
    (same,) = solver.solve_many(PROBLEMS[:1], algorithm="callers_search:Pair", **SMALL)
    assert sum(candidate.multiplicity for candidate in one.candidates) == 2
    assert str(one.configuration.algorithm) == "callers_search:Pair"
    assert same.candidates == one.candidates
    with pytest.raises(InvalidRequestError, match="callers_search:Triple: module 'callers_search' has no attribute"):
        solver.solve(PROBLEMS[0], algorithm="callers_search:Triple")


def test_many_problems_come_back_in_order_and_as_each_alone(solver: Solver) -> None:
    ended: list[tuple[int, int, str]] = []

    def note(done: int, total: int, result: SearchResult) -> None:
        ended.append((done, total, result.search_id))

    results = solver.solve_many(PROBLEMS, on_progress=note, **SMALL)
    alone = [solver.solve(problem, **SMALL) for problem in PROBLEMS]
    assert [result.configuration.problem for result in results] == PROBLEMS
    assert [result.best and result.best.text for result in results] == [r.best and r.best.text for r in alone]
    assert [entry[:2] for entry in ended] == [(1, 3), (2, 3), (3, 3)]
    assert {entry[2] for entry in ended} == {result.search_id for result in results}


def test_another_generator_is_not_judged_by_a_verifier_that_was_made_for_the_bundled_one(caplog) -> None:
    with Solver(str(locate("demo-generator")), kv_memory=2**28, threads=1) as alone:
        (logged,) = [line for line in caplog.messages if "no verifier is loaded" in line]
        with pytest.raises(InvalidRequestError, match="beam needs a verifier and none is loaded; verifier names"):
            alone.solve(PROBLEMS[0], algorithm="beam", **SMALL)
        for fields, algorithm in (({"beam_width": 8}, "majority"), ({"beam_width": 1}, "greedy")):
            result = alone.solve(PROBLEMS[0], **fields)
            assert result.answer == "42"
            assert result.configuration.algorithm == algorithm
            assert result.warnings == (logged,)
        assert alone.solve(PROBLEMS[0], algorithm="majority", beam_width=8).warnings == ()


def test_what_is_no_problem_is_refused_at_once(solver: Solver) -> None:
    with pytest.raises(TypeError, match="a text or a SearchRequest, not an object of the type int"):
        solver.solve(12)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="not an object of the type str; for one call solve"):
        solver.solve_many("abc")


def test_no_problems_give_no_results(solver: Solver) -> None:
    assert solver.solve_many([]) == []


def test_a_whole_request_is_taken_and_single_fields_go_over_it(solver: Solver) -> None:
    result = solver.solve(SearchRequest(PROBLEMS[0], seed=3, max_step_tokens=32), algorithm="greedy")
    assert result.configuration.seed == 3
    assert result.configuration.algorithm == "greedy"
    assert result.configuration.beam_width == 4


def test_events_are_told_while_the_search_runs(solver: Solver) -> None:
    events: list[Event] = []
    solver.solve(PROBLEMS[0], on_event=events.append, **SMALL)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"beam_with": 4}, "beam_with"), ({"algorithm": "bean"}, "algorithm"), ({"expansion": 0}, "expansion")],
)
def test_a_wrong_field_is_named(solver: Solver, fields: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        solver.solve(PROBLEMS[0], **fields)
    assert named in [violation.field for violation in raised.value.violations]


def test_one_bad_problem_of_many_starts_none_and_the_solver_goes_on(solver: Solver) -> None:
    with pytest.raises(InvalidRequestError, match="problem"):
        solver.solve_many([PROBLEMS[0], " "], **SMALL)
    assert solver.solve(PROBLEMS[0], **SMALL).answer == "42"


def test_an_error_of_the_callers_progress_ends_the_call_and_the_solver_goes_on(solver: Solver) -> None:
    def fail(done: int, total: int, result: SearchResult) -> None:
        raise LookupError(done)

    with pytest.raises(LookupError):
        solver.solve_many(PROBLEMS, on_progress=fail, **SMALL)
    assert solver.solve(PROBLEMS[0], **SMALL).answer == "42"


def test_an_error_of_the_callers_on_event_comes_out_as_it_is(solver: Solver) -> None:
    def fail(event: Event) -> None:
        raise LookupError("nobody listens")

    with pytest.raises(LookupError, match="nobody listens"):
        solver.solve(PROBLEMS[0], on_event=fail, **SMALL)


def test_a_search_that_fails_raises_alone_and_is_marked_among_others(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(search: RunningSearch) -> None:
        if search.request.problem == PROBLEMS[1]:
            raise EspalierError("no numbers")
        start(search)

    start = RunningSearch.start
    monkeypatch.setattr(RunningSearch, "start", fail)
    results = solver.solve_many(PROBLEMS, **SMALL)
    assert [result.error for result in results] == ["", "no numbers", ""]
    with pytest.raises(EspalierError, match="no numbers"):
        solver.solve(PROBLEMS[1], **SMALL)


def test_without_a_verifier_a_search_that_needs_one_is_refused() -> None:
    with Solver(verifier="", kv_memory=2**26, threads=1) as solver:
        with pytest.raises(InvalidRequestError, match="verifier"):
            solver.solve(PROBLEMS[0], **{**SMALL, "algorithm": "beam"})
        assert solver.solve(PROBLEMS[0], algorithm="majority", beam_width=2).answer == "42"


def test_a_closed_solver_says_so_and_may_be_closed_again() -> None:
    solver = Solver(kv_memory=2**26, threads=1)
    solver.close()
    solver.close()
    with pytest.raises(MisuseError, match="closed"):
        solver.solve(PROBLEMS[0])


def test_an_unknown_checkpoint_is_refused_when_the_solver_is_made() -> None:
    with pytest.raises(CheckpointError, match="no-such-model"):
        Solver("no-such-model")


def test_importing_espalier_imports_nothing_heavy_and_the_names_are_there() -> None:
    script = (
        "import sys, espalier\n"
        "from espalier import Solver, SearchRequest, SearchResult, EspalierError, __version__\n"
        "heavy = {'torch', 'numpy', 'numba', 'transformers', 'grpc'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(espalier.__all__) <= set(dir(espalier))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        _ = espalier.nothing
