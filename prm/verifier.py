"""The scorer of a process reward model: any family, on a KV cache of its own; and its sessions on verifier sequences.

A node's sequence is a fork of its parent's, extended by the tokens of its step.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from espalier.engine.errors import CheckpointError, NoEmbeddingError, RequestTooLargeError
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.roles import VERIFIER
from espalier.engine.work import Done, Score, Scored
from espalier.prm.base import PrmFamily, Sampled, ScoreInput, StepPath, with_probe
from espalier.prm.full_rescore import FullRescore
from espalier.prm.limits import UNLIMITED, PathLimits, verifier_limits
from espalier.prm.scorer import (
    ScoredSearch,
    Scorer,
    ScorerNeeds,
    ScoreSession,
    ScoreStatus,
    StepNode,
    StepScore,
    steps_with_text,
)

Family = TypeVar("Family", bound=PrmFamily)


@dataclass(slots=True, eq=False)
class NodeState:
    """A node's sequence, and its children that wait: they are scored after it, so that they share its KV.

    `wanted` and `in_place` are as it was handed in; `released` is set if the search needs it no longer. `evidence` is
    its path's, without its own step until that is scored; `values` are those that its probes have given so far.
    """

    wanted: bool
    in_place: bool = False
    sequence: KVSequence | None = None
    evidence: Any = None
    values: dict[int, np.ndarray] = field(default_factory=dict)
    scored: bool = False
    released: bool = False
    waiting: list[StepNode] = field(default_factory=list)


class SequenceSession(ScoreSession, Generic[Family]):
    """A session that feeds sequences, among them forks that are only read and then dropped."""

    def __init__(self, family: Family, search: ScoredSearch, check: FullRescore | None = None) -> None:
        super().__init__(check)
        self._family = family
        self._search = search
        self._engine = search.engine
        self._opened: set[KVSequence] = set()  # sequences that are only read

    def close(self) -> None:
        """See `ScoreSession`."""
        super().close()
        for sequence in dict.fromkeys((*self.sequences(), *self._opened)):
            self._engine.release(sequence)
        self._opened.clear()

    def _forks(self, sequence: KVSequence, count: int) -> list[KVSequence]:
        """Forks of a sequence that are only read."""
        forks = self._engine.fork(sequence, count)
        self._opened.update(forks)
        return forks

    def _release_opened(self, sequence: KVSequence) -> None:
        self._opened.discard(sequence)
        self._engine.release(sequence)


class VerifierSession(SequenceSession[Family]):
    """Scores a tree's steps, each after its parent's.

    A step that is too long, or over its budget, has no score and is never cut; nor has a step after it. Where only the
    ends of paths are scored, each path is read at once, from the problem on.
    """

    def __init__(self, family: Family, search: ScoredSearch, check: FullRescore | None = None) -> None:
        """Open a sequence with the problem."""
        super().__init__(family, search, check)
        self.prompt_tokens = len(search.prompt)
        self._root = self._engine.open(VERIFIER, list(search.prompt), search.salt, search.owner)
        self._states: dict[StepNode, NodeState] = {search.root: NodeState(wanted=False, sequence=self._root)}

    @classmethod
    def bounds(cls, family: Family, limits: PathLimits) -> PathLimits:
        """Turn bounds on the tokens of steps into those of a search that the family scores."""
        return limits

    def prefill(self) -> None:
        """See `ScoreSession`; forks share what is computed."""
        self._engine.submit(Score(self._search.owner, self._root, (), ()))

    def _want(self, node: StepNode, in_place: bool) -> Iterable[StepScore]:
        return self._add(node, NodeState(wanted=True, in_place=in_place and not self._search.score_final_only))

    def _skip(self, node: StepNode) -> Iterable[StepScore]:
        return self._add(node, NodeState(wanted=False))

    def release(self, node: StepNode) -> None:
        """See `ScoreSession`."""
        if state := self._states.get(node):
            state.released = True
            self._drop_released(node, state)

    def sequences(self) -> list[KVSequence]:
        """See `ScoreSession`."""
        return [state.sequence for state in self._states.values() if state.sequence is not None]

    def close(self) -> None:
        """See `ScoreSession`."""
        super().close()
        self._states.clear()

    def _add(self, node: StepNode, state: NodeState) -> Iterable[StepScore]:
        assert node.parent is not None
        self._states[node] = state
        parent = self._states[node.parent]
        parent.waiting.append(node)
        return self._score_waiting(node.parent, parent) if parent.scored else ()

    def _finish(self, step: StepScore) -> Iterator[StepScore]:
        """Report a step, and score the children that wait for it."""
        yield step
        yield from self._score_waiting(step.node, self._states[step.node])

    def _score_waiting(self, node: StepNode, state: NodeState) -> Iterator[StepScore]:
        """Score the children that wait for a node; where one gets no score, its own at once, to any depth."""
        ready = [(node, state)]
        while ready:
            node, state = ready[-1]
            if state.waiting:
                child = state.waiting.pop(0)
                yield (step := self._submit_step(child, self._states[child]))
                if step.status is not ScoreStatus.PENDING:
                    ready.append((child, self._states[child]))
            else:
                state.scored = True
                self._drop_released(node, state)
                ready.pop()

    def _drop_released(self, node: StepNode, state: NodeState) -> None:
        done = state.released and state.scored and not state.waiting
        if done and self._states.pop(node, None) and state.sequence is not None:
            self._engine.release(state.sequence)

    def _submit_step(self, node: StepNode, state: NodeState) -> StepScore:
        """Submit the step of a node, whose parent is scored, if it is wanted."""
        search, limits = self._search, self._search.limits
        parent = self._states[search.root if search.score_final_only else node.parent]  # pyright: ignore[reportArgumentType]
        state.evidence = parent.evidence
        if not state.wanted:
            if parent.sequence is not None and not node.text.strip():  # its path goes on from what was read before it
                state.sequence = self._engine.fork(parent.sequence, 1)[0]
            return StepScore(node)
        if parent.sequence is None:
            return StepScore(node, status=ScoreStatus.UNREADABLE, reason="a step before it has no score")
        room, length = UNLIMITED, self._engine.length(parent.sequence)
        if limits:
            room = min(limits.prompt_tokens + limits.path_tokens - length, limits.step_tokens)
        left = search.budget(node) - self._family.other_probe_tokens
        try:
            tokens = self._submit(node, parent.sequence, state, min(room, left))
        except NoEmbeddingError as error:
            return StepScore(node, status=ScoreStatus.UNREADABLE, reason=f"cannot be read: {error}")
        if tokens is None:
            context = self._family.context
            if left < min(room, context - length):
                return StepScore(node, status=ScoreStatus.OVER_BUDGET)
            reason = f"goes beyond the verifier's context of {context} tokens"
            if room < context - length:
                reason = f"takes more verifier tokens than the {room} set aside for it"
            return StepScore(node, status=ScoreStatus.UNREADABLE, reason=reason)
        if state.in_place:
            parent.sequence = None
        return StepScore(node, tokens=tokens, status=ScoreStatus.PENDING)

    @abstractmethod
    def _submit(self, node: StepNode, parent: KVSequence, state: NodeState, max_tokens: int) -> int | None:
        """Set the sequence of a node's state, and submit its scoring.

        Returns:
            The tokens that the step adds to `parent`; None, without submitting, if it exceeds `max_tokens` or the
            context.

        Raises:
            NoEmbeddingError: the step has a token without an embedding; nothing is submitted.
        """

    def _path(self, steps: Iterable[StepNode]) -> StepPath:
        return self._family.plain_text.path(self._search.problem, (step.text for step in steps))

    def _continued(self, parent: KVSequence, state: NodeState) -> KVSequence:
        """The sequence that goes on from the parent's: a fork, or itself."""
        return parent if state.in_place else self._engine.fork(parent, 1)[0]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that is being scored.

    Attributes:
        sequence: the sequence from which its path will be continued.
        probes: probe tokens still to be fed, each on a fork of it; empty if this work reads the score.
        place: which of its probes this is.
    """

    node: StepNode
    path: StepPath
    sequence: KVSequence
    probes: tuple[Score, ...] = ()
    place: int = 0


class StepSession(VerifierSession[PrmFamily]):
    """Reads each step's score at positions among its own tokens, which are computed once.

    Attributes:
        reopened: number of times a path was computed again because its parent's ids were not a prefix of its own.
    """

    reopened = 0

    def _submit(self, node: StepNode, parent: KVSequence, state: NodeState, max_tokens: int) -> int | None:
        path, length = self._path(steps_with_text(node)), self._engine.length(parent)
        full = self._family.full_path(path) if self._search.score_final_only else self._family.read(path)
        self._family.model.require_embedded(VERIFIER, full.token_ids)
        reading, extends = self._relative(parent, full)
        added = len(reading.token_ids) - (0 if extends else length)
        longer = self._family.max_probe_tokens - reading.num_probe_tokens if self._family.other_probes else 0
        if added > max_tokens or added + longer > self._family.context - length:
            return None
        start = 0 if extends else reading.score_positions[0]
        if extends:
            state.sequence = self._continued(parent, state)
        else:  # full blocks that are in the prefix cache are reused
            self.reopened += 1
            if state.in_place:
                self._engine.release(parent)
            ids = list(reading.token_ids[:start])
            state.sequence = self._engine.open(VERIFIER, ids, self._search.salt, self._search.owner)
        self._submit_from(reading, start, _Step(node, path, state.sequence))
        return max(added, 1) + self._family.other_probe_tokens

    def _relative(self, parent: KVSequence, reading: ScoreInput) -> tuple[ScoreInput, bool]:
        """Make the input of a full path relative to the parent's ids; also returns whether these are a prefix of it."""
        if not reading.full_path:
            return reading, True
        kept = tuple(self._engine.token_ids(parent))
        start = len(kept)
        if reading.token_ids[:start] != kept or reading.score_positions[0] < start:
            return reading, False
        positions = tuple(i - start for i in reading.score_positions)
        return replace(reading, token_ids=reading.token_ids[start:], score_positions=positions, full_path=False), True

    def _submit_from(self, reading: ScoreInput, start: int, step: _Step) -> None:
        """Submit the ids from `start` with their score positions; if there are probe tokens, only the kept ids."""
        owner, end = self._search.owner, len(reading.token_ids) - reading.num_probe_tokens
        ids, score_positions = reading.token_ids[start:], tuple(i - start for i in reading.score_positions)
        if not reading.num_probe_tokens:
            work = Score(owner, step.sequence, ids, score_positions, reading.targets, step)
        else:
            probes = reading.token_ids[end:], *self._family.other_probes
            probes = tuple(Score(owner, step.sequence, probe, (len(probe) - 1,)) for probe in probes)
            work = Score(owner, step.sequence, ids[: end - start], (), tag=replace(step, probes=probes))
        self._engine.submit(work)

    def _take(self, done: Done) -> Iterable[StepScore]:
        assert isinstance(done, Scored), "nothing is generated here"
        step: _Step | None = done.work.tag
        if step is None:  # the problem
            return self._finish(StepScore(self._search.root))
        if step.probes:  # its kept tokens are computed
            forks = self._forks(step.sequence, len(step.probes))
            for place, (probe, fork) in enumerate(zip(step.probes, forks, strict=True)):
                self._engine.submit(replace(probe, sequence=fork, tag=replace(step, probes=(), place=place)))
            return ()
        if done.work.sequence in self._opened:
            self._release_opened(done.work.sequence)
        state = self._states[step.node]
        state.values[step.place] = done.values
        if len(state.values) <= len(self._family.other_probes):
            return ()
        values = np.concatenate([state.values[place] for place in sorted(state.values)])
        state.values.clear()
        family = self._family
        state.evidence = family.evidence(values, state.evidence, _sampled(step.node))
        score = family.score(state.evidence)
        if self._check:
            sampled = [_sampled(node) for node in steps_with_text(step.node)]

            def read(values: np.ndarray) -> float:
                return family.score(family.full_evidence(step.path, values, sampled))

            whole = family.full_path(step.path)
            inputs = (whole, *(with_probe(whole, probe) for probe in family.other_probes))
            self._check.add(inputs, score, len(step.path.steps), read)
        return self._finish(StepScore(step.node, score))


def _sampled(node: StepNode) -> Sampled:
    return Sampled(node.log_probability, node.num_tokens)


class Verifier(Scorer):
    """Scores steps by a family's model, as the engine's verifier.

    Attributes:
        family: how the model reads a path.
    """

    def __init__(self, family: PrmFamily, full_rescore: bool = False) -> None:
        """Create a verifier; with `full_rescore`, every score is also computed from the whole text and compared.

        Raises:
            CheckpointError: `full_rescore` is set for a family that is not incremental.
        """
        if full_rescore and family.session:
            raise CheckpointError(
                f"--verify-incremental: {family.name} reads the whole text for every step, so there is nothing to "
                "compare it with; leave the flag out"
            )
        self.family = family
        self.name = family.name
        of_step = "if enough" if family.costly else "never"
        read = "tokens" if family.info.of_sampling else "text"
        self.needs = ScorerNeeds(
            reads=read,
            final_only="always" if family.info.whole_answers else of_step,
            merges=read,
            rescored=VERIFIER if full_rescore else "",
        )
        self._session: type[VerifierSession[Any]] = family.session or StepSession
        self._same_vocabulary: dict[TextTokenizer, bool] = {}

    @property
    def identity(self) -> str:
        """See `Scorer`."""
        return self.family.identity

    def prompt(self, problem: str) -> tuple[int, ...]:
        """See `Scorer`."""
        family, ids = self.family, tuple(self.family.prompt_ids(self.family.plain_text.of(problem)))
        family.model.require_embedded(VERIFIER, ids)
        limit, own = family.context, family.model.config.max_positions
        if len(ids) >= limit:
            rationales = f", of which rationales leave {limit}" if limit < own else ""
            raise RequestTooLargeError(
                f"the problem has {len(ids)} verifier tokens and the verifier's context is {own}{rationales}"
            )
        return ids

    def bounds(self, prompt_tokens: int, generator: PathLimits, max_steps: int, tokenizer: TextTokenizer) -> PathLimits:
        """See `Scorer`."""
        family = self.family
        if tokenizer not in self._same_vocabulary:  # compared once, as there may be 150,000 tokens
            self._same_vocabulary[tokenizer] = family.model.tokenizer.vocabulary == tokenizer.vocabulary
        same = self._same_vocabulary[tokenizer]
        special_tokens = family.max_special_tokens, family.max_probe_tokens, 1 + len(family.other_probes)
        limits = verifier_limits(generator, prompt_tokens, family.context, max_steps, same, *special_tokens)
        return self._session.bounds(family, limits)

    def begin(self, search: ScoredSearch) -> ScoreSession:
        """See `Scorer`."""
        return self._session(self.family, search, self.rescore_check(search, self.family.rounding))
