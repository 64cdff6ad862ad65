r"""Plans of answer probes: what the host writes on a fork of a path so that the model says its answer at once.

    a path within its thought   the sentence and the mark that close the thought, then `\boxed{`
    a path without a thought    a blank line, if there is none, then `\boxed{`

The model then writes what stands in the box. A path that has closed its thought is about to answer, and is not probed.
"""

from dataclasses import dataclass

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.step_rule import PARAGRAPH
from espalier.search.thoughts.budget import ThoughtPlan, closing_text

ANSWER_TOKENS = 32
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
        return max(map(len, (self.in_thought, self.in_text, self.behind_paragraph))) + ANSWER_TOKENS


def plan_probes(every: int, tokenizer: TextTokenizer, thoughts: ThoughtPlan | None, context: int) -> ProbePlan:
    """Work out the probes of a search, `every` so many tokens of a path; see `ProbePlan`."""
    in_thought = closing_text(thoughts.marks) + BOX if thoughts else ""
    in_thought, in_text, behind = (tuple(tokenizer.encode(text)) for text in (in_thought, PARAGRAPH + BOX, BOX))
    return ProbePlan(every, in_thought, in_text, behind, context)
