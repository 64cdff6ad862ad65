"""The contract of a process-reward-model family."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from espalier.engine.memory.sequences import Sequence
from espalier.engine.models.model import Model


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """What there is to know of a family without loading one; the table in `prm/README.md` is made of these.

    Attributes:
        name: what `--verifier-family` takes.
        models: published checkpoints, as they are spoken of.
        architectures: model classes that `config.json` may name, `*` standing for any beginning.
        head: tensors that turn a hidden state into a number.
        layout: how a problem and its steps become text.
        score_positions: where a step's score is read.
        score: how what is read becomes a score in [0, 1].
        source: where this is written down.
        incremental: whether a step adds tokens to its parent's; else the path is read anew.
        whole_answers: whether only complete answers have a score: best-of-N works, searches that read steps do not.
    """

    name: str
    models: str
    architectures: tuple[str, ...]
    head: str
    layout: str
    score_positions: str
    score: str
    source: str
    incremental: bool = True
    whole_answers: bool = False


class StepPath(NamedTuple):
    """A problem and the steps so far, the newest last; none of them is empty."""

    problem: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """What the model is fed for the newest step of a path, and where its score is read.

    Attributes:
        token_ids: what follows the tokens that the parent's path keeps; with `whole`, all of the path's.
        score_positions: indices into `token_ids`, ascending.
        tail: how many of the last ids are fed for the reading only, and not kept for the steps that follow; a reading
            with a tail reads within it.
        whole: whether `token_ids` begin where the path does. The text may then be tokenised as one: where the parent's
            tokens turn out not to be a beginning of it, the path is read anew from what they have in common.
        targets: for each read, the token whose log-probability is asked for; empty for heads that take none.
    """

    token_ids: tuple[int, ...]
    score_positions: tuple[int, ...]
    num_probe_tokens: int = 0
    whole: bool = False
    targets: tuple[int, ...] = ()


class PrmFamily(ABC):
    """How one family of process reward models reads a problem and its steps.

    Tokens are append-only: a path's are those its parent keeps and then its own, so that the KV of a path's beginning
    serves all of its continuations. A family that adds pieces encodes only the new step; one whose text is tokenised as
    a whole says so in its `ScoringInput`.

    Attributes:
        info: what the family is.
        model: decoder, tokenizer and the head, whose values `score` reduces.
        max_special_tokens: most tokens that a step takes beside its own text, those of its tail included.
        max_probe_tokens: most tokens of a reading's tail.
        rounding: by how much the sums that `score` makes of a path's steps and of a whole path may differ.
    """

    info: FamilyInfo
    model: Model
    max_special_tokens: int = 0
    max_probe_tokens: int = 0
    rounding: float = 0.0

    @property
    def name(self) -> str:
        """The family's name, as shown to users."""
        return self.info.name

    @property
    def context(self) -> int:
        """Most tokens that a path may have."""
        return self.model.config.max_positions

    @property
    def identity(self) -> str:
        """What tells its scores from those of any other family over the same weights."""
        return self.info.name

    @abstractmethod
    def prompt_ids(self, problem: str) -> list[int]:
        """Token ids that every path of the problem begins with, as far as is known before the first step."""

    @abstractmethod
    def read(self, path: StepPath) -> ScoringInput:
        """What to feed and where to read for the newest step of `path`, its parent's tokens being there."""

    def score(self, values: np.ndarray, before: float | None) -> float:
        """The step's score in [0, 1] from what the head gave, float32 `[reads, k]`.

        Args:
            values: in order of position.
            before: the score of the step before, None for the first.
        """
        return float(values[0, 0])

    def whole(self, path: StepPath) -> ScoringInput:
        """The whole path as one text, read for its newest step: what `read` must agree with.

        Its values give the step's score without that of the step before. Families that can build it in a way of its
        own do, so that the two check each other.
        """
        return joined(self, path)


def joined(family: PrmFamily, path: StepPath) -> ScoringInput:
    """The whole path put together from the readings of its steps."""
    ids: tuple[int, ...] = tuple(family.prompt_ids(path.problem))
    for end in range(1, len(path.steps)):
        step = family.read(StepPath(path.problem, path.steps[:end]))
        kept = step.token_ids[: len(step.token_ids) - step.num_probe_tokens]
        ids = kept if step.whole else ids + kept
    last = family.read(path)
    if last.whole:
        return last
    score_positions = tuple(len(ids) + i for i in last.score_positions)
    return ScoringInput(ids + last.token_ids, score_positions, last.num_probe_tokens, whole=True, targets=last.targets)


def stripped_step(step: str) -> str:
    """A step's text without the newlines around it, which families put back in their own way."""
    return step.strip("\n")


def without_special_tokens(text: str, special_tokens: tuple[str, ...]) -> str:
    """`text` with the family's own marks spelt so that they are plain text: `<extra_0>` becomes `<extra 0>`.

    A step that itself holds a mark must neither add a place to read nor end a turn.
    """
    for token in special_tokens:
        if token in text:
            plain = token.replace("_", " ") if "_" in token else f"{token[0]} {token[1:]}"
            text = text.replace(token, plain)
    return text


def without_label(text: str, label: str) -> str:
    """A step without the label that its family puts before it, where it brings it itself: `## Step 2: …`."""
    own = text.lstrip("# ")
    return own[len(label) :].lstrip() if label and own.startswith(label) else text


class Verdict(NamedTuple):
    """A verifier sequence whose work is done, and the score of the step it ends in; None where nothing was read.

    `late_tokens` are those that scoring took beside the `Scoring`'s: how many was not known before. `tag` is what the
    scoring was asked with.
    """

    sequence: Sequence
    score: float | None
    late_tokens: int = 0
    tag: Any = None


class Scoring(NamedTuple):
    """A step that is being scored: the sequence that will hold it, and the tokens it adds to its parent's."""

    sequence: Sequence
    num_tokens: int
