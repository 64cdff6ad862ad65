r"""Plans of what the host writes into paths: the text that closes a thought at its budget, and probes of answers.

A probe is sampled on a fork of a path, where the host writes what makes the model say its answer at once:

    a path within its thought   the sentence and the mark that close the thought, then `\boxed{`
    a path without a thought    a blank line, if there is none, then `\boxed{`

The model then writes what stands in the box. A path that has closed its thought is about to answer, and is not probed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.work import StepMarks
from espalier.search.rules import OVERRUN, PARAGRAPH, Thinking, ThinkingMode
from espalier.search.thoughts.marks import ThoughtMarks

CLOSING_SENTENCE = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
)
"""Written by the host before the closing mark. A bare mark makes models go on thinking in their answers."""
THINK_ON = "Wait"
"""Written by the host in place of the closing mark of a thought that is to go on."""
ANSWER_TOKENS = 512
"""Tokens kept for the answer behind the longest thought, or a quarter of a path shorter than four times as many."""
THINKING_MAX_TOKENS = 16_384
"""Default limit on the tokens of a path that thinks."""
_BLANK_LINE = "\n\n"


@dataclass(frozen=True, slots=True)
class ThoughtPlan:
    """The thoughts of one search.

    Attributes:
        marks: the checkpoint's.
        opened: whether the prompt opens the thought.
        budget: tokens of a path after which its thought is closed.
        closing: token ids that the host writes to close a thought.
        header: those that it writes where the model has closed it.
        forced: whether a path that the model ends within its thought goes on to an answer.
        more: how often a path has to think on where the model closes its thought.
        think_on: token ids that the host then writes in place of the mark.
    """

    marks: ThoughtMarks
    opened: bool
    budget: int
    closing: tuple[int, ...]
    header: tuple[int, ...] = ()
    forced: bool = False
    more: int = 0
    think_on: tuple[int, ...] = ()

    def thinks_on(self, written: Iterable[str], tokens: int) -> bool:
        """Return whether a path whose model has just closed its thought is to think on.

        Args:
            written: what the host has written into it.
            tokens: how many tokens it has.
        """
        return sum(text == THINK_ON for text in written) < self.more and tokens + len(self.think_on) < self.budget

    @property
    def mark_ids(self) -> tuple[int, ...]:
        """Tokens that are marks: they are not drawn again once a thought is closed."""
        marks = self.marks
        found = (*(mark for pair in marks.pairs for mark in pair), marks.turn, marks.message)
        return tuple(mark.token_id for mark in found if mark and mark.token_id is not None)

    @property
    def step_marks(self) -> StepMarks:
        """The marks, for the sampling of steps."""
        closings = [closing for _, closing in self.marks.pairs]
        ids = tuple(mark.token_id for mark in closings if mark.token_id is not None)
        if (closing := closings[0]).token_id is not None:
            return StepMarks(end_ids=ids, unbroken=self.text_marks)
        return StepMarks(ids, closing.text, self.text_marks)

    @property
    def text_marks(self) -> tuple[str, ...]:
        """Marks that are no tokens."""
        return tuple(mark.text for pair in self.marks.pairs for mark in pair if mark.token_id is None)


def closing_text(marks: ThoughtMarks) -> str:
    """The text that closes a thought and begins the answer."""
    return f"{CLOSING_SENTENCE}{marks.closing.text}{marks.header or _BLANK_LINE}"


def plan_thoughts(
    marks: ThoughtMarks, tokenizer: TextTokenizer, thinking: Thinking, opened: bool, path_tokens: int, more: int = 0
) -> ThoughtPlan:
    """Work out the budget of the thoughts of a search.

    Args:
        marks: the generator's.
        tokenizer: the generator's.
        thinking: what the request asks for.
        opened: whether the prompt opens the thought.
        path_tokens: most tokens of one path.
        more: how often a path has to think on.

    Raises:
        InvalidRequestError: a path has no room for the thought and an answer.
    """
    closing = tuple(tokenizer.encode(closing_text(marks)))
    header = tuple(tokenizer.encode(marks.header))
    answer = _answer_tokens(path_tokens)
    room = path_tokens - len(closing) - answer - OVERRUN
    if thinking.budget is None and room < 1 and not opened:
        return ThoughtPlan(marks, opened, path_tokens, closing, header)  # it may not think at all
    if (budget := thinking.budget or 1) > room:
        needed = next(n for n in count(path_tokens + 1) if n - len(closing) - _answer_tokens(n) - OVERRUN >= budget)
        why = (
            f"a thought of {budget} tokens, the {len(closing)} that close it and an answer of {answer} do not fit into "
            f"the {path_tokens} tokens of a path; raise max_tokens to {needed} or more where the "
            "context has room"
        )
        lower = f", or lower thinking to at most {room}" if room >= 1 else ", or switch thinking off"
        raise InvalidRequestError([Violation("thinking", why + lower)])
    forced = thinking.mode is ThinkingMode.ON or more > 0
    think_on = tuple(tokenizer.encode(f"\n{THINK_ON}"))
    return ThoughtPlan(marks, opened, thinking.budget or room, closing, header, forced, more, think_on)


def _answer_tokens(path_tokens: int) -> int:
    """Tokens of a path that are kept for its answer."""
    return min(ANSWER_TOKENS, path_tokens // 4)


PROBE_ANSWER_TOKENS = 32
"""Most tokens that a probe samples; an answer that is longer is none."""
BOX = "\\boxed{"


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """The probes of one search.

    Attributes:
        every: tokens of a path after which it is probed again, at the end of its step.
        in_thought: token ids that open the box within a thought; empty for a generator that has none.
        in_text: those behind the middle of a paragraph.
        behind_paragraph: those behind a blank line.
        context: most tokens of the model's context.
    """

    every: int
    in_thought: tuple[int, ...]
    in_text: tuple[int, ...]
    behind_paragraph: tuple[int, ...]
    context: int

    @property
    def max_tokens(self) -> int:
        """Most tokens of one probe, written and sampled."""
        return max(map(len, (self.in_thought, self.in_text, self.behind_paragraph))) + PROBE_ANSWER_TOKENS


def plan_probes(every: int, tokenizer: TextTokenizer, thoughts: ThoughtPlan | None, context: int) -> ProbePlan:
    """Work out the probes of a search, `every` so many tokens of a path; see `ProbePlan`."""
    in_thought = closing_text(thoughts.marks) + BOX if thoughts else ""
    in_thought, in_text, behind = (tuple(tokenizer.encode(text)) for text in (in_thought, PARAGRAPH + BOX, BOX))
    return ProbePlan(every, in_thought, in_text, behind, context)
