"""Ends of paths: the model ends one, its answer is boxed, it is too long, or it goes round in circles."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from espalier.engine.work import StopCause
from espalier.search.grading.answers import boxed
from espalier.search.rules import PARAGRAPH, StepRule
from espalier.search.run.executor import ResolvedRequest
from espalier.search.tree import Node, Termination

_BLANK_LINES = re.compile(r"\n\s*\n")


class Endings:
    """The ends of one search's paths, policies apart."""

    def __init__(self, resolved: ResolvedRequest, rule: StepRule) -> None:
        request = resolved.request
        self._ends_at_box = request.end_at_box and not request.text_form and not request.callable_tools
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


_ROUNDS = 3
_ROUNDS_OF_A_LIST = 5
"""Rounds of steps that differ in a bare number or letter: three alike may be the answers to three questions."""
_MAX_PERIOD = 12
"""Steps, or sentences within a step, of the longest loop that is noticed."""
LONGEST_LOOP = _MAX_PERIOD * _ROUNDS_OF_A_LIST
"""Steps at the end of a path that are looked at."""
_MIN_WORDS = 3
"""Words of a round of sentences, or of numbered steps: those of "1. True" are too few."""
_KEPT = 4096
_STEP = (
    "step|attempt|try|check|verification|schritt|versuch|prüfung|paso|intento|étape|essai|passo|tentativa|passaggio|"
    "шаг|попытка|步骤|步驟|第|ステップ|手順|단계|krok|stap|adım|bước|langkah"
)
"""Names of steps before their numbers. Days, rounds and cases are not among them: theirs may well be alike."""
_STEP_NUMBER = re.compile(
    rf"^[^\w\n]*(?:{_STEP})[^\w\n]{{0,3}}\d{{1,4}}|^\s*#+\s*\d{{1,4}}", re.IGNORECASE | re.MULTILINE
)
_LIST_NUMBER = re.compile(r"^[^\w(\n]*\(?(?:\d{1,4}|[a-z]|[ivx]{1,5})[.):](?=\s)", re.IGNORECASE | re.MULTILINE)
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\W\d_]{2,}")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？।])\s*|\n")


def is_degenerate(steps: Sequence[str]) -> bool:
    """Return whether a path makes no progress: its last step is blank, or it has ended a loop's third round.

    A loop is of one to 12 steps with the same words, but for the numbers of the steps; or of sentences at the end of
    the last step.

    Args:
        steps: texts of the path's steps, first to last.
    """
    last = steps[-1]
    if not last.strip():
        return True
    sentences = [sentence for sentence in _SENTENCE_END.split(last) if sentence.strip()]
    return (
        _loops(steps, _words)
        or _loops(steps, _unnumbered, _MIN_WORDS)
        or _loops(steps, _unlisted, _MIN_WORDS, _ROUNDS_OF_A_LIST)
        or _loops(sentences, _words, _MIN_WORDS)
    )


def _loops(texts: Sequence[str], read: Callable[[str], str], min_words: int = 0, rounds: int = _ROUNDS) -> bool:
    """Return whether the last texts are `rounds` equal rounds."""
    last = read(texts[-1])
    for period in range(1, min(len(texts) // rounds, _MAX_PERIOD) + 1):
        if read(texts[-1 - period]) != last:
            continue
        if all(read(texts[-place]) == read(texts[-place - period]) for place in range(2, (rounds - 1) * period + 1)):
            round_ = " ".join(map(read, texts[-period:]))
            return len(_WORD.findall(round_)) >= min_words
    return False


@lru_cache(_KEPT)
def _words(text: str) -> str:
    """The text without differences in its blanks."""
    return " ".join(text.split())


@lru_cache(_KEPT)
def _unnumbered(text: str) -> str:
    """The text without the numbers of its steps, too."""
    return _words(_STEP_NUMBER.sub("", text))


@lru_cache(_KEPT)
def _unlisted(text: str) -> str:
    """The text without any number or letter before a line."""
    return _words(_LIST_NUMBER.sub("", _STEP_NUMBER.sub("", text)))
