"""Scores every step of many solutions at once on the engine."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from espalier.engine.errors import (
    CheckpointError,
    NoEmbeddingError,
    NumericalError,
    PartialFailureError,
    PoolExhaustedError,
    RequestTooLargeError,
)
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.roles import VERIFIER
from espalier.engine.work import Done
from espalier.experiments.prm_evaluation.solutions import Solution
from espalier.prm.generative import GenerativeVerification
from espalier.prm.verifier import Verification, Verifier

_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a solution's steps, in [0, 1]; empty if it was `refused`, which then says why."""

    unique_id: str
    scores: tuple[float, ...] = ()
    refused: str = ""


@dataclass(slots=True, eq=False)
class _Running:
    solution: Solution
    verification: Verification | GenerativeVerification
    sequence: KVSequence
    scores: list[float] = field(default_factory=list)


class SolutionScorer:
    """Scores solutions step by step; at most `in_flight` of them hold KV memory at once.

    A solution starts with its problem, whose full blocks come from the prefix cache if another solution of it was
    scored before. Each step extends the sequence of the last one, so every token is computed once. If KV memory runs
    out, a solution is put back and fewer run at once; one that does not fit alone is refused.
    """

    def __init__(self, verifier: Verifier, in_flight: int) -> None:
        """Create a scorer.

        Raises:
            CheckpointError: the verifier's family scores whole answers, not steps.
        """
        if verifier.family.info.whole_answers:
            raise CheckpointError(f"{verifier.family.name} scores whole answers only and has no scores of steps")
        self._verifier = verifier
        self._engine = verifier.engine
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
        try:
            verification = self._verifier.begin(owner, solution.problem, self._verifier.prompt_ids(solution.problem))
        except (RequestTooLargeError, NoEmbeddingError) as error:
            on_scored(Scored(solution.unique_id, refused=str(error)))
            return
        self._running[owner] = _Running(solution, verification, verification.root)
        try:
            verification.prefill()
        except NoEmbeddingError as error:
            self._refuse(owner, str(error), on_scored)

    def _take(self, done: Done, on_scored: Callable[[Scored], None]) -> None:
        owner = done.work.owner
        assert isinstance(owner, int)
        running = self._running.get(owner)
        if running is None or (verdict := running.verification.take(done)) is None:
            return
        if verdict.score is not None:
            running.scores.append(verdict.score)
        if len(running.scores) == len(running.solution.steps):
            self._end(owner)
            on_scored(Scored(running.solution.unique_id, tuple(running.scores)))
        else:
            self._next_step(owner, running, on_scored)

    def _next_step(self, owner: int, running: _Running, on_scored: Callable[[Scored], None]) -> None:
        family, number = self._verifier.family, len(running.scores) + 1
        room = family.context - self._engine.length(running.sequence)
        if isinstance(running.verification, GenerativeVerification):
            room = _UNLIMITED  # its rationales use sequences of their own
        before = running.scores[-1] if running.scores else None
        try:
            steps = running.solution.steps[:number]
            scoring = running.verification.score(running.sequence, steps, room, in_place=True, before=before)
        except NoEmbeddingError as error:
            self._refuse(owner, str(error), on_scored)
            return
        if scoring is None:
            why = f"step {number} goes beyond the verifier's context of {family.context} tokens"
            self._refuse(owner, why, on_scored)
        else:
            running.sequence = scoring.sequence

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


def describe(verifier: Verifier) -> dict[str, str]:
    """What scores depend on: the model's digest, the family, the dtype and the device."""
    model = verifier.engine.model(VERIFIER)
    decoder = model.decoder
    return {
        "verifier": model.digest,
        "verifier_family": verifier.family.identity,
        "dtype": str(decoder.dtype),
        "device": decoder.device.type,
    }
