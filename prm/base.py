"""The interface of a process-reward-model family."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """Description of a family, available without loading one; the table in `prm/README.md` has more.

    Attributes:
        name: value of `--verifier-family`.
        architectures: model classes in `config.json`; a leading `*` matches any prefix.
        score: how the values read become a score in [0, 1].
        whole_answers: whether only complete answers have a score; searches that use step scores are then refused.
        of_sampling: whether scores also depend on how the generator sampled the steps, so that given texts have none.
    """

    name: str
    architectures: tuple[str, ...]
    score: str
    whole_answers: bool = False
    of_sampling: bool = False

    def fits(self, architecture: str) -> bool:
        """Return whether checkpoints of the family may have this class."""
        return any(
            architecture.endswith(pattern[1:]) if pattern.startswith("*") else architecture == pattern
            for pattern in self.architectures
        )


class StepPath(NamedTuple):
    """A problem and its steps so far, in order; none is empty."""

    problem: str
    steps: tuple[str, ...]


class Sampled(NamedTuple):
    """Sum of the log-probabilities of some steps' tokens as the generator sampled them, and the number of these tokens.

    Both are 0 for given texts.
    """

    log_probability: float = 0.0
    num_tokens: int = 0

    @property
    def mean(self) -> float:
        """Mean log-probability of the tokens; 0 without any."""
        return self.log_probability / self.num_tokens if self.num_tokens else 0.0

    def and_then(self, later: "Sampled") -> "Sampled":
        """These steps and later ones together."""
        return Sampled(self.log_probability + later.log_probability, self.num_tokens + later.num_tokens)


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """The tokens to feed for the newest step of a path, and where to read its score.

    Attributes:
        token_ids: ids that follow the kept ids of the parent's path; with `full_path`, all ids of the path.
        score_positions: indices into `token_ids`, ascending.
        num_probe_tokens: number of ids at the end that are fed only to read the score and are not kept; if not 0, it is
            read at their last.
        full_path: whether `token_ids` start at the beginning of the path, because its text is tokenized as a whole. If
            the parent's ids are not a prefix of them, the path is computed again after their common prefix.
        targets: for each score position, the token whose log-probability is read; empty for heads without targets.
    """

    token_ids: tuple[int, ...]
    score_positions: tuple[int, ...]
    num_probe_tokens: int = 0
    full_path: bool = False
    targets: tuple[int, ...] = ()


Detect = Callable[[Checkpoint], str | None]
"""Returns the reason for which a checkpoint of the family's class belongs to the family; None if it does not."""


class PrmFamily(ABC):
    """A family of process reward models: its layout of a problem and its steps, and the meaning of its values.

    A path's token ids are those kept by its parent followed by its own, so that all continuations of a path share its
    KV. Most families encode only the new step; a family that tokenizes the text as a whole returns a
    `full_path` `ScoreInput`.

    Attributes:
        info: description of the family.
        detect: detects the family in checkpoints of its class; None where only `--verifier-family` chooses it.
        session: the class of its sessions, a `VerifierSession`; None for `StepSession`, which is incremental.
        model: decoder, tokenizer and head; `score` reduces the head's values.
        max_special_tokens: maximum tokens of a step besides its own text, including probe tokens.
        max_probe_tokens: maximum probe tokens of a step.
        other_probes: further probe tokens, each fed on a fork of its own in place of those of a step's `ScoreInput` and
            read at their last; what they give follows in `values`.
        costly: whether a score costs tokens besides the step's own, a question or a rationale. Where only a path's last
            score counts, no others are then computed.
        rounding: maximum difference between scores computed step by step and from the whole path, from summation order.
    """

    info: FamilyInfo
    detect: ClassVar[Detect | None] = None
    session: ClassVar[Any] = None
    model: Model
    max_special_tokens: int = 0
    max_probe_tokens: int = 0
    other_probes: tuple[tuple[int, ...], ...] = ()
    costly: bool = False
    rounding: float = 0.0

    def __init__(self, model: Model) -> None:
        self.model = model

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a checkpoint of the family.

        Raises:
            CheckpointError: a tensor or token is missing, or the checkpoint is of another kind.
        """
        raise NotImplementedError

    @cached_property
    def plain_text(self) -> "PlainText":
        """Makes texts of callers free of the model's control tokens; what `prompt_ids` and `read` are given is."""
        return PlainText(self.model.tokenizer)

    @property
    def name(self) -> str:
        """The family's name."""
        return self.info.name

    @property
    def context(self) -> int:
        """Maximum tokens of a path."""
        return self.model.config.max_positions

    @property
    def other_probe_tokens(self) -> int:
        """Tokens of a step's `other_probes` together."""
        return sum(map(len, self.other_probes))

    @property
    def identity(self) -> str:
        """Identifies its scores among those of other families with the same weights; recorded in results."""
        return self.info.name

    @abstractmethod
    def prompt_ids(self, problem: str) -> list[int]:
        """Token ids of the part of the prompt that does not depend on the first step."""

    @abstractmethod
    def read(self, path: StepPath) -> ScoreInput:
        """Return the tokens to feed for the newest step of `path`, given that its parent's are computed."""

    def evidence(self, values: np.ndarray, before: Any, sampled: Sampled) -> Any:
        """Evidence for a path's score once its newest step is read; by default the step's score itself.

        Args:
            values: the head's output, float32 `[len(score_positions) + len(other_probes), k]`.
            before: evidence of the path up to the step before; None for the first step.
            sampled: how the step was sampled.
        """
        return float(values[0, 0])

    def score(self, evidence: Any) -> float:
        """The score in [0, 1] of a path's newest step."""
        return evidence

    def full_evidence(self, path: StepPath, values: np.ndarray, sampled: Sequence[Sampled]) -> Any:
        """The same evidence, from the values that `full_path` reads, and how each step of the path was sampled."""
        return self.evidence(values, None, reduce(Sampled.and_then, sampled, Sampled()))

    def chat(self, content: str, system: str | None = None) -> str:
        """The user's turn, after a system message if there is one, and the opening of the assistant's."""
        before = [] if system is None else [{"role": "system", "content": system}]
        return self.model.tokenizer.render_chat([*before, {"role": "user", "content": content}])

    def chat_ids(self, content: str, system: str | None = None) -> list[int]:
        """Token ids of `chat`."""
        return self.model.tokenizer.encode(self.chat(content, system))

    def full_path(self, path: StepPath) -> ScoreInput:
        """Return the full path as one input, for the newest step; `read` must give the same score.

        Its values give the score without evidence of the steps before. Families override this where they can build the
        text independently of `read`, so that each checks the other.
        """
        last = self.read(path)
        if last.full_path:
            return last
        ids: tuple[int, ...] = tuple(self.prompt_ids(path.problem))
        for end in range(1, len(path.steps)):
            step = self.read(StepPath(path.problem, path.steps[:end]))
            kept = step.token_ids[: len(step.token_ids) - step.num_probe_tokens]
            ids = kept if step.full_path else ids + kept
        positions = tuple(len(ids) + i for i in last.score_positions)
        return replace(last, token_ids=ids + last.token_ids, score_positions=positions, full_path=True)


def with_probe(path: ScoreInput, probe: tuple[int, ...]) -> ScoreInput:
    """A path with other probe tokens, which are read at their last."""
    ids = (*path.token_ids[: len(path.token_ids) - path.num_probe_tokens], *probe)
    return replace(path, token_ids=ids, score_positions=(len(ids) - 1,), num_probe_tokens=len(probe))


def stripped_step(step: str) -> str:
    """Strip the newlines around a step; families add their own delimiters."""
    return step.strip("\n")


def special_tokens_in(text: str, tokenizer: TextTokenizer) -> tuple[str, ...]:
    """The special tokens of a text, such as those with which a chat template opens and closes turns."""
    ids = dict.fromkeys(tokenizer.encode(text))
    return tuple(tokenizer.token(i) for i in ids if not tokenizer.token_bytes[i])


def without_special_tokens(text: str, special_tokens: tuple[str, ...]) -> str:
    """Break up special tokens in `text`, so that they are encoded as plain text: `<extra_0>` becomes `<extra 0>`.

    Otherwise a step could add a score position or end a chat turn.
    """
    for token in special_tokens:
        if token in text:
            plain = token.replace("_", " ") if "_" in token else f"{token[0]} {token[1:]}"
            text = text.replace(token, plain)
    return text


class PlainText:
    """Breaks up the control tokens of a model in texts of callers and other models; see `without_special_tokens`."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        tokens = sorted(tokenizer.control_tokens, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, tokens))) if tokens else None

        @lru_cache(4096)  # the steps of a path are read again with each new one
        def plain(text: str) -> str:
            return pattern.sub(lambda found: without_special_tokens(found[0], (found[0],)), text) if pattern else text

        self.of = plain

    def path(self, problem: str, steps: Iterable[str]) -> StepPath:
        """A path of plain texts."""
        return StepPath(self.of(problem), tuple(map(self.of, steps)))


def without_label(text: str, label: str) -> str:
    """Strip the label that the family adds itself from a step that already has it, such as `## Step 2: …`."""
    own = text.lstrip("# ")
    return own[len(label) :].lstrip() if label and own.startswith(label) else text
