"""A session of scores: steps that come one after another, each below an earlier one, and the scores that go back.

A step is a node of a tree. The caller numbers the nodes; `ROOT` is the problem. Any node may have several steps below
it, and steps below one node share what the verifier has computed up to it.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.conversation import ChatMessage, conversation_text
from espalier.search.request import MAX_PROBLEM_BYTES, violations_with_problem
from espalier.search.result import StopReason
from espalier.search.schema import text_violations

ROOT = 0
"""The node of the problem."""
MAX_NODE = 2**63 - 1
MAX_TURN_STEPS = 4096
_MAX_OPEN_NODES = 4 * MAX_TURN_STEPS
_MAX_STEP_BYTES = MAX_PROBLEM_BYTES
_CHARACTERS_PER_TOKEN = 3


@dataclass(frozen=True, slots=True)
class ScoreSessionRequest:
    """A problem whose solutions are scored step by step as they come.

    Attributes:
        problem: what is solved.
        history: messages before the problem; see `SearchRequest`.
        max_nodes: nodes that are held at a time, those with held nodes below them included.
        max_tokens: verifier tokens of all nodes that are held at a time, without the problem. KV memory for both is set
            aside while the session is open.
        seed: of scorers that sample.
        verifier_budget: verifier tokens of the whole session at most, including the problem; None for no limit.
        time_limit: seconds from submission after which the session ends; None for no limit.
    """

    problem: str
    history: tuple[ChatMessage, ...] = ()
    max_nodes: Annotated[int, Interval(ge=1, le=4096)] = 256
    max_tokens: Annotated[int, Interval(ge=1, le=2**20)] = 8192
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
    verifier_budget: Annotated[int | None, Interval(ge=1, le=16 * 2**20)] = None
    time_limit: Annotated[float | None, Interval(gt=0, le=24 * 3600)] = None

    algorithm: ClassVar[str] = "score-session"

    @property
    def problem_text(self) -> str:
        """The problem with the turns before it, as a verifier reads it."""
        return conversation_text(self.problem, self.history) if self.history else self.problem

    @property
    def size(self) -> int:
        """Characters of the problem and the messages before it."""
        return len(self.problem_text)

    @property
    def estimated_tokens(self) -> int:
        """About how many tokens are read, for shares."""
        return self.size // _CHARACTERS_PER_TOKEN + self.max_tokens

    def validate(self) -> None:
        """Check every field.

        Raises:
            InvalidRequestError: lists all violations.
        """
        if found := violations_with_problem(self):
            raise InvalidRequestError(found)


@dataclass(frozen=True, slots=True)
class SessionStep:
    """A step to be scored: its node, the node that it continues, and its text."""

    node: int
    parent: int
    text: str


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One message of a caller.

    Attributes:
        steps: steps to be scored, parents first.
        release: nodes below which no further step comes, taken after `steps`; their KV is freed once no step below them
            needs it.
        last: whether nothing follows; the session ends when all its steps are scored.
    """

    steps: tuple[SessionStep, ...] = ()
    release: tuple[int, ...] = ()
    last: bool = False


@dataclass(frozen=True, slots=True)
class NodeScore:
    """The score of a step: in [0, 1], or None and the reason."""

    node: int
    score: float | None = None
    reason: str = ""


def unscored(node: int, stop_reason: StopReason) -> NodeScore:
    """The score of a step that a session left without one as it ended."""
    return NodeScore(node, reason=f"the session has ended: {stop_reason}")


@dataclass(frozen=True, slots=True)
class StepsScored:
    """Scores of steps of a session, in the order in which they became known."""

    search_id: str
    scores: tuple[NodeScore, ...]


class OpenNodes:
    """The nodes of one session below which steps may come; refuses turns that do not fit them."""

    def __init__(self) -> None:
        self._open = {ROOT}
        self._numbers = itertools.count(ROOT + 1)

    def turn(self, steps: Iterable[tuple[int, str]] = (), release: Iterable[int] = ()) -> SessionTurn:
        """Make a turn, in which each step gets the next number, and take it over.

        Args:
            steps: the node that each step continues, and its text.
            release: see `SessionTurn`.

        Raises:
            InvalidRequestError: see `take`.
        """
        numbered = tuple(SessionStep(next(self._numbers), parent, text) for parent, text in steps)
        turn = SessionTurn(numbered, tuple(release))
        self.take(turn)
        return turn

    def take(self, turn: SessionTurn) -> None:
        """Check a turn and take it over.

        Raises:
            InvalidRequestError: a node is in use, unknown or no node, or a step is no text; nothing is taken over.
        """
        nodes, found = set(self._open), list[Violation]()
        if len(turn.steps) > MAX_TURN_STEPS:
            most = f"must be at most {MAX_TURN_STEPS} at a time, are {len(turn.steps)}"
            raise InvalidRequestError([Violation("steps", most)])
        for index, step in enumerate(turn.steps):
            place = f"steps[{index}]"
            if not ROOT < step.node <= MAX_NODE:
                found.append(Violation(f"{place}.node", f"must be between 1 and 2^63 - 1, is {step.node}"))
            elif step.node in nodes:
                found.append(Violation(f"{place}.node", f"{step.node} is in use; give each step a node of its own"))
            if step.parent not in nodes:
                found.append(Violation(f"{place}.parent", f"there is no node {step.parent}, or it was released"))
            if not step.text.strip():
                found.append(Violation(f"{place}.text", "must not be empty"))
            found += text_violations(f"{place}.text", step.text, _MAX_STEP_BYTES)
            nodes.add(step.node)
        if len(nodes) > _MAX_OPEN_NODES:
            found.append(Violation("steps", f"are more than {_MAX_OPEN_NODES} that were not released; release some"))
        found += _release_violations(turn.release, nodes)
        if found:
            raise InvalidRequestError(found)
        self._open = nodes.difference(turn.release)


def _release_violations(released: Iterable[int], nodes: set[int]) -> list[Violation]:
    unknown = sorted({node for node in released if node == ROOT or node not in nodes})
    return [Violation("release", f"there is no node {node}, or it was released") for node in unknown[:16]]
