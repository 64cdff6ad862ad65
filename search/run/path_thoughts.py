"""Thoughts on the paths of one search: where they begin and end, and what the host writes behind their steps."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from espalier.engine.guidance.matcher import Matcher
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.work import NO_MARKS, StepMarks, StopCause
from espalier.search.thoughts.budget import CLOSING_SENTENCE, THINK_ON, ThoughtPlan
from espalier.search.thoughts.channels import make_reader
from espalier.search.thoughts.guided import AfterThought, ThoughtEnds
from espalier.search.thoughts.reading import CLOSED, OPENED, Phase, Position, StepReading
from espalier.search.thoughts.stop_rule import StopRule
from espalier.search.tree import Node, Termination


class Writing(NamedTuple):
    """Text that the host writes behind a step.

    Attributes:
        text: the text, without marks.
        ids: the tokens, with marks.
        position: where the path is behind it.
        instead_of: how many of the step's last tokens it takes the place of.
    """

    text: str
    ids: tuple[int, ...]
    position: Position = CLOSED
    instead_of: int = 0


class PathThoughts:
    """Follows the thoughts of a search's paths; decides what the host writes, and leaves the writing to its caller."""

    def __init__(
        self, plan: ThoughtPlan, stop: StopRule | None, tokenizer: TextTokenizer, eos_token_ids: Collection[int]
    ) -> None:
        """Begin a search.

        Args:
            plan: budget, marks and texts of its thoughts.
            stop: closes a thought whose probes agree; None if nothing does.
            tokenizer: the generator's.
            eos_token_ids: tokens that end a path.
        """
        self.start = OPENED if plan.opened else Position()
        self.forced = plan.forced
        self._plan = plan
        self._stop = stop
        self._reader = make_reader(plan.marks, tokenizer, eos_token_ids)
        self._ends = ThoughtEnds.of(plan.marks, tokenizer)
        self._banned = tuple(set(plan.mark_ids).difference(eos_token_ids))

    def read(self, token_ids: Sequence[int], position: Position) -> StepReading:
        """Tell thought from answer in a step that begins at `position`."""
        return self._reader.read(token_ids, position)

    def banned(self, position: Position) -> tuple[int, ...]:
        """Tokens that are not drawn: marks, once a thought is closed."""
        answers = self._plan.header and position.phase is Phase.ANSWER  # to which no further channel belongs
        return self._banned if position.closed or answers else ()

    def step_marks(self, position: Position) -> StepMarks:
        """The marks that end a step which begins at `position`."""
        if position.phase is not Phase.ANSWER:
            return self._plan.step_marks
        return StepMarks(unbroken=self._plan.text_marks) if self._plan.text_marks else NO_MARKS

    def step_room(self, position: Position, path_tokens: int, room: int) -> int:
        """Most tokens of a step that has `room` on its path: a thought's steps end at its budget."""
        left = self._plan.budget - path_tokens
        begins = position.phase is Phase.BEFORE and left > 0 and not position.closed
        return min(room, max(1, left)) if position.inside or begins else room

    def matcher(self, answer: Matcher, position: Position) -> Matcher:
        """The matcher of a step that begins at `position`, outside of a thought, given that of an answer."""
        may_think = position.phase is Phase.BEFORE and not position.closed
        return AfterThought(answer, self._ends) if may_think else answer

    def behind(self, node: Node, position: Position, before: Position, cause: StopCause) -> Writing | None:
        """Return the host's text behind a newly sampled step, which ends at `position` by `cause`.

        It closes a thought that has used its budget up or goes round in circles, has a thought go on that the model
        closes, from `before` the step or within it, and begins the answer's channel.
        """
        looping = node.termination is Termination.DEGENERATE
        ended = cause is StopCause.EOS  # whose token the closing takes the place of
        spent = ended or node.path_tokens() >= self._plan.budget
        if position.inside:
            return self._closing(int(ended)) if looping or (node.open and spent) else None
        if not node.open or cause is not StopCause.MARK:
            return None
        thought = before.inside or node.thought_chars > 0
        if thought and self._plan.thinks_on((step.written.text for step in node.lineage()), node.path_tokens()):
            return Writing(THINK_ON, self._plan.think_on, OPENED._replace(blank=False), instead_of=1)
        return Writing(self._plan.marks.header, self._plan.header) if self._plan.header else None

    def once_probed(self, node: Node, position: Position) -> Writing | None:
        """Return the host's text behind a step that has been probed: it closes a thought whose probes agree."""
        sure = self._stop and position.inside and self._stop.holds(node.probes(), node.path_tokens())
        return self._closing() if sure else None

    def _closing(self, instead_of: int = 0) -> Writing:
        return Writing(CLOSING_SENTENCE.strip(), self._plan.closing, instead_of=instead_of)
