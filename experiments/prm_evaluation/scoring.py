"""Scores every step of many solutions at once on the engine."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from espalier.engine.engine import Engine
from espalier.engine.errors import (
    CheckpointError,
    NoEmbeddingError,
    NumericalError,
    PartialFailureError,
    PoolExhaustedError,
    RequestTooLargeError,
)
from espalier.engine.roles import VERIFIER
from espalier.engine.work import Done
from espalier.experiments.prm_evaluation.solutions import Solution
from espalier.prm.scorer import ScoredSearch, Scorer, ScoreSession, ScoreStatus, StepScore
from espalier.search.tree import Node


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a solution's steps, in [0, 1]; empty if it was `refused`, which then says why."""

    unique_id: str
    scores: tuple[float, ...] = ()
    refused: str = ""


@dataclass(slots=True, eq=False)
class _Running:
    solution: Solution
    session: ScoreSession
    scores: list[float] = field(default_factory=list)


class SolutionScorer:
    """Scores solutions step by step; at most `in_flight` of them hold KV memory at once.

    A solution starts with its problem, whose full blocks come from the prefix cache if another solution of it was
    scored before. Each step extends the sequence of the last one, so every token is computed once. If KV memory runs
    out, a solution is put back and fewer run at once; one that does not fit alone is refused.
    """

    def __init__(self, engine: Engine, scorer: Scorer, in_flight: int) -> None:
        """Create a scorer of solutions.

        Raises:
            CheckpointError: `scorer` scores whole answers, not steps.
        """
        if scorer.scores != "steps":
            raise CheckpointError(f"{scorer.name} scores whole answers only and has no scores of steps")
        self._scorer = scorer
        self._engine = engine
        self._in_flight = in_flight
        self._running: dict[int, _Running] = {}

    def score(self, solutions: Sequence[Solution], on_scored: Callable[[Scored], None]) -> None:
        """Score `solutions`, calling `on_scored` for each as it is finished or refused.

        Raises:
            EspalierError: the device failed, or an incremental score differs from that of the whole text.
        """
        waiting = deque(enumerate(solutions))
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._in_flight:
                    self._start(*waiting.popleft(), on_scored)
                try:
                    finished = self._engine.step()
                except PartialFailureError as error:
                    self._give_up(error, waiting, on_scored)
                    continue
                for done in finished:
                    self._take(done, on_scored)
        finally:
            for owner in list(self._running):
                self._end(owner)

    def _start(self, owner: int, solution: Solution, on_scored: Callable[[Scored], None]) -> None:
        root = Node(0, None, ())
        try:
            prompt = self._scorer.prompt(solution.problem)
        except (RequestTooLargeError, NoEmbeddingError) as error:
            on_scored(Scored(solution.unique_id, refused=str(error)))
            return
        search = ScoredSearch(self._engine, owner, root, solution.problem, prompt)
        self._running[owner] = _Running(solution, self._scorer.begin(search))
        self._running[owner].session.prefill()

    def _take(self, done: Done, on_scored: Callable[[Scored], None]) -> None:
        owner = done.work.owner
        assert isinstance(owner, int)
        if running := self._running.get(owner):
            self._on_scores(owner, running, running.session.take(done), on_scored)

    def _on_scores(
        self, owner: int, running: _Running, scores: Iterable[StepScore], on_scored: Callable[[Scored], None]
    ) -> None:
        steps = running.solution.steps
        for step in scores:
            if step.status is ScoreStatus.PENDING:
                continue
            node: Node = step.node
            if step.status is not ScoreStatus.SCORED:
                self._refuse(owner, f"step {node.depth} {step.reason}", on_scored)
                return
            if step.score is not None:
                node.score = step.score
                running.scores.append(step.score)
            if node.depth < len(steps):
                child = Node(node.depth + 1, node, (*node.path, 0), steps[node.depth])
                self._on_scores(owner, running, running.session.want(child, in_place=True), on_scored)
        if len(running.scores) == len(steps) and not running.session.pending and owner in self._running:
            self._end(owner)
            on_scored(Scored(running.solution.unique_id, tuple(running.scores)))

    def _give_up(
        self, error: PartialFailureError, waiting: deque[tuple[int, Solution]], on_scored: Callable[[Scored], None]
    ) -> None:
        """Refuse the solutions whose results are not numbers; put back those that found no memory."""
        owners = [owner for owner in self._running if owner in error.owners]
        if not owners or not isinstance(error, PoolExhaustedError | NumericalError):
            raise error
        if isinstance(error, PoolExhaustedError) and len(self._running) > 1:
            owner = owners[-1]
            waiting.appendleft((owner, self._end(owner).solution))
            self._in_flight = len(self._running)
            return
        for owner in owners:
            self._refuse(owner, str(error), on_scored)

    def _refuse(self, owner: int, why: str, on_scored: Callable[[Scored], None]) -> None:
        on_scored(Scored(self._end(owner).solution.unique_id, refused=why))

    def _end(self, owner: int) -> _Running:
        running = self._running.pop(owner)
        self._engine.abandon(owner)
        return running


def describe(engine: Engine, scorer: Scorer) -> dict[str, str]:
    """Return everything that scores depend on: the model's digest, the family, the dtype and the device."""
    model = engine.model(VERIFIER)
    decoder = model.decoder
    return {
        "verifier": model.digest,
        "verifier_family": scorer.identity,
        "dtype": str(decoder.dtype),
        "device": decoder.device.type,
    }
