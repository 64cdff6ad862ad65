"""The work an engine takes and what it gives back; imported without torch, as requests know some of its limits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from espalier.engine.guidance.matcher import Matcher
    from espalier.engine.memory.sequences import KVSequence

LOG_PROBABILITIES = "log-probabilities"
"""Name of the head that every language model has besides its logits: see `TOP_TOKENS`."""
TOP_TOKENS = 20
"""Likeliest tokens that the head `LOG_PROBABILITIES` reads.

Its values are `[R, 1 + 2 * TOP_TOKENS]`: the log-probability of the target, 0 without one, then the ids of the
likeliest tokens, exact in float32 as `MAX_TOKEN_ID` is, then their log-probabilities.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Numbers added to logits and taken off before anything else looks at them, by the tokens before a draw.

    In the order in which vLLM applies them: the bias, the repetition penalty, the frequency and the presence penalty.
    One object serves all draws of a request: each step groups draws by it, by what it is and not by its values.

    Attributes:
        repetition: divides the logits of tokens that stand anywhere before the draw, and multiplies negative ones;
            above 0, 1 for none. As transformers and vLLM have it.
        presence: taken off the logits of tokens behind the prompt; 0 for none. As OpenAI and vLLM have it.
        frequency: taken off for each time that they stand there, likewise.
        bias: ids of tokens, each once, with what is added to their logits.
        prompt_tokens: length of the prompt.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    prompt_tokens: int = 0

    @property
    def read_tokens(self) -> bool:
        """True if they depend on the tokens before a draw."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


NO_PENALTIES = Penalties()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one sequence: penalties, the temperature, then each filter on what the one before it left.

    Attributes:
        temperature: softmax temperature; 0 takes the most likely token.
        top_k: most likely tokens kept; 0 keeps all.
        top_p: nucleus mass kept of those, in (0, 1].
        min_p: tokens kept are at least this share as likely as the most likely one, in [0, 1].
        key: stream of randomness, from `stream_key`; with the token's position it fixes every draw.
        banned: ids of tokens that are never drawn; the filters count what is left.
        penalties: on the logits that all of the above looks at; log-probabilities are told without them.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: int = 0
    banned: tuple[int, ...] = ()
    penalties: Penalties = NO_PENALTIES


def stream_key(seed: int, problem: str, path: tuple[int, ...]) -> int:
    """The 64-bit stream of one node: a hash of the request's seed, the problem's text and the node's path.

    The batch, the slot and the order of arrival do not enter, so a request gives the same text alone and beside others.
    """
    streams = PathStreams(seed, problem)
    for index in path:
        streams = streams.child(index)
    return streams.key


class PathStreams:
    """The streams along a path, each from the one before it, so that a step's cost does not grow with its path."""

    __slots__ = ("_before", "_end", "_path")

    def __init__(self, seed: int, problem: str) -> None:
        """Begin at the root."""
        self._path = hashlib.sha256(f"{seed}\x1f".encode())
        self._before = ""
        self._end = f"\x1f{problem}".encode()

    def child(self, index: int) -> PathStreams:
        """Return the stream of a child."""
        child = copy(self)
        child._path, child._before = self._path.copy(), "."
        child._path.update(f"{self._before}{index}".encode())
        return child

    @property
    def key(self) -> int:
        """The node's `stream_key`."""
        whole = self._path.copy()
        whole.update(self._end)
        return int.from_bytes(whole.digest()[:8], "little")


class StopCause(StrEnum):
    """Why a generation stopped."""

    DELIMITER = "delimiter"
    EOS = "eos"
    LENGTH = "length"  # its own token limit
    CONTEXT = "context"  # the model's longest context
    MARK = "mark"  # one of `StepMarks`
    ERROR = "error"  # its matcher cannot go on


@dataclass(frozen=True, slots=True)
class StepMarks:
    """Marks that end a step whatever stands before them, and texts that a step is not cut in.

    Attributes:
        end_ids: tokens that end a step, also where they end a sequence elsewhere.
        end_text: text that ends a step, for a mark of several tokens; empty for none.
        unbroken: texts that a full step finishes, see `Generate.overrun`.
    """

    end_ids: tuple[int, ...] = ()
    end_text: str = ""
    unbroken: tuple[str, ...] = ()


NO_MARKS = StepMarks()


@dataclass(frozen=True, slots=True, eq=False)
class Generate:
    """Sample one step for each of `samplings`, from one sequence.

    The sequence's pending tokens are computed once. Samplings that draw the same tokens are one child, which is forked
    where they diverge, so that nothing is computed twice; without `merge_equal`, each sampling is a child of its own
    from its first token on. The owner keeps the sequence and is handed the children, and releases all of them.

    Attributes:
        owner: the search that the work belongs to, by which `Engine.cancel` finds it.
        samplings: one for each step wanted.
        max_tokens: limit on each child's new tokens.
        delimiter: text that ends a step once the step has other content; empty for no such stop.
        markers: words that end a step, once it has other content, where a sentence begins with one of them; with the
            character after it, which shows that the word is over.
        marks: marks that end a step.
        overrun: tokens beyond `max_tokens` by which a full step may finish a letter of several bytes, or one of the
            marks' unbroken texts.
        in_place: extend the sequence itself instead of forking it; needs exactly one sampling.
        merge_equal: whether samplings that draw the same tokens are one child.
        head: one of the model's other heads, read at the state that each child's last token is drawn from, which costs
            no token; empty for none.
        matcher: what may be written from the sequence's end on, which each child goes on with in a copy; None for
            anything.
        tag: what the work is for, whatever its owner likes; comes back with it and is never looked at.
    """

    owner: Hashable
    sequence: KVSequence
    samplings: tuple[Sampling, ...]
    max_tokens: int
    delimiter: str = "\n\n"
    markers: tuple[str, ...] = ()
    marks: StepMarks = NO_MARKS
    overrun: int = 0
    in_place: bool = False
    merge_equal: bool = True
    head: str = ""
    matcher: Matcher | None = None
    tag: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """One child's step.

    Attributes:
        indices: which samplings of `work` drew it, ascending.
        sequence: the child, or the sequence itself when generated in place.
        token_ids: new tokens, an end-of-sequence token included.
        text: their text, the delimiter included, an end-of-sequence token not.
        log_probabilities: of the new tokens under the untempered model, without penalties, masks and filters.
        cause: why it stopped.
        own_tokens: how many of its last tokens no child of a lower index shares; summed over all children they are the
            tokens of the tree.
        computed_tokens: tokens whose KV was computed for this child. Tokens that children share, and the sequence's
            pending tokens, count for the child of the lowest index.
        values: what `work.head` gave, float32 `[k]`; None without a head.
        matcher: what may be written from its end on; None without one in `work`.
        drafted_tokens: tokens that were proposed for it and verified.
        accepted_tokens: those of them that it drew and went on behind.
    """

    work: Generate
    indices: tuple[int, ...]
    sequence: KVSequence
    token_ids: list[int]
    text: str
    log_probabilities: list[float]
    cause: StopCause
    own_tokens: int
    computed_tokens: int
    values: np.ndarray | None = None
    matcher: Matcher | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def log_probability(self) -> float:
        """The log-probability of the whole step."""
        return math.fsum(self.log_probabilities)


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Append tokens to a sequence and read the model's head at some of them.

    Attributes:
        owner: the search that the work belongs to, by which `Engine.cancel` finds it.
        token_ids: the new tokens; may be empty, to compute the sequence's pending tokens.
        score_positions: indices into `token_ids`, ascending.
        targets: for each read, the token that the head is asked about; empty for a head that takes none.
        tag: as in `Generate`.
        head: which of the model's heads to read; empty for its own, see `Model`.
    """

    owner: Hashable
    sequence: KVSequence
    token_ids: tuple[int, ...]
    score_positions: tuple[int, ...]
    targets: tuple[int, ...] = ()
    tag: Any = None
    head: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The head's values of one Score.

    Attributes:
        values: float32 `[len(score_positions), k]`, a row for each position of `work.score_positions`.
        computed_tokens: tokens whose KV was computed for it.
    """

    work: Score
    values: np.ndarray
    computed_tokens: int


Work = Generate | Score
Done = Generated | Scored
