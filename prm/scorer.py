"""The contract of scoring: a `Scorer` gives the steps of searches their scores, a `ScoreSession` those of one search.

A search hands in nodes and gets `StepScore`s back; it never asks what kind of scorer it has. A session owns whatever it
computes scores with, such as verifier sequences. The methods that return `StepScore`s may be generators: the caller
takes one after the other and stores it in its node before it takes the next, which may depend on it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Literal, Protocol

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Done, Generated
from espalier.prm.full_rescore import FullRescore
from espalier.prm.limits import UNLIMITED, PathLimits


class StepNode(Protocol):
    """A node of a search tree, as scorers see it: one step of a path; nodes are compared by identity.

    Attributes:
        text: the step's text, with its delimiter.
        score: the step's score; None without one.
        log_probability: sum of the log-probabilities of its tokens under the generator; 0 for a given text.
        num_tokens: tokens that were sampled for it; 0 for a given text.
    """

    text: str
    score: float | None
    log_probability: float
    num_tokens: int

    @property
    def parent(self) -> "StepNode | None":
        """The step before it; None for the root, which has no text."""
        ...

    def lineage(self) -> Sequence["StepNode"]:
        """The path's nodes from the first step to this one, without the root."""
        ...


def steps_with_text(node: StepNode) -> list[StepNode]:
    """The steps of a node's path that have any text; scorers read no others."""
    return [step for step in node.lineage() if step.text.strip()]


class ScoreStatus(Enum):
    """State of a step that was handed in to be scored."""

    SCORED = auto()
    PENDING = auto()
    UNREADABLE = auto()  # too long for the scorer, or has a token that its model has no embedding for
    OVER_BUDGET = auto()


@dataclass(frozen=True, slots=True)
class StepScore:
    """The score of a step, or why there is none yet or at all.

    Attributes:
        node: the node as it was handed in; the root for the problem itself.
        score: in [0, 1]; None unless the step was scored.
        tokens: verifier tokens that the step needs, besides those reported for it before.
        status: its state; PENDING steps are reported again.
        reason: for unreadable steps, why.
    """

    node: Any
    score: float | None = None
    tokens: int = 0
    status: ScoreStatus = ScoreStatus.SCORED
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ScoredSearch:
    """A search whose steps are to be scored.

    Attributes:
        engine: runs the models.
        owner: owner of the engine's work.
        root: root of the tree.
        problem: the problem's text.
        prompt: its token ids, from `Scorer.prompt`.
        salt: prefixes are shared only with sequences of the same salt; see `Engine.open`.
        seed: the request's seed.
        limits: bounds on the verifier's tokens; None for those of the model alone.
        budget: the verifier tokens that a node's step may still use.
        sampled: whether the steps are sampled by the engine's generator; else they are given texts.
        score_final_only: whether the last steps of paths are the only ones to be scored, so that each path is read at
            once.
    """

    engine: Engine
    owner: Hashable
    root: StepNode
    problem: str
    prompt: Sequence[int] = ()
    salt: bytes = b""
    seed: int = 0
    limits: PathLimits | None = None
    budget: Callable[[Any], int] = lambda node: UNLIMITED
    sampled: bool = False
    score_final_only: bool = False


class ScoreSession:
    """The scores of one search. As it stands, for scores known from sampling, or for a search without scores.

    `want`, `skip` and `take` report a node's score, or that it has none, only after its parent's; a session implements
    `_want`, `_skip` and `_take`, which may report in any order.

    Attributes:
        head: head of the generator's model that sampling reads with each step; empty for none.
        prompt_tokens: length of the problem in verifier tokens.
    """

    head: str = ""
    prompt_tokens: int = 0

    def __init__(self, check: FullRescore | None = None) -> None:
        self._check = check
        self._unreported: dict[StepNode, list[StepScore]] = {}  # by node, its children's reports

    @property
    def pending(self) -> int:
        """Scores that the full-rescore check has yet to compute again."""
        return self._check.pending if self._check else 0

    def prefill(self) -> None:
        """Submit the computation of the problem, once, if it is affordable."""

    def score_sampled(self, node: StepNode, done: Generated) -> float | None:
        """Return the score that a step's own tokens give as it is sampled; None if the step is scored by its text."""

    def want(self, node: StepNode, in_place: bool = False) -> Iterable[StepScore]:
        """Score a node's step; returns what is known now, `take` the rest.

        Args:
            node: its parent was handed in before, to this method or to `skip`.
            in_place: whether the parent has no other child.
        """
        self._unreported[node] = []
        return self._in_order(self._want(node, in_place))

    def skip(self, node: StepNode) -> Iterable[StepScore]:
        """Hand in a node that gets no score; it is reported when its parent is."""
        self._unreported[node] = []
        return self._in_order(self._skip(node))

    def take(self, done: Done) -> Iterable[StepScore]:
        """Process finished work of the session.

        Raises:
            ScoreMismatchError: the full-rescore check found a different score.
        """
        if self._check and self._check.owns(done):
            self._check.take(done)
            return ()
        return self._in_order(self._take(done))

    def _want(self, node: StepNode, in_place: bool) -> Iterable[StepScore]:
        return (StepScore(node, node.score),)

    def _skip(self, node: StepNode) -> Iterable[StepScore]:
        return (StepScore(node),)

    def _take(self, done: Done) -> Iterable[StepScore]:
        raise NotImplementedError

    def _in_order(self, reports: Iterable[StepScore]) -> Iterator[StepScore]:
        """Pass on what is reported; a node's last report waits for its parent's."""
        for step in reports:
            if step.status is ScoreStatus.PENDING:
                yield step
            elif (waiting := self._unreported.get(step.node.parent)) is not None:
                waiting.append(step)
            else:
                ready = [step]
                while ready:
                    yield (step := ready.pop(0))
                    ready[:0] = self._unreported.pop(step.node, ())

    def is_check(self, done: Done) -> bool:
        """Return whether work belongs to the full-rescore check; its tokens do not count as usage."""
        return self._check is not None and self._check.owns(done)

    def release(self, node: StepNode) -> None:
        """Release what a node holds, as soon as all children handed in for it are being scored; unknown nodes too."""

    def sequences(self) -> list[KVSequence]:
        """The sequences that nodes hold."""
        return []

    def close(self) -> None:
        """Release everything; the owner's work must have been cancelled."""
        self._unreported.clear()
        if self._check:
            self._check.close()


@dataclass(frozen=True, slots=True)
class ScorerNeeds:
    """Needs of a scorer in the searches whose steps it scores.

    Attributes:
        reads: what a score is computed from: `text`, so that given texts have scores, too; `tokens`, a step as it was
            sampled; `probes`, those of its path, so that each step that is not complete is probed first.
        final_only: when only the last step of each path is scored: `never`; `if enough`, where no other score counts,
            which suits scores that cost much more than sampling a step; `always`, for scores of whole answers.
        merges: siblings of equal `text` are merged; or only those of equal `tokens`, where others may get other scores.
        question_lengths: tokens of each question that it feeds after a step, on a fork of the generator's sequence of
            the path; a scorer that asks there has no other sequences in searches.
        rescored: role whose KV the full-rescore check uses, for one more path; empty without a check. In searches it is
            the generator with `question_lengths`.
    """

    reads: Literal["text", "tokens", "probes"] = "text"
    final_only: Literal["never", "if enough", "always"] = "never"
    merges: Literal["text", "tokens"] = "text"
    question_lengths: tuple[int, ...] = ()
    rescored: str = ""

    @property
    def scores(self) -> Literal["steps", "answers"]:
        """The scores that there are: of every step, or of complete answers only."""
        return "answers" if self.final_only == "always" else "steps"

    @property
    def rescored_in_searches(self) -> str:
        """Role whose KV the full-rescore check of a search uses, for one more path; empty without a check."""
        return GENERATOR if self.rescored and self.question_lengths else self.rescored

    def score_final_only(self, last_score_suffices: bool) -> bool:
        """Return whether a search scores the last steps of paths only, given whether the others count in it."""
        return self.final_only == "always" or (self.final_only == "if enough" and last_score_suffices)


class Scorer(ABC):
    """Scores the steps of searches.

    Attributes:
        name: what it is called in messages.
        needs: what it needs of a search.
        digests: digests of the weights or code that its scores depend on, by role, besides those of engine models.
    """

    name: str
    needs: ScorerNeeds = ScorerNeeds()
    digests: Mapping[str, str] = MappingProxyType({})

    @property
    def identity(self) -> str:
        """Identifies its scores among those of other scorers on the same weights; recorded in results."""
        return self.name

    def prompt(self, problem: str) -> tuple[int, ...]:
        """Return the problem's token ids in the verifier; empty for a scorer that opens no sequences there.

        Raises:
            NoEmbeddingError: the problem has tokens without an embedding in the model.
            RequestTooLargeError: the problem alone fills the verifier's context.
        """
        return ()

    def bounds(
        self, prompt_tokens: int, generator: PathLimits, max_steps: int, tokenizer: TextTokenizer
    ) -> PathLimits | None:
        """Return upper bounds on the verifier tokens of a search; None for a scorer that computes none.

        Args:
            prompt_tokens: length of `prompt`.
            generator: bounds on the generator's tokens.
            max_steps: maximum steps of a path.
            tokenizer: the generator's.
        """
        return None

    def rescore_check(self, search: ScoredSearch, rounding: float = 0.0, head: str = "") -> FullRescore | None:
        """The full-rescore check of a search, see `FullRescore`; None without a check."""
        if not self.needs.rescored:
            return None
        role = self.needs.rescored_in_searches if search.sampled else self.needs.rescored
        return FullRescore(search.engine, search.owner, role, self.name, rounding, head)

    @abstractmethod
    def begin(self, search: ScoredSearch) -> ScoreSession:
        """Start scoring a search."""
