"""Scores of given steps: the requests for them and their results.

Solutions that are known are scored at once (`ScoreRequest`). In a session (`ScoreSessionRequest`) steps come one after
another, each below an earlier one: a step is a node of a tree. The caller numbers the nodes; `ROOT` is the problem. Any
node may have several steps below it, and steps below one node share what the verifier has computed up to it.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.common_fields import Aggregation
from espalier.search.conversation import MAX_PROBLEM_BYTES, AboutProblem, ChatMessage
from espalier.search.result import StopReason, Usage
from espalier.search.schema import text_violations

ROOT = 0
"""The node of the problem."""
MAX_NODE = 2**63 - 1
MAX_TURN_STEPS = 4096
_MAX_OPEN_NODES = 4 * MAX_TURN_STEPS
_MAX_STEP_BYTES = MAX_PROBLEM_BYTES
MAX_SOLUTIONS = 256
MAX_STEPS = 256
MAX_TOTAL_STEPS = 4096
MAX_SOLUTION_BYTES = 2**20
"""Size of all steps of a request together."""
_CHARACTERS_PER_TOKEN = 3


@dataclass(frozen=True, slots=True)
class ScoreSessionRequest(AboutProblem):
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
    def estimated_tokens(self) -> int:
        """About how many tokens are read, for shares."""
        return self.size // _CHARACTERS_PER_TOKEN + self.max_tokens


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
        unknown = sorted(set(turn.release).difference(nodes - {ROOT}))
        found += [Violation("release", f"there is no node {node}, or it was released") for node in unknown[:16]]
        if found:
            raise InvalidRequestError(found)
        self._open = nodes.difference(turn.release)


@dataclass(frozen=True, slots=True)
class ScoreRequest(AboutProblem):
    """A problem and solutions whose steps are scored; steps that solutions begin with together are read once.

    Attributes:
        problem: what is solved.
        solutions: the steps of each, in order.
        history: messages before the problem; see `SearchRequest`.
        aggregation: how a solution's score is made of its steps'.
        seed: of scorers that sample.
        verifier_budget: verifier tokens of all solutions at most, including the problem; None for no limit.
        time_limit: seconds from submission after which steps are left without scores; None for no limit.
    """

    problem: str
    solutions: tuple[tuple[str, ...], ...]
    history: tuple[ChatMessage, ...] = ()
    aggregation: Aggregation = Aggregation.LAST
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
    verifier_budget: Annotated[int | None, Interval(ge=1, le=16 * 2**20)] = None
    time_limit: Annotated[float | None, Interval(gt=0, le=24 * 3600)] = None

    algorithm: ClassVar[str] = "score"
    checked_apart: ClassVar = ("solutions",)

    @property
    def beside(self) -> Iterable[str]:
        """See `AboutProblem`."""
        return itertools.chain.from_iterable(self.solutions)

    @property
    def estimated_tokens(self) -> int:
        """About how many tokens are read, for shares."""
        return self.size // _CHARACTERS_PER_TOKEN

    def all_violations(self) -> list[Violation]:
        """See `AboutProblem`."""
        return AboutProblem.all_violations(self) + self._of_solutions()

    def _of_solutions(self) -> list[Violation]:
        solutions = self.solutions
        if not 1 <= len(solutions) <= MAX_SOLUTIONS:
            return [Violation("solutions", f"must be between 1 and {MAX_SOLUTIONS}, are {len(solutions)}")]
        for number, steps in enumerate(solutions):
            place = f"solutions[{number}]"
            if not 1 <= len(steps) <= MAX_STEPS:
                return [Violation(place, f"must have between 1 and {MAX_STEPS} steps, has {len(steps)}")]
            if not all(step.strip() for step in steps):
                return [Violation(place, "must have no empty step")]
        if (count := sum(map(len, solutions))) > MAX_TOTAL_STEPS:
            return [Violation("solutions", f"must have at most {MAX_TOTAL_STEPS} steps together, have {count}")]
        return text_violations("solutions", "".join(self.beside), MAX_SOLUTION_BYTES)


def make_score_request(request: ScoreRequest | str, steps: Iterable[str] | Iterable[Iterable[str]]) -> ScoreRequest:
    """A request as it is, or that of a problem's text and the steps of one solution, or of several.

    Raises:
        TypeError: `steps` are a single text.
    """
    if isinstance(request, ScoreRequest):
        return request
    if isinstance(steps, str):
        raise TypeError("steps are a list of texts, or a list of such lists, and not one text")
    listed = [each if isinstance(each, str) else tuple(each) for each in steps]
    one = bool(listed) and all(isinstance(each, str) for each in listed)
    return ScoreRequest(request, (tuple(listed),) if one else tuple(listed))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SolutionScores:
    """The scores of one solution.

    Attributes:
        score: of the whole; None if a step that it is made of has none.
        step_scores: of each step, in [0, 1]; None for a step without one. A verifier of whole answers scores the last
            step alone.
        reason: why steps have no score: the first reason that there was; empty if all have one.
    """

    score: float | None
    step_scores: tuple[float | None, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """The outcome of a `ScoreRequest`, or of a session, whose scores were reported before.

    Attributes:
        search_id: its id.
        solutions: the scores of each solution; empty for a session.
        stop_reason: why it ended.
        usage: what it cost.
        configuration: what was asked for.
        scorer: what has scored, as results of searches name it.
        digests: of the models by role.
        error: why it failed; empty if it did not.
    """

    search_id: str
    solutions: tuple[SolutionScores, ...] = ()
    stop_reason: StopReason
    usage: Usage
    configuration: ScoreRequest | ScoreSessionRequest
    scorer: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    error: str = ""
