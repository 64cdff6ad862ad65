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
from espalier.search.score_session import ScoreSessionRequest
from espalier.search.scores import ScoreRequest, ScoreResult, SolutionScores

if TYPE_CHECKING:
    from espalier.search.run.running import Running


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request.

    Attributes:
        empty: makes the result of a request that was not run, from the search's id, the request, the reason, and the
            error, which may be empty.
        runner: the class that runs it, a subclass of `Running`, by module and name.
    """

    empty: Callable[[str, Any, StopReason, str], AnyResult]
    runner: str

    @property
    def running(self) -> "type[Running[Any, Any]]":
        """The class that resolves and runs it."""
        return pkgutil.resolve_name(self.runner)


def _no_search(search_id: str, request: SearchRequest, reason: StopReason, why: str) -> SearchResult:
    return SearchResult(
        search_id=search_id,
        answer="",
        score=None,
        stop_reason=reason,
        best=None,
        candidates=(),
        nodes=(),
        usage=Usage(),
        configuration=request,
        digests={},
        grader="",
        error=why,
    )


def _no_completion(search_id: str, request: CompletionRequest, reason: StopReason, why: str) -> CompletionResult:
    return CompletionResult(search_id, (), (), reason, Usage(), request, why)


def _no_scores(search_id: str, request: ScoreRequest, reason: StopReason, why: str) -> ScoreResult:
    scores = tuple(SolutionScores(None, (None,) * len(steps), why) for steps in request.solutions)
    return ScoreResult(search_id, scores, reason, Usage(), request, "", {}, why)


def _no_session(search_id: str, request: ScoreSessionRequest, reason: StopReason, why: str) -> ScoreResult:
    return ScoreResult(search_id, (), reason, Usage(), request, "", {}, why)


def _no_rollout(search_id: str, request: RolloutRequest, reason: StopReason, why: str) -> RolloutResult:
    return RolloutResult(search_id, (), (), reason, Usage(), request, {}, why)


KINDS: dict[type, Kind] = {
    SearchRequest: Kind(_no_search, "espalier.search.growth.search:RunningSearch"),
    CompletionRequest: Kind(_no_completion, "espalier.search.run.completion:RunningCompletion"),
    ScoreRequest: Kind(_no_scores, "espalier.search.run.scores:RunningScores"),
    ScoreSessionRequest: Kind(_no_session, "espalier.search.run.score_session:RunningScoreSession"),
    RolloutRequest: Kind(_no_rollout, "espalier.search.run.rollout:RunningRollout"),
}
"""All kinds, by the class of their requests."""


def kind_of(request: AnyRequest) -> Kind:
    """The kind of a request."""
    return KINDS[type(request)]


def result_without(search_id: str, request: AnyRequest, reason: StopReason, why: str = "") -> AnyResult:
    """The result of a request that was not run, because of the error `why` if that is not empty."""
    return kind_of(request).empty(search_id, request, reason, why)
