"""Scores every step of many solutions: at once on the engine, or by a function of the user's."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

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
from espalier.experiments.prm_evaluation.solutions import Solution
from espalier.prm.scorer import ScoredSearch, Scorer, ScoreSession, ScoreStatus, StepScore
from espalier.prm.scorers import names_function
from espalier.prm.scorers.function import FunctionScorer
from espalier.prm.scorers.own import load_own
from espalier.search.run.load import RuntimeSettings, check_settings, load_verifier_alone
from espalier.search.tree import Node


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a solution's steps, in [0, 1]; empty if it was `refused`, which then says why."""

    unique_id: str
    scores: tuple[float, ...] = ()
    refused: str = ""


OnScored = Callable[[Scored], None]
"""Called for each solution as it is scored or refused."""
ScoreSolutions = Callable[[Sequence[Solution], OnScored], None]


@dataclass(slots=True, eq=False)
class _Running:
    solution: Solution
    session: ScoreSession
    scores: list[float] = field(default_factory=list)


def load_scoring(
    runtime: RuntimeSettings, in_flight: int, on_bytes: Callable[[int, int], None] | None = None
) -> tuple[ScoreSolutions, dict[str, str]]:
    """Load what scores solutions: a process reward model on an engine of its own, or a function of the user's.

    Returns:
        A function that scores solutions, and everything that scores depend on: the digest of the model or the function,
        what it is scored as, and a model's dtype and device.

    Raises:
        InvalidRequestError: settings are invalid.
        CheckpointError: `--verifier` names nothing that scores the steps of given texts.
    """
    if names_function(runtime.verifier):
        check_settings(runtime)
        function = load_own(runtime.verifier)
        if not isinstance(function, FunctionScorer):
            raise CheckpointError(f"--verifier {runtime.verifier}: scores the steps of searches; give a function")
        if runtime.verify_incremental:
            raise CheckpointError(
                f"--verify-incremental: {function.name} is called with whole texts; leave the flag out"
            )
        digest = function.digests.get(VERIFIER, "")
        return partial(_score_by_function, function), {"verifier": digest, "verifier_family": function.identity}
    engine, verifier = load_verifier_alone(runtime, on_bytes)
    model = engine.model(VERIFIER)
    return SolutionScorer(engine, verifier, in_flight).score, {
        "verifier": model.digest,
        "verifier_family": verifier.identity,
        "dtype": str(model.decoder.dtype),
        "device": model.decoder.device.type,
    }


def _score_by_function(scorer: FunctionScorer, solutions: Sequence[Solution], on_scored: OnScored) -> None:
    for solution in solutions:
        steps = list(solution.steps)
        scores = [scorer.score(solution.problem, steps[:end]) for end in range(1, len(steps) + 1)]
        on_scored(Scored(solution.unique_id, tuple(scores)))


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
        self._waiting: deque[tuple[int, Solution]] = deque()

    def score(self, solutions: Sequence[Solution], on_scored: OnScored) -> None:
        """Score `solutions`, calling `on_scored` for each as it is finished or refused.

        Raises:
            EspalierError: the device failed, or an incremental score differs from that of the whole text.
        """
        self._waiting, self._on_scored = deque(enumerate(solutions)), on_scored
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._in_flight:
                    self._start(*self._waiting.popleft())
                try:
                    finished = self._engine.step()
                except PartialFailureError as error:
                    self._give_up(error)
                    continue
                for owner, done in ((done.work.owner, done) for done in finished):
                    assert isinstance(owner, int)
                    if running := self._running.get(owner):
                        self._on_scores(owner, running, running.session.take(done))
        finally:
            for owner in list(self._running):
                self._end(owner)

    def _start(self, owner: int, solution: Solution) -> None:
        root = Node(0, None, ())
        try:
            prompt = self._scorer.prompt(solution.problem)
        except (RequestTooLargeError, NoEmbeddingError) as error:
            self._on_scored(Scored(solution.unique_id, refused=str(error)))
            return
        search = ScoredSearch(self._engine, owner, root, solution.problem, prompt)
        self._running[owner] = _Running(solution, self._scorer.begin(search))
        self._running[owner].session.prefill()

    def _on_scores(self, owner: int, running: _Running, scores: Iterable[StepScore]) -> None:
        steps = running.solution.steps
        for step in scores:
            if step.status is ScoreStatus.PENDING:
                continue
            node: Node = step.node
            if step.status is not ScoreStatus.SCORED:
                self._refuse(owner, f"step {node.depth} {step.reason}")
                return
            if step.score is not None:
                node.score = step.score
                running.scores.append(step.score)
            if node.depth < len(steps):
                child = Node(node.depth + 1, node, (*node.path, 0), steps[node.depth])
                self._on_scores(owner, running, running.session.want(child, in_place=True))
        if len(running.scores) == len(steps) and not running.session.pending and owner in self._running:
            self._end(owner)
            self._on_scored(Scored(running.solution.unique_id, tuple(running.scores)))

    def _give_up(self, error: PartialFailureError) -> None:
        """Refuse the solutions whose results are not numbers; put back those that found no memory."""
        owners = [owner for owner in self._running if owner in error.owners]
        if not owners or not isinstance(error, PoolExhaustedError | NumericalError):
            raise error
        if isinstance(error, PoolExhaustedError) and len(self._running) > 1:
            owner = owners[-1]
            self._waiting.appendleft((owner, self._end(owner).solution))
            self._in_flight = len(self._running)
            return
        for owner in owners:
            self._refuse(owner, str(error))

    def _refuse(self, owner: int, why: str) -> None:
        self._on_scored(Scored(self._end(owner).solution.unique_id, refused=why))

    def _end(self, owner: int) -> _Running:
        running = self._running.pop(owner)
        self._engine.abandon(owner)
        return running
