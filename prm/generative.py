"""Generative verification: a verifier writes rationales about the whole path, each followed by a yes-or-no verdict."""

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field

from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Model
from espalier.engine.roles import VERIFIER
from espalier.engine.work import Done, Generate, Generated, Sampling, Score, stream_key
from espalier.prm.base import PrmFamily, Sampled, ScoreInput, StepPath
from espalier.prm.limits import PathLimits, RationaleLimits
from espalier.prm.scorer import StepNode, StepScore, steps_with_text
from espalier.prm.session import NodeState, VerifierSession


@dataclass(frozen=True, slots=True)
class RationaleSettings:
    """Settings of the generation of rationales.

    Attributes:
        tokens: maximum tokens of a rationale; a longer one is cut off and judged as it is.
        chains: rationales per path; the score is the mean of their verdicts.
        temperature: softmax temperature; 0 is greedy.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    tokens: Annotated[int, Field(alias="critique_tokens", ge=1)] = 4096
    chains: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0


class GenerativeFamily(PrmFamily):
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
    costly = True

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

    def read(self, path: StepPath) -> ScoreInput:
        """The path's text and the lead-in to a verdict, without a rationale between them."""
        ids = (*self.text_ids(path), *self.lead_ids)
        return ScoreInput(ids, (len(ids) - 1,), full_path=True)

    def evidence(self, values: np.ndarray, before: float | None, sampled: Sampled) -> float:
        """Probability of yes: the softmax of the logits of yes and no."""
        yes, no = (float(values[0, i]) for i in self.verdict_ids)
        return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))

    def bounds(self, limits: PathLimits) -> PathLimits:
        """Bounds with rationales: each is generated once and read once, after the text of a path."""
        text = min(limits.prompt_tokens + limits.path_tokens + self.closing_tokens, self.context)
        path = text + self.rationales_cost
        rationales = RationaleLimits(text, self.settings.chains, self.rationale_tokens)
        return replace(limits, path_tokens=path, step_tokens=path, rationales=rationales)


@dataclass(slots=True, eq=False)
class _Rationales:
    """State of the rationales of one path.

    Attributes:
        text: sequence of the path's text, shared by all rationales.
        unwritten: number of rationales still being generated.
        unread: number of rationales without a verdict.
        extra_tokens: tokens generated and computed so far.
        scores: verdicts so far, in order of arrival.
    """

    node: StepNode
    path: StepPath
    text: KVSequence
    unwritten: int
    unread: int
    extra_tokens: int
    scores: list[float] = field(default_factory=list)


class RationaleSession(VerifierSession[GenerativeFamily]):
    """Scores each path by rationales.

    A node's sequence is a fork of the root and adds no tokens. Its text, rationales and verdicts use separate
    sequences, released with its score. A rationale ends in tokens that its verdict must not see, so its kept prefix is
    computed again on a fork of the text.
    """

    def _submit(self, node: StepNode, parent: KVSequence, state: NodeState, max_tokens: int) -> int | None:
        family, search, path = self._family, self._search, self._path(steps_with_text(node))
        ids = family.text_ids(path)
        family.model.require_embedded(VERIFIER, ids)
        if len(ids) > family.context or len(ids) + family.rationales_cost > max_tokens:
            return None
        state.sequence = self._continued(parent, state)
        text = self._engine.open(VERIFIER, list(ids), search.salt, search.owner)
        samplings = family.samplings(search.seed, path)
        self._opened.add(text)
        chains = len(samplings)
        rationales = _Rationales(node, path, text, chains, chains, len(ids))
        work = Generate(search.owner, text, samplings, family.settings.tokens, delimiter="", tag=rationales)
        self._engine.submit(work)
        return 0

    def _take(self, done: Done) -> Iterable[StepScore]:
        if isinstance(done, Generated):
            self._read_verdict(done)
            return ()
        if done.work.tag is None:  # the problem
            return self._finish(StepScore(self._search.root))
        rationales, chains = done.work.tag
        self._release_opened(done.work.sequence)
        rationales.scores += [self._family.evidence(done.values, None, Sampled())] * chains
        rationales.unread -= chains
        if rationales.unread:
            return ()
        # fsum is exact, so the order of arrival does not matter.
        mean = math.fsum(rationales.scores) / len(rationales.scores)
        return self._finish(StepScore(rationales.node, mean, rationales.extra_tokens))

    def _read_verdict(self, done: Generated) -> None:
        """Compute the kept prefix of a rationale and the lead-in to its verdict, after the text."""
        rationales: _Rationales = done.work.tag
        kept = self._family.kept(rationales.path, done.token_ids)
        self._engine.release(done.sequence)
        sequence = self._engine.fork(rationales.text, 1)[0]
        rationales.unwritten -= len(done.indices)
        if not rationales.unwritten:
            self._release_opened(rationales.text)
        ids = (*kept, *self._family.lead_ids)
        rationales.extra_tokens += done.own_tokens + len(ids)
        self._opened.add(sequence)
        tag = rationales, len(done.indices)
        self._engine.submit(Score(self._search.owner, sequence, ids, (len(ids) - 1,), tag=tag))
