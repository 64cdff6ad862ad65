"""The kinds of requests that an orchestrator runs, each registered once.

A kind is its request and result (`search/`), the result of one that was not run, and the class that resolves and runs
it. That class is imported as late as it is needed, so that a server can handle signals before it loads anything.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from espalier.search.completion import CompletionRequest, CompletionResult
from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult, StopReason, Usage
from espalier.search.rollout import RolloutRequest, RolloutResult
from espalier.search.run.executor import AnyRequest, AnyResult
from espalier.search.scores import ScoreRequest, ScoreResult, ScoreSessionRequest, SolutionScores

if TYPE_CHECKING:
    from espalier.search.run.running import Running


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request.

    Attributes:
        result: the class of its results.
        runner: the class that runs it, a subclass of `Running`, by module and name.
        empty: makes the fields that only results of this kind have of a request that was not run, and of the reason.
    """

    result: type[Any]
    runner: str
    empty: Callable[[Any, str], dict[str, Any]]

    @property
    def running(self) -> "type[Running[Any, Any]]":
        """The class that resolves and runs it."""
        return pkgutil.resolve_name(self.runner)


def _no_search(request: SearchRequest, why: str) -> dict[str, Any]:
    no_answer = {"answer": "", "score": None, "best": None, "grader": ""}
    return {**no_answer, "candidates": (), "nodes": (), "digests": {}}


def _no_scores(request: ScoreRequest | ScoreSessionRequest, why: str) -> dict[str, Any]:
    solutions = request.solutions if isinstance(request, ScoreRequest) else ()
    scores = tuple(SolutionScores(None, (None,) * len(steps), why) for steps in solutions)
    return {"solutions": scores, "scorer": "", "digests": {}}


KINDS: dict[type, Kind] = {
    SearchRequest: Kind(SearchResult, "espalier.search.growth.search:RunningSearch", _no_search),
    CompletionRequest: Kind(
        CompletionResult,
        "espalier.search.run.completion:RunningCompletion",
        lambda request, why: {"prompts": (), "choices": ()},
    ),
    ScoreRequest: Kind(ScoreResult, "espalier.search.run.scores:RunningScores", _no_scores),
    ScoreSessionRequest: Kind(ScoreResult, "espalier.search.run.scores:RunningScoreSession", _no_scores),
    RolloutRequest: Kind(
        RolloutResult,
        "espalier.search.run.rollout:RunningRollout",
        lambda request, why: {"prompt_token_ids": (), "steps": (), "digests": {}},
    ),
}
"""All kinds, by the class of their requests."""


def result_without(search_id: str, request: AnyRequest, reason: StopReason, why: str = "") -> AnyResult:
    """The result of a request that was not run, because of the error `why` if that is not empty."""
    kind = KINDS[type(request)]
    of_request = {"search_id": search_id, "configuration": request, **kind.empty(request, why)}
    return kind.result(**of_request, stop_reason=reason, usage=Usage(), error=why)
