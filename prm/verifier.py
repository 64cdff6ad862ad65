"""Incremental verification: the sequence of a step is a fork of its parent's, extended by the step's tokens."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, RequestTooLargeError
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.roles import VERIFIER
from espalier.engine.work import Done, Score, Scored
from espalier.prm.base import PrmFamily, Scoring, ScoringInput, StepPath, Verdict
from espalier.prm.full_rescore import Check
from espalier.prm.generative import GenerativeVerification, GenerativeVerifier


class Verifier:
    """Scores steps on the engine, computing each step's tokens exactly once.

    Attributes:
        family: how the model reads a path.
        full_rescore: whether every score is also computed from the whole text and compared.
        reopened: number of times a path was computed again because its parent's ids were not a prefix of its own.
    """

    def __init__(self, engine: Engine, family: PrmFamily, full_rescore: bool = False) -> None:
        """Create a verifier.

        Raises:
            CheckpointError: `full_rescore` is set for a generative family, which is not incremental.
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

    def prompt_ids(self, problem: str) -> tuple[int, ...]:
        """Return the token ids of a problem.

        Raises:
            NoEmbeddingError: the problem has tokens without an embedding in the model.
            RequestTooLargeError: the problem alone fills the verifier's context.
        """
        family, ids = self.family, tuple(self.family.prompt_ids(problem))
        family.model.require_embedded(VERIFIER, ids)
        limit, own = family.context, family.model.config.max_positions
        if len(ids) >= limit:
            rationales = f", of which rationales leave {limit}" if limit < own else ""
            raise RequestTooLargeError(
                f"the problem has {len(ids)} verifier tokens and the verifier's context is {own}{rationales}"
            )
        return ids

    def begin(
        self, owner: Hashable, problem: str, prompt: Sequence[int], salt: bytes = b"", seed: int = 0
    ) -> "Verification | GenerativeVerification":
        """Open a verifier sequence with the problem, for the paths of `owner`.

        Args:
            owner: owner of the work.
            problem: the problem's text.
            prompt: its token ids; see `prompt_ids`.
            salt: prefixes are shared only with sequences of the same salt; see `Engine.open`.
            seed: the request's seed, used by generative families.
        """
        root = self.engine.open(VERIFIER, list(prompt), salt, owner)
        if isinstance(self.family, GenerativeVerifier):
            return GenerativeVerification(self.engine, self.family, owner, problem, salt, seed, root)
        return Verification(self, owner, problem, salt, root, len(prompt))


@dataclass(frozen=True, slots=True)
class _Step:
    """State of a step that is being scored.

    Attributes:
        sequence: the sequence from which its path will be continued.
        probe: probe tokens still to be fed on a fork of it, None if this work reads the score.
        before: score of the previous step.
        tag: tag of the scoring call.
    """

    sequence: KVSequence
    path: StepPath
    probe: Score | None
    before: float | None
    tag: Any


class Verification:
    """Verifies the paths of one problem.

    Pass all finished work of `score` to `take`; one step may need several pieces of work in sequence.

    Attributes:
        root: sequence that holds the problem; the caller releases it, like the sequences of steps.
        prompt_tokens: its length.
    """

    def __init__(
        self, verifier: Verifier, owner: Hashable, problem: str, salt: bytes, root: KVSequence, prompt_tokens: int
    ) -> None:
        self.root = root
        self.prompt_tokens = prompt_tokens
        self._verifier = verifier
        self._engine = verifier.engine
        self._family = verifier.family
        self._owner = owner
        self._problem = problem
        self._salt = salt
        self._probes: set[KVSequence] = set()
        self._checks: deque[tuple[Verdict, StepPath]] = deque()
        self._check: Check | None = None

    def prefill(self) -> None:
        """Submit the computation of the problem, which its forks share."""
        self._engine.submit(Score(self._owner, self.root, (), ()))

    def score(
        self,
        parent: KVSequence,
        steps: tuple[str, ...],
        max_tokens: int,
        in_place: bool = False,
        before: float | None = None,
        tag: Any = None,
    ) -> Scoring | None:
        """Submit the scoring of the last of `steps`; those before it are computed in `parent`.

        Args:
            parent: verifier sequence of the path so far.
            steps: texts of the path's steps, none empty; with or without delimiters.
            max_tokens: maximum tokens of the step.
            in_place: extend `parent` itself instead of a fork; `parent` then belongs to the new step.
            before: score of the previous step.
            tag: returned with the verdict.

        Returns:
            The sequence of the new step; None if the step exceeds `max_tokens`: such a step gets no score, and is not
            truncated.

        Raises:
            NoEmbeddingError: the step has a token without an embedding; nothing is submitted.
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
        """Process finished work; returns the verdict once the step is completely scored, else None.

        Raises:
            ScoreMismatchError: the full-rescore check found a different score.
        """
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
        """Whether this work belongs to a full-rescore check; its tokens do not count as usage."""
        return self._check is not None and done.work is self._check.work

    def close(self) -> None:
        """Release sequences that were opened to read scores; their work must have been cancelled."""
        for sequence in self._probes:
            self._engine.release(sequence)
        if self._check is not None:
            self._engine.release(self._check.work.sequence)
        self._probes.clear()
        self._checks.clear()
        self._check = None

    def _relative(self, parent: KVSequence, reading: ScoringInput) -> tuple[ScoringInput, bool]:
        """Make a whole input relative to the parent's ids; also returns whether these are a prefix of it."""
        if not reading.whole:
            return reading, True
        kept = tuple(self._engine.token_ids(parent))
        start = len(kept)
        if reading.token_ids[:start] != kept or reading.score_positions[0] < start:
            return reading, False
        ids, score_positions = reading.token_ids[start:], tuple(i - start for i in reading.score_positions)
        return ScoringInput(ids, score_positions, reading.num_probe_tokens, targets=reading.targets), True

    def _reopened(self, token_ids: tuple[int, ...], taken_over: KVSequence | None) -> KVSequence:
        """Open a new sequence for a path whose parent's ids are not a prefix of its own.

        Full blocks that are in the prefix cache are reused.
        """
        self._verifier.reopened += 1
        if taken_over is not None:
            self._engine.release(taken_over)
        return self._engine.open(VERIFIER, list(token_ids), self._salt, self._owner)

    def _submit(self, reading: ScoringInput, start: int, step: _Step) -> None:
        """Submit the ids from `start` with their score positions; if there are probe tokens, only the kept ids."""
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
        """Feed the probe tokens of a step whose kept tokens are computed, on a fork that is released afterwards."""
        assert step.probe is not None
        fork = self._engine.fork(step.sequence, 1)[0]
        self._probes.add(fork)
        self._engine.submit(replace(step.probe, sequence=fork, tag=replace(step, probe=None)))

    def _start_check(self) -> None:
        """Check one score at a time, so that a check holds the memory of one path only."""
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
