"""The Python API of a verifier alone: load it once, then score solutions, whole or step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, Unpack

from espalier.engine.errors import EspalierError, MisuseError
from espalier.search.python_names import python_names
from espalier.search.request import SubmitOptions
from espalier.search.result import Finished
from espalier.search.run.executor import AnyEvent
from espalier.search.run.executor_loop import SharedExecutor
from espalier.search.run.load import load_scoring_orchestrator
from espalier.search.run.settings import RuntimeSettings, SolverSettings
from espalier.search.schema import from_values
from espalier.search.score_session import (
    ROOT,
    NodeScore,
    OpenNodes,
    ScoreSessionRequest,
    SessionTurn,
    StepsScored,
    unscored,
)
from espalier.search.scores import ScoreRequest, ScoreResult, make_score_request

if TYPE_CHECKING:
    from espalier.search.run.orchestrator import Orchestrator


class Scorer:
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
        device: str = "auto",
        dtype: str = "auto",
        kv_memory: int | str | None = None,
        max_running: int = 64,
        on_bytes: Callable[[int, int], None] | None = None,
        **settings: Unpack[SolverSettings],
    ) -> None:
        """Load the verifier; arguments and errors are those of `Solver`.

        Raises:
            CheckpointError: it scores no given texts, as a function or a trunk head.
        """
        given = {"verifier": verifier, "device": device, "dtype": dtype, "kv_memory": kv_memory}
        named = {name: value for name, value in given.items() if value is not None}
        runtime = from_values(RuntimeSettings, {**named, "max_running": max_running, **settings})
        orchestrator, self.verifier = load_scoring_orchestrator(runtime, on_bytes)
        self._shared = SharedExecutor(orchestrator, "scorer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @python_names()
    def score(self, request: ScoreRequest | str, steps: Iterable[str] | Iterable[Iterable[str]] = ()) -> ScoreResult:
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
        with self._shared.held() as orchestrator:
            orchestrator.submit(make_score_request(request, steps), ended.append)
            self._shared.step_until(lambda: bool(ended))
        result: ScoreResult = ended[0].result
        if result.error:
            raise EspalierError(result.error)
        return result

    @python_names()
    def session(self, request: ScoreSessionRequest | str, **fields: Any) -> LocalScoreSession:
        """Open a session, to which steps come one after another.

        Args:
            request: the problem and the session's limits, or the problem's text.
            **fields: fields of `ScoreSessionRequest`, such as `max_nodes=1024`, for a problem's text.

        Raises:
            InvalidRequestError, RequestTooLargeError: see `score`.
        """
        if isinstance(request, str):
            request = from_values(ScoreSessionRequest, {"problem": request, **fields})
        return LocalScoreSession(self._shared, request)

    def close(self) -> None:
        """End open sessions and release the model; closing twice is allowed."""
        self._shared.close()


class LocalScoreSession:
    """A session of scores in this process: steps come by the node that they continue, and get nodes and scores.

    Call `close`, or use it as a context manager. Its limits are those of `ScoreSessionRequest`.

    Attributes:
        result: what the session has cost; None until it has ended.
    """

    def __init__(self, shared: SharedExecutor[Orchestrator], request: ScoreSessionRequest) -> None:
        self.result: ScoreResult | None = None
        self._shared = shared
        self._nodes = OpenNodes()
        self._scores: dict[int, NodeScore] = {}
        with shared.held() as orchestrator:
            self._name = orchestrator.submit(request, self._on_event, SubmitOptions(report_nodes=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, text: str, parent: int = ROOT) -> NodeScore:
        """Score one step that continues `parent`, by default the problem; see `score_many`."""
        return self.score_many([(parent, text)])[0]

    def score_many(self, steps: Iterable[tuple[int, str]]) -> list[NodeScore]:
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

    def close(self) -> ScoreResult:
        """End the session and return what it has cost; closing twice is allowed."""
        if self.result is None:
            self._run(SessionTurn(last=True), lambda: self.result is not None)
        assert self.result
        return self.result

    def _tell(self, turn: SessionTurn) -> None:
        if self.result is not None:
            raise MisuseError(f"the session has ended: {self.result.stop_reason}; open a new one")
        names = [step.node for step in turn.steps]
        self._run(turn, lambda: self.result is not None or all(name in self._scores for name in names))
        if (result := self.result) is not None:
            if result.error:
                raise EspalierError(result.error)
            self._scores |= {name: unscored(name, result.stop_reason) for name in names if name not in self._scores}

    def _run(self, turn: SessionTurn, until: Callable[[], bool]) -> None:
        with self._shared.held() as orchestrator:
            orchestrator.tell(self._name, turn)
            self._shared.step_until(until)

    def _on_event(self, event: AnyEvent) -> None:
        if isinstance(event, StepsScored):
            self._scores |= {each.node: each for each in event.scores}
        elif isinstance(event, Finished):
            assert isinstance(event.result, ScoreResult)
            self.result = event.result
