"""Ends of paths: the model ends one, its answer is boxed, it is too long, or it goes round in circles."""

import re

from espalier.engine.work import StopCause
from espalier.search.grading.boxes import boxed
from espalier.search.loops import LONGEST_LOOP, is_degenerate
from espalier.search.run.executor import ResolvedRequest
from espalier.search.step_rule import PARAGRAPH, StepRule
from espalier.search.tree import Node, Termination

_BLANK_LINES = re.compile(r"\n\s*\n")


class Endings:
    """The ends of one search's paths, policies apart."""

    def __init__(self, resolved: ResolvedRequest, rule: StepRule) -> None:
        request = resolved.request
        self._ends_at_box = request.end_at_box and not request.text_form
        self._max_tokens = resolved.generator_limits.path_tokens
        self._max_steps = request.max_steps
        self._whole_paragraphs = rule.delimiter == PARAGRAPH

    def of(self, node: Node, cause: StopCause) -> Termination | None:
        """Return how a path ends with a step that was sampled until `cause`; None if it does not."""
        if cause is StopCause.ERROR:
            return Termination.ERROR
        if cause is StopCause.EOS:  # an empty last step still completes the text before it
            return Termination.EOS if node.path_text().strip() else Termination.DEGENERATE
        if self._ends_at_box and _ends_boxed(node):
            return Termination.BOXED
        if cause is StopCause.CONTEXT or node.path_tokens() >= self._max_tokens:
            return Termination.LENGTH
        if self._max_steps is not None and node.depth >= self._max_steps:
            return Termination.LENGTH
        if cause is StopCause.MARK:
            return None
        return Termination.DEGENERATE if self._is_degenerate(node) else None

    def _is_degenerate(self, node: Node) -> bool:
        """Return whether a path goes round in circles: by its paragraphs, wherever its steps end."""
        texts = [step.text for step in node.lineage(LONGEST_LOOP)]
        if self._whole_paragraphs:
            return is_degenerate(texts)
        *whole, last = _BLANK_LINES.split("".join(texts).strip())
        return (bool(whole) and is_degenerate(whole)) or (bool(last) and is_degenerate([last]))


def _ends_boxed(node: Node) -> bool:
    """Return whether a step ends the paragraph of a boxed answer, which may have begun in steps before it."""
    text, step = node.text[node.thought_chars :], node.parent
    if PARAGRAPH not in text:
        return False
    while step and (before := step.text[step.thought_chars :]) and PARAGRAPH not in before.lstrip():
        text, step = before + text, step.parent
    boxes = boxed(text)
    return bool(boxes.answer) and PARAGRAPH in text[boxes.last :]
