"""Scores every step of many solutions: at once on the engine, or by a function of the user's."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from espalier.prm.scorer import Scorer
from espalier.prm.scorers import names_function
from espalier.prm.scorers.function import FunctionScorer
from espalier.prm.scorers.own import load_own
from espalier.search.request import DEFAULT_OPTIONS
from espalier.search.run.executor import ResolvedScores
from espalier.search.run.load import RuntimeSettings, check_settings, load_verifier_alone
from espalier.search.run.running import Host
from espalier.search.run.scores import RunningScores
from espalier.search.scores import ScoreRequest, ScoreResult


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a solution's steps, in [0, 1]; empty if it was `refused`, which then says why."""

    unique_id: str
    scores: tuple[float, ...] = ()
    refused: str = ""


OnScored = Callable[[Scored], None]
"""Called for each solution as it is scored or refused."""
ScoreSolutions = Callable[[Sequence[Solution], OnScored], None]


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

    Every token of a solution is computed once; the full blocks of its problem come from the prefix cache if another
    solution of it was scored before. If KV memory runs out, a solution is put back and fewer run at once; one that does
    not fit alone is refused.
    """

    def __init__(self, engine: Engine, scorer: Scorer, in_flight: int) -> None:
        """Create a scorer of solutions.

        Raises:
            CheckpointError: `scorer` scores whole answers, not steps.
        """
        if scorer.scores != "steps":
            raise CheckpointError(f"{scorer.name} scores whole answers only and has no scores of steps")
        self._scorer, self._engine, self._host = scorer, engine, Host(engine, scorer)
        self._in_flight = in_flight
        self._running: dict[str, RunningScores] = {}  # by id of the solution
        self._waiting: deque[Solution] = deque()

    def score(self, solutions: Sequence[Solution], on_scored: OnScored) -> None:
        """Score `solutions`, calling `on_scored` for each as it is finished or refused.

        Raises:
            EspalierError: the device failed, or an incremental score differs from that of the whole text.
        """
        self._waiting = deque(solutions)
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._in_flight:
                    try:
                        self._start(self._waiting[0])
                    except (RequestTooLargeError, NoEmbeddingError) as error:
                        on_scored(Scored(self._waiting[0].unique_id, refused=str(error)))
                    self._waiting.popleft()
                try:
                    for done in self._engine.step():
                        self._running[str(done.work.owner)].handle(done)
                except PartialFailureError as error:
                    self._give_up(error, {each.unique_id: each for each in solutions})
                for name, result in [(name, its.result) for name, its in self._running.items()]:
                    if result:
                        del self._running[name]
                        on_scored(_scored(name, result))
        finally:
            for name in self._running:
                self._engine.abandon(name)
            self._running.clear()

    def _start(self, solution: Solution) -> None:
        request, prompt = ScoreRequest(solution.problem, (solution.steps,)), self._scorer.prompt(solution.problem)
        resolved, name = ResolvedScores(request, prompt), solution.unique_id
        running = RunningScores(name, resolved, DEFAULT_OPTIONS, self._host, lambda _: None)
        self._running[name] = running
        running.start()

    def _give_up(self, error: PartialFailureError, solutions: Mapping[str, Solution]) -> None:
        """Fail the solutions whose results are not numbers; put back the last of those that found no memory."""
        names = [name for name in self._running if name in error.owners]
        if not names or not isinstance(error, PoolExhaustedError | NumericalError):
            raise error
        if isinstance(error, PoolExhaustedError) and len(self._running) > 1:
            del self._running[names[-1]]
            self._engine.abandon(names[-1])
            self._waiting.appendleft(solutions[names[-1]])
            self._in_flight = len(self._running)
            return
        for name in names:
            self._running[name].fail(error)


def _scored(name: str, result: ScoreResult) -> Scored:
    (solution,) = result.solutions
    if None in solution.step_scores:
        step = solution.step_scores.index(None) + 1
        return Scored(name, refused=result.error or f"step {step} {solution.reason}")
    return Scored(name, tuple(score for score in solution.step_scores if score is not None))
