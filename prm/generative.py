"""Verification by rationales: a generative verifier writes about the whole path, and its verdict is read at the end."""

import math
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import Sequence
from espalier.engine.models.model import Model
from espalier.engine.scheduling.role_policy import VERIFIER
from espalier.engine.work import Done, Generate, Generated, Sampling, Score, stream_key
from espalier.prm.base import PrmFamily, Scoring, ScoringInput, StepPath, Verdict


@dataclass(frozen=True, slots=True)
class RationaleSettings:
    """How rationales are written.

    Attributes:
        tokens: most tokens of one; a longer one is cut there and judged by what it says so far.
        chains: rationales of each path; its score is the mean of what they come to.
        temperature: softmax temperature; 0 takes the most likely token.
    """

    tokens: int
    chains: int
    temperature: float


class GenerativeVerifier(PrmFamily):
    """How one generative verifier is asked, and how its verdict is read.

    Nothing of a path's text serves the next step: what follows the steps stands between them and the rationale. So
    every step is scored from the whole text, on sequences that are given up with its score.

    Attributes:
        settings: how rationales are written.
        closing_tokens: most tokens between the last step and the rationale.
        lead_ids: what is fed after a rationale; the verdict is the token that follows them.
        verdict_ids: the tokens that say yes and no.
    """

    settings: RationaleSettings
    closing_tokens: int
    lead_ids: tuple[int, ...]
    verdict_ids: tuple[int, int]

    def __init__(self, model: Model, settings: RationaleSettings) -> None:
        self.model = model
        self.settings = settings

    @property
    def identity(self) -> str:
        """The name and how rationales are written."""
        return f"{self.name} {self.settings}"

    @property
    def context(self) -> int:
        """Most tokens of a path's text: the rest of the model's context is for the rationale and its verdict."""
        return super().context - self.rationale_tokens

    @property
    def rationales_cost(self) -> int:
        """Most tokens of all rationales of a path, each written once and read once more up to its verdict."""
        return 2 * self.settings.chains * self.rationale_tokens

    @property
    def rationale_tokens(self) -> int:
        """Most tokens of one rationale and the lead-in to its verdict."""
        return self.settings.tokens + len(self.lead_ids)

    @abstractmethod
    def text_ids(self, path: StepPath) -> tuple[int, ...]:
        """Token ids of all that a rationale follows."""

    @abstractmethod
    def kept(self, path: StepPath, token_ids: list[int]) -> list[int]:
        """What of a rationale's tokens its verdict is read after; no more than were given."""

    def samplings(self, seed: int, path: StepPath) -> tuple[Sampling, ...]:
        """How each rationale is drawn: by the request's seed and the path's text alone, whichever node it is of."""
        text = "\x1f".join((path.problem, *path.steps))
        return tuple(
            Sampling(self.settings.temperature, key=stream_key(seed, text, (i,))) for i in range(self.settings.chains)
        )

    def read(self, path: StepPath) -> ScoringInput:
        """The path's text and the lead-in to a verdict, as they would be read without a rationale between them."""
        ids = (*self.text_ids(path), *self.lead_ids)
        return ScoringInput(ids, (len(ids) - 1,), whole=True)

    def score(self, values: np.ndarray, before: float | None) -> float:
        """The softmax of the logits of yes and no, at yes."""
        yes, no = (float(values[0, i]) for i in self.verdict_ids)
        return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


@dataclass(slots=True, eq=False)
class _Rationales:
    """Where the rationales of one path stand.

    Attributes:
        sequence: what stands for the step; it holds the problem alone.
        text: the path's text, which all rationales follow.
        unwritten: chains that are still being written.
        unread: chains without a verdict.
        scores: of the chains that have one, in order of arrival.
        spent: tokens written and read so far.
        tag: what the step was scored with.
    """

    sequence: Sequence
    path: StepPath
    text: Sequence
    unwritten: int
    unread: int
    spent: int
    tag: Any
    scores: list[float] = field(default_factory=list)


class GenerativeVerification:
    """The verification of one problem's paths by rationales; used as `Verification` is.

    A step's sequence is a fork of the root and adds nothing to it. Its text, rationales and verdicts have sequences of
    their own, which go with its score. A rationale ends in tokens that its verdict must not see, so what is kept of it
    is read once more on a fork of the text.

    Attributes:
        root: the sequence that holds the problem; whoever began this releases it, as every sequence of a step.
        prompt_tokens: its length.
    """

    def __init__(
        self,
        engine: Engine,
        family: GenerativeVerifier,
        owner: Hashable,
        problem: str,
        salt: bytes,
        seed: int,
        root: Sequence,
    ) -> None:
        self.root = root
        self.prompt_tokens = engine.length(root)
        self._engine = engine
        self._family = family
        self._owner = owner
        self._problem = problem
        self._salt = salt
        self._seed = seed
        self._opened: set[Sequence] = set()  # texts that rationales follow, and what verdicts are read on

    def prefill(self) -> None:
        """Queue the computation of the problem, which texts then take from the prefix cache."""
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
        """Queue the rationales of the path of `steps`; see `Verification.score`.

        Returns:
            The sequence of the new step, or None when the text with the longest rationales is longer than `max_tokens`,
            or does not fit in the model's context: such a step has no score.

        Raises:
            NoEmbeddingError: when the text holds a token that the model has no embedding for; nothing is queued.
        """
        family, path = self._family, StepPath(self._problem, steps)
        ids = family.text_ids(path)
        family.model.require_embedded(VERIFIER, ids)
        if len(ids) > family.context or len(ids) + family.rationales_cost > max_tokens:
            return None
        sequence = parent if in_place else self._engine.fork(parent, 1)[0]
        text = self._engine.open(VERIFIER, list(ids), self._salt, self._owner)
        samplings = family.samplings(self._seed, path)
        self._opened.add(text)
        chains = len(samplings)
        rationales = _Rationales(sequence, path, text, chains, chains, len(ids), tag)
        work = Generate(self._owner, text, samplings, family.settings.tokens, delimiter="", tag=rationales)
        self._engine.submit(work)
        return Scoring(sequence, 0)

    def take(self, done: Done) -> Verdict | None:
        """Take in finished work; the verdict when it was the last that its step needed, else None."""
        if isinstance(done, Generated):
            self._read_verdict(done)
            return None
        if done.work.tag is None:  # the problem
            return Verdict(done.work.sequence, None)
        rationale, chains = done.work.tag
        self._release(done.work.sequence)
        rationale.scores += [self._family.score(done.values, None)] * chains
        rationale.unread -= chains
        if rationale.unread:
            return None
        # The exact sum does not depend on which chain was read first.
        mean = math.fsum(rationale.scores) / len(rationale.scores)
        return Verdict(rationale.sequence, mean, rationale.spent, rationale.tag)

    def is_check(self, done: Done) -> bool:
        """Whether this work only checks a score: nothing here does."""
        return False

    def close(self) -> None:
        """Release what was opened for rationales and verdicts, their work being dropped."""
        for sequence in list(self._opened):
            self._release(sequence)

    def _read_verdict(self, done: Generated) -> None:
        """Feed what is kept of a rationale, and what leads to its verdict, after the text."""
        rationale: _Rationales = done.work.tag
        lead = self._family.lead_ids
        kept = self._family.kept(rationale.path, done.token_ids)
        self._engine.release(done.sequence)
        sequence = self._engine.fork(rationale.text, 1)[0]
        rationale.unwritten -= len(done.indices)
        if not rationale.unwritten:
            self._release(rationale.text)
        ids = (*kept, *lead)
        rationale.spent += done.own_tokens + len(ids)
        self._opened.add(sequence)
        self._engine.submit(Score(self._owner, sequence, ids, (len(ids) - 1,), tag=(rationale, len(done.indices))))

    def _release(self, sequence: Sequence) -> None:
        self._opened.discard(sequence)
        self._engine.release(sequence)
