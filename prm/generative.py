"""Generative verification: a verifier writes rationales about the whole path, each followed by a yes-or-no verdict."""

import math
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Model
from espalier.engine.roles import VERIFIER
from espalier.engine.work import Done, Generate, Generated, Sampling, Score, stream_key
from espalier.prm.base import PrmFamily, Scoring, ScoringInput, StepPath, Verdict


@dataclass(frozen=True, slots=True)
class RationaleSettings:
    """How rationales are generated.

    Attributes:
        tokens: maximum tokens of a rationale; a longer one is cut off and judged as it is.
        chains: rationales per path; the score is the mean of their verdicts.
        temperature: softmax temperature; 0 is greedy.
    """

    tokens: int
    chains: int
    temperature: float


class GenerativeVerifier(PrmFamily):
    """A family that writes a rationale and then gives its verdict.

    The KV of a path does not serve its next step, because the prompt continues between the steps and the rationale.
    Every step is therefore scored from the whole text, on sequences that are released with its score.

    Attributes:
        settings: how rationales are generated.
        closing_tokens: maximum tokens between the last step and the rationale.
        lead_ids: ids fed after a rationale; the verdict is the next token.
        verdict_ids: ids of yes and no.
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
        """The name and the rationale settings."""
        return f"{self.name} {self.settings}"

    @property
    def context(self) -> int:
        """Maximum tokens of a path's text: the model's context minus one rationale and its verdict."""
        return super().context - self.rationale_tokens

    @property
    def rationales_cost(self) -> int:
        """Maximum tokens of a path's rationales, each counted twice: to generate it and to read its verdict."""
        return 2 * self.settings.chains * self.rationale_tokens

    @property
    def rationale_tokens(self) -> int:
        """Maximum tokens of one rationale and the lead-in to its verdict."""
        return self.settings.tokens + len(self.lead_ids)

    @abstractmethod
    def text_ids(self, path: StepPath) -> tuple[int, ...]:
        """Token ids of the text before a rationale."""

    @abstractmethod
    def kept(self, path: StepPath, token_ids: list[int]) -> list[int]:
        """Return the prefix of a rationale's tokens after which its verdict is read."""

    def samplings(self, seed: int, path: StepPath) -> tuple[Sampling, ...]:
        """Sampling of each rationale, which depends only on the request's seed and the path's text."""
        text = "\x1f".join((path.problem, *path.steps))
        return tuple(
            Sampling(self.settings.temperature, key=stream_key(seed, text, (i,))) for i in range(self.settings.chains)
        )

    def read(self, path: StepPath) -> ScoringInput:
        """The path's text and the lead-in to a verdict, without a rationale between them."""
        ids = (*self.text_ids(path), *self.lead_ids)
        return ScoringInput(ids, (len(ids) - 1,), whole=True)

    def score(self, values: np.ndarray, before: float | None) -> float:
        """Probability of yes: the softmax of the logits of yes and no."""
        yes, no = (float(values[0, i]) for i in self.verdict_ids)
        return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


@dataclass(slots=True, eq=False)
class _Rationales:
    """State of the rationales of one path.

    Attributes:
        sequence: the step's sequence; it holds only the problem.
        text: sequence of the path's text, shared by all rationales.
        unwritten: number of rationales still being generated.
        unread: number of rationales without a verdict.
        scores: verdicts so far, in order of arrival.
        spent: tokens generated and computed so far.
        tag: tag of the scoring call.
    """

    sequence: KVSequence
    path: StepPath
    text: KVSequence
    unwritten: int
    unread: int
    spent: int
    tag: Any
    scores: list[float] = field(default_factory=list)


class GenerativeVerification:
    """Verifies one problem's paths by rationales; has the interface of `Verification`.

    A step's sequence is a fork of the root and adds no tokens. Its text, rationales and verdicts use separate
    sequences, released with its score. A rationale ends in tokens that its verdict must not see, so its kept prefix is
    computed again on a fork of the text.

    Attributes:
        root: sequence that holds the problem; the caller releases it, like the sequences of steps.
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
        root: KVSequence,
    ) -> None:
        self.root = root
        self.prompt_tokens = engine.length(root)
        self._engine = engine
        self._family = family
        self._owner = owner
        self._problem = problem
        self._salt = salt
        self._seed = seed
        self._opened: set[KVSequence] = set()  # sequences of texts and verdicts

    def prefill(self) -> None:
        """Submit the computation of the problem, which texts then take from the prefix cache."""
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
        """Submit the rationales of the path of `steps`; see `Verification.score`.

        Returns:
            The sequence of the new step; None if the text with the longest rationales exceeds `max_tokens` or the
            model's context, so that the step gets no score.

        Raises:
            NoEmbeddingError: the text has a token without an embedding; nothing is submitted.
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
        """Process finished work; returns the verdict once the step is completely scored, else None."""
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
        # fsum is exact, so the order of arrival does not matter.
        mean = math.fsum(rationale.scores) / len(rationale.scores)
        return Verdict(rationale.sequence, mean, rationale.spent, rationale.tag)

    def is_check(self, done: Done) -> bool:
        """Whether this work belongs to a full-rescore check; always False here."""
        return False

    def close(self) -> None:
        """Release the sequences of rationales and verdicts; their work must have been cancelled."""
        for sequence in list(self._opened):
            self._release(sequence)

    def _read_verdict(self, done: Generated) -> None:
        """Compute the kept prefix of a rationale and the lead-in to its verdict, after the text."""
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

    def _release(self, sequence: KVSequence) -> None:
        self._opened.discard(sequence)
        self._engine.release(sequence)
