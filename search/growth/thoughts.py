"""Thoughts: tells them apart from answers, closes them at their budgets, and has them go on where that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.engine.guidance.matcher import Matcher
from espalier.engine.roles import GENERATOR
from espalier.engine.work import NO_MARKS, Generated, StepMarks, StopCause
from espalier.search.growth.policies import Branch, Draft, Expansion, InjectedText, PathPolicy, PolicyContext
from espalier.search.rules import OVERRUN
from espalier.search.thoughts.plans import CLOSING_SENTENCE, THINK_ON, ThoughtPlan
from espalier.search.thoughts.reading import CLOSED, OPENED, AfterThought, Phase, Position, make_reader
from espalier.search.tree import Node, Termination

if TYPE_CHECKING:
    from espalier.search.growth.budget import Budget


class PathThoughts(PathPolicy):
    """Follows the thoughts of a search's paths."""

    def __init__(self, context: PolicyContext, plan: ThoughtPlan, budget: Budget | None) -> None:
        """Begin a search.

        Args:
            context: the search; it may have a rule by which thoughts are closed whose probes agree.
            plan: budget, marks and texts of its thoughts.
            budget: of the search's tokens; None without one.
        """
        model = context.engine.model(GENERATOR)
        self._plan = plan
        self._stop = context.resolved.request.stop_when.value
        self._budget = budget
        calls = context.resolved.request.call_plan is not None
        self._reader = make_reader(plan.marks, model.tokenizer, model.eos_token_ids, calls)
        self._banned = tuple(set(plan.mark_ids).difference(model.eos_token_ids))
        if calls and plan.marks.message:  # as a call has a channel of its own
            self._banned = ()
        self._start = OPENED if plan.opened else Position()
        self._positions: dict[Node, Position] = {}

    def position(self, node: Node) -> Position:
        """Position of a path between thought and answer, at the end of a node."""
        return self._positions.get(node, self._start)

    def matcher(self, answer: Matcher, node: Node) -> Matcher:
        """The matcher of what comes behind a node outside of its thought, given that of an answer."""
        position = self.position(node)
        may_think = position.phase is Phase.BEFORE and not position.closed
        return AfterThought(answer, self._reader) if may_think else answer

    def shape(self, expansion: Expansion, draft: Draft) -> None:
        """See `PathPolicy`; a thought's steps end at its marks and its budget, and an answer has no marks."""
        node = expansion.branch.node
        position, left = self.position(node), self._plan.budget - node.path_tokens()
        answers = position.phase is Phase.ANSWER
        if position.closed or (answers and self._plan.header):  # to which no further channel belongs
            draft.banned = self._banned
        draft.marks = self._plan.step_marks
        if answers:
            draft.marks = StepMarks(unbroken=self._plan.text_marks) if self._plan.text_marks else NO_MARKS
        draft.overrun = OVERRUN
        begins = position.phase is Phase.BEFORE and left > 0 and not position.closed
        if position.inside or begins:
            draft.max_tokens = min(draft.max_tokens, max(1, left))

    def sampled(self, branch: Branch, done: Generated) -> None:
        """See `PathPolicy`."""
        node, before = branch.node, self._before(branch)
        reading = self._reader.read(done.token_ids, before)
        node.text, node.thought_chars = reading.text, reading.thought_chars
        self._positions[node] = reading.position
        if reading.position.closed and not before.closed:
            branch.matcher = None  # an answer begins, whatever of its form the thought's marks have matched

    def grown(self, branch: Branch, done: Generated) -> InjectedText | None:
        """See `PathPolicy`.

        Closes a thought that has used its budget up or goes round in circles, has a thought go on that the model
        closes, before the step or within it, and begins the answer's channel.
        """
        node, position, ended = branch.node, self.position(branch.node), done.cause is StopCause.EOS
        if ended and position.inside:
            goes_on = self._plan.forced and (self._budget is None or self._budget.generator_left(node) > 0)
            node.termination = None if goes_on else Termination.UNCLOSED
        elif node.termination is Termination.DEGENERATE and position.inside and position.blank:
            node.termination = None  # blanks around marks are no step that says nothing
        if position.inside:
            looping = node.termination is Termination.DEGENERATE
            spent = ended or node.path_tokens() >= self._plan.budget
            return self._close(node, int(ended)) if looping or (node.open and spent) else None
        if not node.open or done.cause is not StopCause.MARK:
            return None
        thought = self._before(branch).inside or node.thought_chars > 0
        if thought and self._plan.thinks_on((step.written.text for step in node.lineage()), node.path_tokens()):
            thinking_on = InjectedText(THINK_ON, self._plan.think_on, replaces=1)
            return self._inject(node, OPENED._replace(blank=False), thinking_on)
        if not self._plan.header:
            return None
        return self._inject(node, CLOSED, InjectedText(self._plan.marks.header, self._plan.header))

    def once_probed(self, node: Node) -> InjectedText | None:
        """Return text to write behind a node that has been probed: it closes a thought whose probes agree."""
        sure = self._stop and self.position(node).inside and self._stop.holds(node.probes(), node.path_tokens())
        return self._close(node) if sure else None

    def _before(self, branch: Branch) -> Position:
        assert branch.node.parent
        return self.position(branch.node.parent)

    def _close(self, node: Node, replaces: int = 0) -> InjectedText:
        return self._inject(node, CLOSED, InjectedText(CLOSING_SENTENCE.strip(), self._plan.closing, replaces))

    def _inject(self, node: Node, position: Position, injected: InjectedText) -> InjectedText:
        self._positions[node] = position
        return injected
