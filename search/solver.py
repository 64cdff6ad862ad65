"""The Python API: load models into this process once, then solve problems, or score steps with a verifier alone."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self, Unpack

from espalier.engine.errors import EspalierError, InvalidRequestError, MisuseError
from espalier.search import scores
from espalier.search.algorithms import unscored_default
from espalier.search.request import SearchFields, SearchRequest, SubmitOptions, make_request, several, with_own_code
from espalier.search.result import Event, Finished, SearchResult
from espalier.search.run.settings import RuntimeSettings, SolverSettings
from espalier.search.schema import declared, from_values

if TYPE_CHECKING:
    from espalier.prm.scorer import Scorer as StepScorer
    from espalier.prm.scorers.own import ScoreFunction
    from espalier.search.run.executor import AnyEvent
    from espalier.search.run.orchestrator import Orchestrator

log = logging.getLogger("espalier.search")

_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]*[a-z]|-[A-Za-z])(?![\w-])")


@cache
def _arguments() -> dict[str, str]:
    """Names of arguments by the long and short flags of the same fields."""
    fields = [field for kind in (RuntimeSettings, SearchRequest) for field in declared(kind) if field.option]
    return {flag: f.name for f in fields for flag in (f.flag, f.option.short if f.option else "") if flag}


def in_python(text: str) -> str:
    """A message with the names of arguments for the flags of the same fields."""
    return _FLAG.sub(lambda match: _arguments().get(match[0], match[0]), text)


@contextmanager
def python_names() -> Iterator[None]:
    """Raise the errors of the block with the names of arguments for flags."""
    try:
        yield
    except EspalierError as error:
        error.args = tuple(in_python(value) if isinstance(value, str) else value for value in error.args)
        if isinstance(error, InvalidRequestError):
            error.violations = [replace(v, description=in_python(v.description)) for v in error.violations]
        raise


OnProgress = Callable[[int, int, SearchResult], None]
"""Called with the number of finished searches, the number of all searches, and the result that just arrived."""


class _Loaded:
    """Models in this process, which run while somebody waits for them: one thread at a time; a context manager."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator: Orchestrator | None = orchestrator
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all that runs and release the models; closing twice is allowed."""
        with self._lock:
            if self._orchestrator is not None:
                self._orchestrator.close()
                self._orchestrator = None

    @contextmanager
    def held(self) -> Iterator[Orchestrator]:
        """The orchestrator, for this thread alone.

        Raises:
            MisuseError: it is closed.
        """
        with self._lock:
            if self._orchestrator is None:
                raise MisuseError(f"the {type(self).__name__.lower()} is closed; create a new one")
            yield self._orchestrator

    @contextmanager
    def stepped(self) -> Iterator[Orchestrator]:
        """The same; an exception ends all that runs on it, and new work can be submitted afterwards."""
        with self.held() as orchestrator:
            try:
                yield orchestrator
            except BaseException:
                orchestrator.close()
                raise

    def step_until(self, done: Callable[[], bool]) -> None:
        """Run until something is `done`."""
        with self.stepped() as orchestrator:
            while not done():
                orchestrator.step()


def _settings(named: dict[str, Any], settings: SolverSettings) -> RuntimeSettings:
    """Settings from arguments, of which None takes the default."""
    return from_values(RuntimeSettings, {name: value for name, value in named.items() if value is not None} | settings)


class Solver(_Loaded):
    """A generator and a verifier on one engine.

    Call `close`, or use it as a context manager. Thread-safe, but concurrent calls run one after the other; use
    `solve_many` to run searches concurrently.

    Answers that are not plain numbers are compared by math-verify in child processes, which do not import the script.

    Example:
        problem = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
        with Solver() as solver:
            print(solver.solve(problem).answer)
    """

    @python_names()
    def __init__(
        self,
        generator: str | None = None,
        verifier: str | StepScorer | ScoreFunction | None = None,
        *,
        on_bytes: Callable[[int, int], None] | None = None,
        **settings: Unpack[SolverSettings],
    ) -> None:
        """Load both models.

        Args:
            generator: a folder, a Hugging Face id (`org/name` or `org/name@revision`) or a registered name; None loads
                the bundled generator.
            verifier: the process reward model, named the same way, or the folder of a trunk head, `self`, `confidence`
                or `lowest-confidence`; or a function of yours, which takes a problem and the steps of a path and
                returns the score of the last one, from 0 to 1, or a `Scorer`, or the `MODULE:NAME` of either. "" loads
                none.
                None loads the bundled one with the bundled generator, else none: searches that need one are then
                refused, and the default is majority, greedy for a single path, of which a logged line tells.
            on_bytes: called during loading with the bytes of weights loaded so far and the total.
            **settings: other fields of `RuntimeSettings`, such as `device="cuda:1"`, `dtype="bfloat16"`,
                `kv_memory="4G"`, the size of the KV pool, or `max_running=8`, the searches that run at once.

        Raises:
            CheckpointError: a checkpoint is missing, unsupported or incomplete, or the device is not available.
            InvalidRequestError: a setting is unknown or invalid.
        """
        name, own = (verifier, None) if verifier is None or isinstance(verifier, str) else ("", verifier)
        runtime = _settings({"generator": generator, "verifier": name}, settings)
        from espalier.search.run.load import load_orchestrator  # imports torch

        super().__init__(load_orchestrator(runtime, on_bytes, own))
        with self.held() as orchestrator:
            if orchestrator.defaults.scores == "none":
                log.warning("%s", in_python(unscored_default()))

    @python_names()
    def solve(
        self,
        problem: str | SearchRequest,
        *,
        on_event: Callable[[Event], None] | None = None,
        **request: Unpack[SearchFields],
    ) -> SearchResult:
        """Search for the answer to one problem.

        Args:
            problem: the problem's text, or a `SearchRequest`.
            on_event: called with each event: start, steps, complete candidates, result.
            **request: fields of `SearchRequest`, such as `algorithm="dvts", beam_width=4, expansion=4, seed=7`.

        Raises:
            InvalidRequestError: lists every invalid field.
            RequestTooLargeError: the search cannot fit into a model's context or the KV pool.
            EspalierError: the search failed; the message says why.
        """
        (result,) = self._run([make_request(problem, with_own_code(request))], on_event, None)
        if result.error:
            raise EspalierError(result.error)
        return result

    @python_names()
    def solve_many(
        self,
        problems: Iterable[str | SearchRequest],
        *,
        on_progress: OnProgress | None = None,
        **request: Unpack[SearchFields],
    ) -> list[SearchResult]:
        """Search for the answers to many problems concurrently.

        Time limits count from the start of each search.

        Args:
            problems: texts, or `SearchRequest`s.
            on_progress: called when a search finishes.
            **request: fields of `SearchRequest`, applied to all.

        Returns:
            The results, in the order of `problems`. A failed search has its reason in `error` and does not stop the
            others.

        Raises:
            TypeError: `problems` is a single problem, or holds what is none.
            InvalidRequestError: a request is invalid; no search has started.
            RequestTooLargeError: a search cannot fit; no search has started.
        """
        fields = with_own_code(request)
        return self._run([make_request(problem, fields) for problem in several(problems)], None, on_progress)

    def _run(
        self,
        requests: list[SearchRequest],
        on_event: Callable[[Event], None] | None,
        on_progress: OnProgress | None,
    ) -> list[SearchResult]:
        ended: dict[str, SearchResult] = {}
        faults: list[Exception] = []

        def tell(event: Any) -> None:  # an `Event`, as all these are searches
            try:
                if on_event:
                    on_event(event)
            except Exception as error:  # of the caller's callback: raised below, the search itself is fine
                faults.append(error)

        with self.stepped() as orchestrator:
            options = SubmitOptions(timed_from_start=True)
            order = [orchestrator.submit(request, tell, options) for request in requests]
            while len(ended) < len(order):
                for result in orchestrator.step():
                    assert isinstance(result, SearchResult)
                    if result.error or result.warnings:
                        warnings = tuple(map(in_python, result.warnings))
                        result = replace(result, error=in_python(result.error), warnings=warnings)
                    ended[result.search_id] = result
                    if on_progress:
                        on_progress(len(ended), len(order), result)
                if faults:
                    raise faults[0]
            return [ended[search_id] for search_id in order]


class Scorer(_Loaded):
    """A process reward model on an engine of its own.

    Call `close`, or use it as a context manager. Thread-safe, but concurrent calls run one after the other.

    Attributes:
        verifier: the scorer, with its family.

    Example:
        problem = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
        with Scorer("demo-verifier") as scorer:
            print(scorer.score(problem, ["38+47=85", "85-12=73"]).solutions[0].step_scores)
    """

    @python_names()
    def __init__(
        self,
        verifier: str = "demo-verifier",
        *,
        on_bytes: Callable[[int, int], None] | None = None,
        **settings: Unpack[SolverSettings],
    ) -> None:
        """Load the verifier; arguments and errors are those of `Solver`.

        Raises:
            CheckpointError: it scores no given texts, as a function or a trunk head.
        """
        runtime = _settings({"verifier": verifier}, settings)
        from espalier.search.run.load import load_scoring_orchestrator  # imports torch

        orchestrator, self.verifier = load_scoring_orchestrator(runtime, on_bytes)
        super().__init__(orchestrator)

    @python_names()
    def score(
        self, request: scores.ScoreRequest | str, steps: Iterable[str] | Iterable[Iterable[str]] = ()
    ) -> scores.ScoreResult:
        """Score the steps of given solutions; steps that solutions begin with together are read once.

        Args:
            request: the problem, the solutions and how to score them, or the problem's text.
            steps: the steps of one solution or of several, unless `request` has them.

        Raises:
            InvalidRequestError: lists every invalid field.
            RequestTooLargeError: the solutions cannot fit into the verifier's context or the KV pool.
            EspalierError: the verifier failed; the message says why.
        """
        ended: list[Any] = []
        with self.held() as orchestrator:
            orchestrator.submit(scores.make_score_request(request, steps), ended.append)
            self.step_until(lambda: bool(ended))
        result: scores.ScoreResult = ended[0].result
        if result.error:
            raise EspalierError(result.error)
        return result

    @python_names()
    def session(self, request: scores.ScoreSessionRequest | str, **fields: Any) -> LocalScoreSession:
        """Open a session, to which steps come one after another.

        Args:
            request: the problem and the session's limits, or the problem's text.
            **fields: fields of `ScoreSessionRequest`, such as `max_nodes=1024`, for a problem's text.

        Raises:
            InvalidRequestError, RequestTooLargeError: see `score`.
        """
        if isinstance(request, str):
            request = from_values(scores.ScoreSessionRequest, {"problem": request, **fields})
        return LocalScoreSession(self, request)


class LocalScoreSession:
    """A session of scores in this process: steps come by the node that they continue, and get nodes and scores.

    Call `close`, or use it as a context manager. Its limits are those of `ScoreSessionRequest`.

    Attributes:
        result: what the session has cost; None until it has ended.
    """

    def __init__(self, scorer: Scorer, request: scores.ScoreSessionRequest) -> None:
        self.result: scores.ScoreResult | None = None
        self._scorer = scorer
        self._nodes = scores.OpenNodes()
        self._scores: dict[int, scores.NodeScore] = {}
        with scorer.held() as orchestrator:
            self._name = orchestrator.submit(request, self._on_event, SubmitOptions(report_nodes=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, text: str, parent: int = scores.ROOT) -> scores.NodeScore:
        """Score one step that continues `parent`, by default the problem; see `score_many`."""
        return self.score_many([(parent, text)])[0]

    def score_many(self, steps: Iterable[tuple[int, str]]) -> list[scores.NodeScore]:
        """Score steps, computed together.

        Args:
            steps: the node that each step continues, 0 for the problem, and the step's text.

        Returns:
            For each step its node and its score, or the reason why it has none.

        Raises:
            InvalidRequestError: a node is unknown or was released, or a text is empty.
            MisuseError: the session was closed.
            EspalierError: the verifier failed; the message says why.
        """
        turn = self._nodes.turn(steps)
        self._tell(turn)
        return [self._scores.pop(step.node) for step in turn.steps]

    def release(self, *nodes: int) -> None:
        """Release nodes that no further step continues; steps below them stay."""
        self._tell(self._nodes.turn(release=nodes))

    def close(self) -> scores.ScoreResult:
        """End the session and return what it has cost; closing twice is allowed."""
        if self.result is None:
            self._run(scores.SessionTurn(last=True), lambda: self.result is not None)
        assert self.result
        return self.result

    def _tell(self, turn: scores.SessionTurn) -> None:
        if self.result is not None:
            raise MisuseError(f"the session has ended: {self.result.stop_reason}; open a new one")
        names = [step.node for step in turn.steps]
        self._run(turn, lambda: self.result is not None or all(name in self._scores for name in names))
        if (result := self.result) is not None:
            if result.error:
                raise EspalierError(result.error)
            self._scores |= {
                name: scores.unscored(name, result.stop_reason) for name in names if name not in self._scores
            }

    def _run(self, turn: scores.SessionTurn, until: Callable[[], bool]) -> None:
        with self._scorer.held() as orchestrator:
            orchestrator.tell(self._name, turn)
            self._scorer.step_until(until)

    def _on_event(self, event: AnyEvent) -> None:
        if isinstance(event, scores.StepsScored):
            self._scores |= {each.node: each for each in event.scores}
        elif isinstance(event, Finished):
            assert isinstance(event.result, scores.ScoreResult)
            self.result = event.result
