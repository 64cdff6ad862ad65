"""Marks between which a checkpoint thinks, found from the shape of its tokens and its chat template.

    tags        <think> … </think>, [THINK] … [/THINK], ◁think▷ … ◁/think▷ and the like: an opening tag and the same
                with a slash, or <|begin_of_thought|> … <|end_of_thought|>, of which the tokenizer or the template has
                the closing one; and whatever else the prompt opens or the template cuts out, see `template_marks`
    channels    tokens that begin and end a channel: the opening one, a label, the thought, the closing one. Where the
                answer has a channel of its own, its header is written by the host, for models write some wrongly

A mark is a token where the tokenizer has one of this text, special or not, and the text itself elsewhere.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.engine.errors import CheckpointError
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.template_marks import opened_pair, other_pairs, pair_of

_TAG = re.compile(
    r"(?:<\|?|\[|◁)/?(?:[a-z]+:)?(?:(?:begin|start|end|stop)_(?:of_)?)?"
    r"(?:think|thinking|thought|thoughts|reason|reasoning)(?:_(?:begin|start|end|stop))?(?:\|?>|\]|▷)",
    re.IGNORECASE,
)
NO_MARKS = "none"
"""Override for a checkpoint that does not think, whatever its files say."""
SENTENCES = " ... "
"""Stands between marks that have blanks themselves."""


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
        turn: begins a header of channels, as the opening mark does; None where channels have no headers.
        message: ends one.
        others: further marks, opening and closing ones, which models of this checkpoint may use instead.
        in_template: whether the chat template writes or reads them; otherwise only the tokenizer has them.
    """

    opening: Mark
    closing: Mark
    label: str = ""
    header: str = ""
    in_template: bool = True
    turn: Mark | None = None
    message: Mark | None = None
    others: tuple[tuple["Mark", "Mark"], ...] = ()

    @property
    def pairs(self) -> tuple[tuple["Mark", "Mark"], ...]:
        """All opening marks with their closing ones, the first pair being those that the host writes."""
        return (self.opening, self.closing), *self.others

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
    turn: str = ""
    message: str = ""


_CHANNELS = (
    _Channels(
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        "<|channel|>",
        "analysis<|message|>",
        "<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
        "<|start|>",
        "<|message|>",
    ),
    _Channels(("<|channel>", "<channel|>"), "<|channel>", "thought\n", "<channel|>"),
)


def find_marks(tokenizer: TextTokenizer, given: str | None = None) -> ThoughtMarks | None:
    """Return the marks of a checkpoint's thoughts; None for one that does not think.

    Args:
        tokenizer: the checkpoint's.
        given: the opening and the closing mark, with a blank or `SENTENCES` between them, or `none`, instead of those
            in its files.

    Raises:
        CheckpointError: `given` is neither.
    """
    if given == NO_MARKS:
        return None
    if given:
        opening, _, closing = given.partition(SENTENCES if SENTENCES in given else " ")
        if not opening or not closing.strip() or opening == closing.strip():
            raise CheckpointError(
                f"--thought-marks {given!r}: must be an opening and another closing mark with a blank between them, "
                "like '<think> </think>', or ' ... ' where they have blanks themselves, or none"
            )
        return ThoughtMarks(_mark(tokenizer, opening), _mark(tokenizer, closing.strip()))
    for its in _CHANNELS:
        if all(tokenizer.token_id(token) is not None for token in its.tokens):
            opening, closing = _mark(tokenizer, its.opening), _mark(tokenizer, its.closing)
            headed = (_mark(tokenizer, its.turn), _mark(tokenizer, its.message)) if its.header else (None, None)
            return ThoughtMarks(opening, closing, its.label, its.header, True, *headed)
    return _tags(tokenizer)


def _tags(tokenizer: TextTokenizer) -> ThoughtMarks | None:
    """The tags of a checkpoint: those that its prompt opens, else of the usual names, else what its template shows."""
    template = tokenizer.chat_template or ""
    named = (*_TAG.findall(template), *filter(_TAG.fullmatch, tokenizer.added_tokens))
    texts = list(dict.fromkeys(pair for tag in named if (pair := pair_of(tag, tokenizer))))
    pairs = [(_mark(tokenizer, opening), _mark(tokenizer, closing)) for opening, closing in texts]
    pairs.sort(key=lambda pair: (pair[1].text in template, pair[1].token_id is not None), reverse=True)
    shown: Sequence[tuple[str, str]] = ()
    if template and (opened := opened_pair(tokenizer)):
        pairs.sort(key=lambda pair: pair[0].text == opened[0], reverse=True)
        shown = () if pairs and pairs[0][0].text == opened[0] else (opened,)
    elif template and not any(closing.text in template for _, closing in pairs):
        shown = other_pairs(tokenizer)
    pairs = [*((_mark(tokenizer, one), _mark(tokenizer, other)) for one, other in shown[:1]), *pairs]
    if not pairs:
        return None
    (opening, closing), *others = pairs
    in_template = bool(shown) or closing.text in template
    others = tuple(pair for pair in others if pair[1].text in template)
    return ThoughtMarks(opening, closing, in_template=in_template, others=others)


def _mark(tokenizer: TextTokenizer, text: str) -> Mark:
    return Mark(text, tokenizer.token_id(text))
