"""The contract of a generative verifier: it writes a critique of the whole path and then says whether it is right."""

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from espalier.engine.model import Model
from espalier.engine.sampling import Sampling, stream_key
from espalier.prm.base import PrmFamily, Reading, StepPath


@dataclass(frozen=True, slots=True)
class CritiqueSettings:
    """How critiques are written.

    Attributes:
        tokens: most tokens of one; a longer one is cut there and judged by what it says so far.
        chains: critiques of each path; its score is the mean of what they come to.
        temperature: softmax temperature; 0 takes the most likely token.
    """

    tokens: int
    chains: int
    temperature: float


class Critic(PrmFamily):
    """How one generative verifier is asked, and how its verdict is read.

    Nothing of a path's text serves the next step: what follows the steps stands between them and the critique. So every
    step is scored from the whole text, on sequences that are given up with its score.

    Attributes:
        settings: how critiques are written.
        closing_tokens: most tokens between the last step and the critique.
        lead_ids: what is fed after a critique; the verdict is the token that follows them.
        verdict_ids: the tokens that say yes and no.
    """

    settings: CritiqueSettings
    closing_tokens: int
    lead_ids: tuple[int, ...]
    verdict_ids: tuple[int, int]

    def __init__(self, model: Model, settings: CritiqueSettings) -> None:
        self.model = model
        self.settings = settings

    @property
    def identity(self) -> str:
        """The name and how critiques are written."""
        return f"{self.name} {self.settings}"

    @property
    def context(self) -> int:
        """Most tokens of a path's text: the rest of the model's context is for the critique and its verdict."""
        return super().context - self.critique_tokens

    @property
    def critiques_cost(self) -> int:
        """Most tokens of all critiques of a path, each written once and read once more up to its verdict."""
        return 2 * self.settings.chains * self.critique_tokens

    @property
    def critique_tokens(self) -> int:
        """Most tokens of one critique and the lead-in to its verdict."""
        return self.settings.tokens + len(self.lead_ids)

    @abstractmethod
    def text_ids(self, path: StepPath) -> tuple[int, ...]:
        """Token ids of all that a critique follows."""

    @abstractmethod
    def kept(self, path: StepPath, token_ids: list[int]) -> list[int]:
        """What of a critique's tokens its verdict is read after; no more than were given."""

    def samplings(self, seed: int, path: StepPath) -> tuple[Sampling, ...]:
        """How each critique is drawn: by the request's seed and the path's text alone, whichever node it is of."""
        text = "\x1f".join((path.problem, *path.steps))
        return tuple(
            Sampling(self.settings.temperature, key=stream_key(seed, text, (i,))) for i in range(self.settings.chains)
        )

    def read(self, path: StepPath) -> Reading:
        """The path's text and the lead-in to a verdict, as they would be read without a critique between them."""
        ids = (*self.text_ids(path), *self.lead_ids)
        return Reading(ids, (len(ids) - 1,), whole=True)

    def score(self, values: np.ndarray, before: float | None) -> float:
        """The softmax of the logits of yes and no, at yes."""
        yes, no = (float(values[0, i]) for i in self.verdict_ids)
        return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))
