"""The generator asked about its own steps, on the KV of its own paths.

In a search a question is fed on a fork of the path's sequence as the generator has it: its prompt, with its system
prompt and the conversation before it, then the tokens as they were sampled; the question closes the assistant's turn
and asks, as in `prm.families.asked`. So a step costs the tokens of its questions and one more, the path's last, whose
KV no sampling computes; the path itself is read no second time, and there is no second KV of it. What several questions
begin with alike is computed once. Given texts have no such sequence and are read by the family, on a KV of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from espalier.engine.memory.sequences import KVSequence
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Done, Generated, Score, Scored, StopCause
from espalier.prm.base import Sampled, ScoreInput
from espalier.prm.families.asked import AskedFamily
from espalier.prm.full_rescore import FullRescore
from espalier.prm.scorer import ScoredSearch, ScoreSession, ScoreStatus, StepNode, StepScore
from espalier.prm.verifier import SequenceSession, Verifier

HEAD = "asked"
"""Name of the generator's head that answers."""


class OwnPathVerifier(Verifier):
    """A family that asks the generator whose paths it scores; see the module.

    The generator's model must have the family's head among its other heads, as `HEAD`.
    """

    family: AskedFamily

    def __init__(self, family: AskedFamily, full_rescore: bool = False) -> None:
        """Create a verifier; see `Verifier`."""
        super().__init__(family, full_rescore)
        self.needs = replace(self.needs, merges="tokens", question_lengths=tuple(map(len, family.probes)))

    @property
    def identity(self) -> str:
        """See `Scorer`."""
        return f"{self.family.identity} on its own path"

    def begin(self, search: ScoredSearch) -> ScoreSession:
        """See `Scorer`."""
        if not search.sampled:
            return super().begin(search)
        return OwnPathSession(self.family, search, self.rescore_check(search, self.family.rounding, HEAD))


@dataclass(slots=True, eq=False)
class _Question:
    """Questions about a step that are being asked: the purpose of their work.

    Attributes:
        node: the step.
        path_ids: its path's tokens, for a check; empty without.
        forks: the sequence that each question is fed on; empty while what they have in common is computed.
        values: what each has given so far, by its place.
    """

    node: StepNode
    path_ids: tuple[int, ...]
    forks: list[KVSequence] = field(default_factory=list)
    values: dict[int, np.ndarray] = field(default_factory=dict)


class OwnPathSession(SequenceSession[AskedFamily]):
    """Asks about the steps of one search as they are sampled; see the module."""

    def __init__(self, family: AskedFamily, search: ScoredSearch, check: FullRescore | None = None) -> None:
        super().__init__(family, search, check)
        self._common = tokens_in_common(family.probes) if len(family.probes) > 1 else ()
        self._rests = [probe[len(self._common) :] for probe in family.probes]
        self._tokens = tokens_of_questions(family.probes)
        self._unasked: dict[StepNode, KVSequence] = {}

    def score_sampled(self, node: StepNode, done: Generated) -> None:
        """See `ScoreSession`; keeps a fork of the path, without the token that ended it."""
        (fork,) = self._engine.fork(done.sequence, 1)
        self._unasked[node] = fork
        if done.cause is StopCause.EOS:
            self._engine.append(fork, (), instead_of=1)

    def _want(self, node: StepNode, in_place: bool) -> Iterable[StepScore]:
        path = self._unasked.pop(node)
        room = self._engine.model(GENERATOR).config.max_positions - self._engine.length(path)
        if (longest := max(map(len, self._family.probes))) > room:
            self._engine.release(path)
            reason = f"leaves no room for a question of {longest} tokens in the generator's context"
            return (StepScore(node, status=ScoreStatus.UNREADABLE, reason=reason),)
        if self._tokens > self._search.budget(node):
            self._engine.release(path)
            return (StepScore(node, status=ScoreStatus.OVER_BUDGET),)
        question = _Question(node, tuple(self._engine.token_ids(path)) if self._check else ())
        self._opened.add(path)
        if len(self._rests) > 1:
            self._engine.submit(Score(self._search.owner, path, self._common, (), tag=question))
        else:
            self._ask(question, [path])
        return (StepScore(node, tokens=self._tokens, status=ScoreStatus.PENDING),)

    def release(self, node: StepNode) -> None:
        """See `ScoreSession`; what is being asked goes on."""
        if path := self._unasked.pop(node, None):
            self._engine.release(path)

    def sequences(self) -> list[KVSequence]:
        """See `ScoreSession`."""
        return [*self._unasked.values(), *self._opened]

    def close(self) -> None:
        """See `ScoreSession`."""
        super().close()
        self._unasked.clear()

    def _ask(self, question: _Question, forks: list[KVSequence]) -> None:
        """Feed each question on a fork of its own, and read the answer at its last token."""
        question.forks = forks
        for fork, ids in zip(forks, self._rests, strict=True):
            self._engine.submit(Score(self._search.owner, fork, ids, (len(ids) - 1,), tag=question, head=HEAD))

    def _take(self, done: Done) -> Iterable[StepScore]:
        assert isinstance(done, Scored), "nothing is generated here"
        question: _Question = done.work.tag
        path = done.work.sequence
        if not question.forks:  # what the questions have in common is computed
            forks = self._forks(path, len(self._rests))
            self._release_opened(path)
            self._ask(question, forks)
            return ()
        question.values[question.forks.index(path)] = done.values
        self._release_opened(path)
        if len(question.values) < len(self._rests):
            return ()
        score = self._score_of(np.concatenate([values for _, values in sorted(question.values.items())]))
        if self._check:
            whole = ((*question.path_ids, *probe) for probe in self._family.probes)
            inputs = [ScoreInput(ids, (len(ids) - 1,)) for ids in whole]
            self._check.add(inputs, score, len(question.node.lineage()), self._score_of)
        return (StepScore(question.node, score),)

    def _score_of(self, values: np.ndarray) -> float:
        return self._family.score(self._family.evidence(values, None, Sampled()))


def tokens_in_common(probes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens that all probes begin with, each of which has one more at least."""
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*(probe[:-1] for probe in probes), strict=False))
    return tuple(tokens[0] for tokens in alike)


def tokens_of_questions(probes: Sequence[tuple[int, ...]]) -> int:
    """Tokens that asking about a step takes: the path's last one, and the probes, what all begin with once."""
    together = len(tokens_in_common(probes))
    return 1 + together + sum(len(probe) - together for probe in probes)
