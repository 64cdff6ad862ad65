"""A fault at any place where work comes back, of any kind of request and scorer, ends the request it was met for alone.

Requests run together on one engine; some of them meet a fault: a method of theirs raises, once, at its n-th call. Each
of these fails with a reason, all others end as without faults, and the engine goes on.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paths import PROBLEM
from trunk_heads import write_head

from espalier.engine.errors import EspalierError, NumericalError, StepError
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Done
from espalier.prm.scorer import ScoredSearch, Scorer, ScoreSession, StepNode, StepScore
from espalier.search.completion import CompletionRequest
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest, SubmitOptions
from espalier.search.result import StopReason
from espalier.search.rollout import Labels, RolloutRequest
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.scores import ScoreRequest, ScoreSessionRequest, SessionStep, SessionTurn

ERRORS = (
    RuntimeError("secret"),
    KeyError("secret"),
    AssertionError("secret"),
    MemoryError("secret"),
    EspalierError("?"),
)
PLACES = {
    "": (
        "handle", "report_growth", "_begin", "_on_event", "end", "_end_round", "_on_generated", "_on_scores",
        "_on_step",
    ),
    "_tree": (
        "open", "begin_round", "handle", "footprint", "end_round", "keep", "steps", "sequences",
        "_on_generated", "_on_scoring", "_on_scores", "_settle", "_on_complete", "_add", "_on_probed",
    ),
    "_algorithm": ("ask", "tell", "finished", "kept"),
    "session": ("prefill", "score_sampled", "want", "skip", "take", "_want", "_skip", "_take", "release", "sequences"),
    "engine": ("step",),
}  # fmt: skip
"""Methods that are called as work comes back, by the attribute of a running request that has them."""


@dataclass
class Fault:
    """An error to raise at the n-th call, from 0, of a method of one request."""

    place: str
    method: str
    number: int
    error: Exception
    fired: bool = False

    def meet(self) -> None:
        """Raise if this is the call."""
        self.number -= 1
        if self.number < 0 and not self.fired:
            self.fired = True
            raise self.error

    def put_into(self, target: Any) -> None:
        """Have a method of `target` meet the fault."""
        if (method := getattr(target, self.method, None)) is None:
            return

        def instead(*args: Any, **named: Any) -> Any:
            self.meet()
            return method(*args, **named)

        setattr(target, self.method, instead)


class Halving(Scorer):
    """A user's own scorer that knows the score of a step only after that of the step behind it."""

    name = "halving"

    def begin(self, search: ScoredSearch) -> ScoreSession:
        """See `Scorer`."""
        return HalvingSession()


class HalvingSession(ScoreSession):
    """Its session."""

    def want(self, node: StepNode, in_place: bool = False) -> Iterator[StepScore]:
        """See `ScoreSession`."""
        yield StepScore(node, 0.5 ** len(node.lineage()))


SMALL = {"beam_width": 3, "expansion": 2, "max_steps": 4, "max_tokens": 40, "max_step_tokens": 12}
STEPS = ("38+47=85\n\n", "Then he loses 12.\n\n", "\\boxed{73}")


def requests(seed: int) -> list[Any]:
    """Requests of every kind."""
    search = partial(SearchRequest, **SMALL, seed=seed)
    aggregation = list(Aggregation)[seed % len(Aggregation)]
    return [
        *(search(f"{PROBLEM} {seed}", name, aggregation=aggregation) for name in ("best-of-n", "majority", "beam")),
        replace(search(PROBLEM, AlgorithmName.MCTS), simulations=3),
        replace(search(PROBLEM, AlgorithmName.LOOKAHEAD), beam_width=2, lookahead_steps=1),
        search(PROBLEM, AlgorithmName.ADAPTIVE, aggregation=aggregation),
        CompletionRequest((PROBLEM, "Then"), samples=2, temperature=1.0, max_tokens=20, seed=seed, stop=("7",)),
        CompletionRequest(((40, 41, 42),), temperature=0.0, max_tokens=4, echo=True, logprobs=1),
        ScoreRequest(f"{PROBLEM} {seed}", (STEPS, STEPS[1:])),
        ScoreSessionRequest(f"{PROBLEM} {seed}", max_nodes=16, max_tokens=512),
        RolloutRequest(
            problem=PROBLEM, solutions=3, labels=Labels.MONTE_CARLO, continuations=2, max_tokens=30, seed=seed
        ),
    ]


@dataclass
class Stream:
    """Requests on one orchestrator, together; with what each comes to without faults."""

    orchestrator: Orchestrator
    expected: list[Any] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._faults: dict[str, Fault] = {}
        submit, begin, step = self.orchestrator.submit, None, self.orchestrator.engine.step
        scorer = self.orchestrator._scorer

        def submitted(*given: Any, **options: Any) -> str:
            search_id = submit(*given, **options)
            running: Any = self.orchestrator._searches[search_id]
            if fault := self._faults.get(search_id):
                if fault.place in ("", "_algorithm"):
                    fault.put_into(getattr(running, fault.place, None) if fault.place else running)
                elif fault.place == "_tree" and hasattr(running, "_tree"):
                    begins = running._begin
                    if running._tree:
                        fault.put_into(running._tree)
                    else:  # of rollouts: there once it has begun
                        running._begin = lambda: (begins(), fault.put_into(running._tree))
            return search_id

        def begun(search: ScoredSearch) -> ScoreSession:
            assert begin
            session = begin(search)
            if (fault := self._faults.get(str(search.owner))) and fault.place == "session":
                fault.put_into(session)
            return session

        def stepped() -> list[Done]:
            for owner, fault in self._faults.items():
                search = self.orchestrator._searches.get(owner)
                if fault.place == "engine" and search and not search.released:
                    kind = NumericalError if fault.number % 2 else StepError
                    fault.error = kind(GENERATOR, frozenset({owner}))
                    fault.meet()
            return step()

        self.orchestrator.submit, self.orchestrator.engine.step = submitted, stepped
        if scorer:
            begin, scorer.begin = scorer.begin, begun
        kinds = [request for seed in (1, 2) for request in requests(seed)]
        self.requests = [request for request in kinds if self._is_taken(request)]
        self.expected = [outcome(result) for result in self.run({})]

    def _is_taken(self, request: Any) -> bool:
        try:
            self.orchestrator.check(request)
        except EspalierError:  # of a scorer that reads no given texts
            return False
        return True

    def run(self, faults: dict[int, Fault]) -> list[Any]:
        """Run all requests together, some with a fault, by their place; returns their results in order."""
        orchestrator, names = self.orchestrator, [f"search-{i}" for i in range(len(self.requests))]
        self._faults = {names[i]: fault for i, fault in faults.items()}
        for name, request in zip(names, self.requests, strict=True):
            orchestrator.submit(request, options=SubmitOptions(report_nodes=True), search_id=name)
            if isinstance(request, ScoreSessionRequest):
                steps = [SessionStep(1, 0, STEPS[0]), SessionStep(2, 1, STEPS[1]), SessionStep(3, 1, STEPS[2])]
                orchestrator.tell(name, SessionTurn(tuple(steps)))
                orchestrator.tell(name, SessionTurn((SessionStep(4, 2, STEPS[2]),), (3,), last=True))
        ended: dict[str, Any] = {}
        for _ in range(10_000):
            if not orchestrator.busy:
                break
            ended |= {result.search_id: result for result in orchestrator.step()}
        orchestrator.engine.check_drained()
        return [ended[name] for name in names]


def outcome(result: Any) -> Any:
    """What a request comes to, whatever else runs."""
    found = result.to_dict() if hasattr(result, "to_dict") else vars_of(result)
    for key in ("search_id", "usage", "rounds", "digests", "models"):
        found.pop(key, None)
    if nodes := found.get("nodes"):  # in the order in which they were made
        found["nodes"] = sorted(({**node, "id": 0} for node in nodes), key=lambda node: node["path"])
        found["candidates"] = [{**each, "node_id": 0} for each in found["candidates"]]
        found["best"] = found["best"] and {**found["best"], "node_id": 0}
    return found


def vars_of(result: Any) -> dict[str, Any]:
    """The fields of a result."""
    return {name: getattr(result, name) for name in type(result).__dataclass_fields__}


def expect_the_others_unharmed(stream: Stream, count: int, seed: int) -> int:
    """Run requests with `count` faults at random places; returns how many were met."""
    chance, met, places = random.Random(seed), 0, [(place, m) for place, methods in PLACES.items() for m in methods]
    while met < count:
        victims = chance.sample(range(len(stream.requests)), len(stream.requests) // 2)
        faults = {
            victim: Fault(*chance.choice(places), chance.choice((0, 0, 1, 3)), chance.choice(ERRORS))
            for victim in victims
        }
        for i, (result, expected) in enumerate(zip(stream.run(faults), stream.expected, strict=True)):
            fault = faults.get(i)
            if fault and fault.fired:
                met += 1
                assert result.stop_reason is StopReason.FAILED, fault
                assert result.error, fault
                assert "secret" not in result.error
            else:
                assert outcome(result) == expected, (i, faults)
    return met


SCORERS = {
    "none": {},
    "self": {"verifier": "self"},
    "self judge": {"generator": "judge", "verifier": "self", "verifier_family": "judge"},
    "confidence": {"verifier": "confidence"},
    "own": {},
    "trunk-head": {},
    **{
        name: {"verifier": name, "verifier_family": name}
        for name in (
            "yes-no", "qwen2.5-math-prm", "universal-prm", "thinkprm", "likelihood-ratio", "outcome", "math-shepherd",
        )
    },
}  # fmt: skip


@pytest.fixture
def make_stream(family_folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Stream]:
    """Makes a stream of requests by the name of a scorer."""

    def make(name: str) -> Stream:
        named = {"generator": "yes-no", "verifier": "", **SCORERS[name]}
        folders = {
            key: str(family_folders.get(value, value)) for key, value in named.items() if key != "verifier_family"
        }
        named = {**named, **folders}
        settings = RuntimeSettings(**named, kv_memory=2**24, system_prompt="")
        if name == "trunk-head":
            model = load_orchestrator(settings).engine.model(GENERATOR)
            folder = write_head(tmp_path / "head", model.digest, model.config.hidden_size, layers=1)
            settings = replace(settings, verifier=str(folder))
        return Stream(load_orchestrator(settings, own_scorer=Halving() if name == "own" else None))

    return make


@pytest.mark.parametrize("name", ["self", "none", "likelihood-ratio"])
def test_a_fault_ends_the_request_it_is_met_for_alone(name: str, make_stream: Callable[[str], Stream]):
    assert expect_the_others_unharmed(make_stream(name), 12, seed=1) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORERS)
def test_of_two_thousand_faults_each_ends_the_request_it_is_met_for_alone(
    name: str, make_stream: Callable[[str], Stream]
):
    assert expect_the_others_unharmed(make_stream(name), -(-2000 // len(SCORERS)), seed=2) * len(SCORERS) >= 2000
