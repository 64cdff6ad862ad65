"""Incremental verification: a node's verifier sequence is its parent's plus the node's step."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, RequestTooLargeError
from espalier.engine.memory.sequences import Sequence
from espalier.engine.scheduling.role_policy import VERIFIER
from espalier.engine.work import Done, Score, Scored
from espalier.prm.base import PrmFamily, Scoring, ScoringInput, StepPath, Verdict
from espalier.prm.full_rescore import Check
from espalier.prm.generative import GenerativeVerification, GenerativeVerifier


class Verifier:
    """Scores steps through an engine, each step's tokens exactly once.

    Attributes:
        family: how the model reads.
        full_rescore: whether every score is also computed from the whole text, and must be the same.
        reopened: how often a path's tokens did not begin with its parent's and were computed anew.
    """

    def __init__(self, engine: Engine, family: PrmFamily, full_rescore: bool = False) -> None:
        """Make a verifier.

        Raises:
            CheckpointError: when `full_rescore` is asked of a generative family, which reads nothing step by step.
        """
        if full_rescore and isinstance(family, GenerativeVerifier):
            raise CheckpointError(
                f"--verify-incremental: {family.name} reads the whole text for every step, so there is nothing to "
                "compare it with; leave the flag out"
            )
        self.engine = engine
        self.family = family
        self.full_rescore = full_rescore
        self.reopened = 0

    def begin(
        self, owner: Hashable, problem: str, salt: bytes = b"", seed: int = 0
    ) -> "Verification | GenerativeVerification":
        """Open a verifier sequence that holds the problem, for the paths of `owner`; `salt` as in `Engine.open`.

        Args:
            owner: whose work it is.
            problem: its text.
            salt: prefixes are shared with sequences of the same salt only.
            seed: of the request; what a generative family writes goes by it.

        Raises:
            RequestTooLargeError: when the problem alone fills the verifier's context.
        """
        ids = self.family.prompt_ids(problem)
        require_room(self.family, len(ids))
        root = self.engine.open(VERIFIER, ids, salt, owner)
        if isinstance(self.family, GenerativeVerifier):
            return GenerativeVerification(self.engine, self.family, owner, problem, salt, seed, root)
        return Verification(self, owner, problem, salt, root, len(ids))


def require_room(family: PrmFamily, prompt_tokens: int) -> None:
    """Raise RequestTooLargeError when a problem of so many tokens leaves no room for a path."""
    limit, own = family.context, family.model.config.max_positions
    if prompt_tokens >= limit:
        rationales = f", of which rationales leave {limit}" if limit < own else ""
        raise RequestTooLargeError(
            f"the problem has {prompt_tokens} verifier tokens and the verifier's context is {own}{rationales}"
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """Where a step that is being scored stands.

    Attributes:
        sequence: what its path will be continued from.
        probe: what is still to be fed on a fork of it, None when this work reads.
        before: the score of the step before.
        tag: what the step was scored with.
    """

    sequence: Sequence
    path: StepPath
    probe: Score | None
    before: float | None
    tag: Any


class Verification:
    """The verification of one problem's paths.

    Whatever `score` submits comes back to `take`; a step may take several pieces of work one after the other.

    Attributes:
        root: the sequence that holds the problem; whoever began this releases it, as every sequence of a step.
        prompt_tokens: its length.
    """

    def __init__(
        self, verifier: Verifier, owner: Hashable, problem: str, salt: bytes, root: Sequence, prompt_tokens: int
    ) -> None:
        self.root = root
        self.prompt_tokens = prompt_tokens
        self._verifier = verifier
        self._engine = verifier.engine
        self._family = verifier.family
        self._owner = owner
        self._problem = problem
        self._salt = salt
        self._probes: set[Sequence] = set()
        self._checks: deque[tuple[Verdict, StepPath]] = deque()
        self._check: Check | None = None

    def prefill(self) -> None:
        """Queue the computation of the problem, so that its forks share it."""
        self._engine.submit(Score(self._owner, self.root, (), ()))

    def score(
        self,
        parent: Sequence,
        steps: tuple[str, ...],
        max_tokens: int,
        in_place: bool = False,
        before: float | None = None,
        tag: Any = None,
    ) -> Scoring | None:
        """Queue the scoring of the newest of `steps`, the tokens of those before it being computed.

        Args:
            parent: the verifier sequence of the path so far.
            steps: texts of the path's steps, none empty; with or without their delimiters.
            max_tokens: the most tokens the step may take.
            in_place: extend `parent` itself instead of a fork of it; `parent` is the new step's from here on.
            before: the score of the step before.
            tag: comes back with the verdict.

        Returns:
            The sequence of the new step, or None when the step is longer than `max_tokens`: such a step has no score,
            and is not cut short to get one.

        Raises:
            NoEmbeddingError: when the step holds a token that the model has no embedding for; nothing is queued.
        """
        path = StepPath(self._problem, steps)
        read = self._family.read(path)
        self._family.model.require_embedded(VERIFIER, read.token_ids)
        reading, extends = self._relative(parent, read)
        added = len(reading.token_ids) if extends else len(reading.token_ids) - self._engine.length(parent)
        if added > max_tokens:
            return None
        if extends:
            sequence = parent if in_place else self._engine.fork(parent, 1)[0]
            start = 0
        else:
            start = reading.score_positions[0]
            sequence = self._reopened(reading.token_ids[:start], parent if in_place else None)
        self._submit(reading, start, _Step(sequence, path, None, before, tag))
        return Scoring(sequence, max(added, 1))

    def take(self, done: Done) -> Verdict | None:
        """Take in finished work; the verdict when it was the last that its step needed, else None."""
        assert isinstance(done, Scored), "nothing is generated here"
        if self._check is not None and done.work is self._check.work:
            return self._take_check(done)
        step: _Step | None = done.work.tag
        if step is None:  # the problem
            return Verdict(done.work.sequence, None)
        if step.probe is not None:
            self._probe(step)
            return None
        if done.work.sequence in self._probes:
            self._probes.remove(done.work.sequence)
            self._engine.release(done.work.sequence)
        score = self._family.score(done.values, step.before)
        verdict = Verdict(step.sequence, score, tag=step.tag)
        if not self._verifier.full_rescore:
            return verdict
        self._checks.append((verdict, step.path))
        self._start_check()
        return None

    def is_check(self, done: Done) -> bool:
        """Whether this work only checks a score: its tokens are nobody's."""
        return self._check is not None and done.work is self._check.work

    def close(self) -> None:
        """Release what was opened for readings only, their work being dropped."""
        for sequence in self._probes:
            self._engine.release(sequence)
        if self._check is not None:
            self._engine.release(self._check.work.sequence)
        self._probes.clear()
        self._checks.clear()
        self._check = None

    def _relative(self, parent: Sequence, reading: ScoringInput) -> tuple[ScoringInput, bool]:
        """The reading in terms of what follows the parent's tokens, and whether it does follow them."""
        if not reading.whole:
            return reading, True
        kept = tuple(self._engine.token_ids(parent))
        start = len(kept)
        if reading.token_ids[:start] != kept or reading.score_positions[0] < start:
            return reading, False
        ids, score_positions = reading.token_ids[start:], tuple(i - start for i in reading.score_positions)
        return ScoringInput(ids, score_positions, reading.num_probe_tokens, targets=reading.targets), True

    def _reopened(self, token_ids: tuple[int, ...], taken_over: Sequence | None) -> Sequence:
        """A sequence of its own for a path that is tokenised otherwise than its beginning was.

        The prefix cache gives back the full blocks that are known.
        """
        self._verifier.reopened += 1
        if taken_over is not None:
            self._engine.release(taken_over)
        return self._engine.open(VERIFIER, list(token_ids), self._salt, self._owner)

    def _submit(self, reading: ScoringInput, start: int, step: _Step) -> None:
        """Submit the ids from `start` on: all with their reads, or what is kept first and the tail after it."""
        end = len(reading.token_ids) - reading.num_probe_tokens
        ids, score_positions = reading.token_ids[start:], tuple(i - start for i in reading.score_positions)
        if not reading.num_probe_tokens:
            work = Score(self._owner, step.sequence, ids, score_positions, reading.targets, step)
        else:
            positions = tuple(i - end for i in reading.score_positions)
            probe = Score(self._owner, step.sequence, reading.token_ids[end:], positions, reading.targets)
            work = Score(self._owner, step.sequence, ids[: end - start], (), tag=replace(step, probe=probe))
        self._engine.submit(work)

    def _probe(self, step: _Step) -> None:
        """Feed the tail of a step whose kept tokens are computed, on a fork that is given up afterwards."""
        assert step.probe is not None
        fork = self._engine.fork(step.sequence, 1)[0]
        self._probes.add(fork)
        self._engine.submit(replace(step.probe, sequence=fork, tag=replace(step, probe=None)))

    def _start_check(self) -> None:
        """Check one score at a time, so that a check never holds more than one path's memory."""
        if self._check is None and self._checks:
            verdict, path = self._checks[0]
            assert verdict.score is not None
            self._check = Check(self._engine, self._family, self._owner, path, verdict.score)

    def _take_check(self, done: Scored) -> Verdict:
        assert self._check is not None
        verdict, _ = self._checks.popleft()
        check, self._check = self._check, None
        self._engine.release(check.work.sequence)
        check.compare(done)
        self._start_check()
        return verdict
