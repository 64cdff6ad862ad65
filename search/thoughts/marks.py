"""Marks between which a checkpoint thinks, found from the shape of its tokens and its chat template.

    tags        <think> … </think>, [THINK] … [/THINK], ◁think▷ … ◁/think▷ and the like: an opening tag and the same
                with a slash, of which the tokenizer or the template has the closing one
    channels    tokens that begin and end a channel: the opening one, a label, the thought, the closing one. Where the
                answer has a channel of its own, its header is written by the host, for models write some wrongly

A mark is a token where the tokenizer has one of this text, special or not, and the text itself elsewhere.
"""

import re
from dataclasses import dataclass

from espalier.engine.errors import CheckpointError
from espalier.engine.models.tokenizer import TextTokenizer

_TAG = re.compile(
    r"(?P<left><\|?|\[|◁)/?(?P<name>(?:[a-z]+:)?(?:think|thinking|thought|thoughts|reasoning))(?P<right>\|?>|\]|▷)",
    re.IGNORECASE,
)
NO_MARKS = "none"
"""Override for a checkpoint that does not think, whatever its files say."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark: its text, and the id of the token that it is; None where it is only text."""

    text: str
    token_id: int | None = None


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks of one checkpoint.

    Attributes:
        opening: begins a thought.
        closing: ends it.
        label: text behind the opening mark that is no part of the thought.
        header: begins the answer behind the closing mark, written by the host; empty where nothing does.
        in_template: whether the chat template writes or reads them; otherwise only the tokenizer has them.
    """

    opening: Mark
    closing: Mark
    label: str = ""
    header: str = ""
    in_template: bool = True

    @property
    def direct_header(self) -> str:
        """The header of an answer without a thought before it: what of it comes behind the end of another channel."""
        return self.header[self.header.index(self.opening.text) :] if self.header else ""

    def opened_by(self, prompt: str) -> bool:
        """Return whether a prompt's end opens a thought."""
        opening = self.opening.text
        return prompt.rstrip().endswith((opening, f"{opening}{self.label}".rstrip()))


@dataclass(frozen=True, slots=True)
class _Channels:
    """The shape of channels: tokens that the tokenizer must have, and the texts around a thought."""

    tokens: tuple[str, ...]
    opening: str
    label: str
    closing: str
    header: str = ""


_CHANNELS = (
    _Channels(
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        "<|channel|>",
        "analysis<|message|>",
        "<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
    ),
    _Channels(("<|channel>", "<channel|>"), "<|channel>", "thought\n", "<channel|>"),
)


def find_marks(tokenizer: TextTokenizer, given: str | None = None) -> ThoughtMarks | None:
    """Return the marks of a checkpoint's thoughts; None for one that does not think.

    Args:
        tokenizer: the checkpoint's.
        given: the opening and the closing mark, with a blank between them, or `none`, instead of those in its files.

    Raises:
        CheckpointError: `given` is neither.
    """
    template = tokenizer.chat_template or ""
    if given == NO_MARKS:
        return None
    if given:
        opening, _, closing = given.partition(" ")
        if not opening or not closing.strip() or opening == closing.strip():
            raise CheckpointError(
                f"--thought-marks {given!r}: must be an opening and another closing mark with a blank between them, "
                "like '<think> </think>', or none"
            )
        return ThoughtMarks(_mark(tokenizer, opening), _mark(tokenizer, closing.strip()))
    for its in _CHANNELS:
        if all(tokenizer.token_id(token) is not None for token in its.tokens):
            opening, closing = _mark(tokenizer, its.opening), _mark(tokenizer, its.closing)
            return ThoughtMarks(opening, closing, its.label, its.header)
    tags = dict.fromkeys(tag.group("left", "name", "right") for tag in _TAG.finditer(template))
    added = filter(None, map(_TAG.fullmatch, tokenizer.added_tokens))
    tags |= dict.fromkeys(tag.group("left", "name", "right") for tag in added)
    found = [
        ThoughtMarks(_mark(tokenizer, left + name + right), closing, in_template=closing.text in template)
        for left, name, right in tags
        if (closing := _mark(tokenizer, f"{left}/{name}{right}")).token_id is not None or closing.text in template
    ]
    return max(found, key=lambda marks: (marks.in_template, marks.closing.token_id is not None), default=None)


def _mark(tokenizer: TextTokenizer, text: str) -> Mark:
    return Mark(text, tokenizer.token_id(text))
