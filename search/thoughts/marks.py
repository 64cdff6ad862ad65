r"""Marks between which a checkpoint thinks, found from the shape of its tokens and its chat template.

    tags        <think> … </think>, [THINK] … [/THINK], ◁think▷ … ◁/think▷ and the like: an opening tag and the same
                with a slash, or <|begin_of_thought|> … <|end_of_thought|>, of which the tokenizer or the template has
                the closing one; and whatever else the prompt opens or the template cuts out
    channels    tokens that begin and end a channel: the opening one, a label, the thought, the closing one. Where the
                answer has a channel of its own, its header is written by the host, for models write some wrongly

A mark is a token where the tokenizer has one of this text, special or not, and the text itself elsewhere. Marks that
have no usual name are found by what a chat template does with them:

    the prompt ends with a mark          `<reason>`, which no earlier answer has before it; it ends with the same and a
                                         slash, or with "end" for "begin"
    the switch writes an empty thought   `<|begin_of_thought|><|end_of_thought|>`
    the prompt asks for them             "thoughts after 'Here is my thought process:' and … response after '…:'"
    code cuts them out of a content      `content.split('</reason>')[0].split('<reason>')[-1]`
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from espalier.engine.errors import CheckpointError
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.rules import SWITCHES, ThinkingMode

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


_HEADED = ("<|start|>", "<|message|>")
_CHANNELS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("<|channel|>", "analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>", _HEADED),
    ("<|channel>", "thought\n", "<channel|>", "", ()),
)
"""Opening mark, label, closing mark, the header of an answer, and the tokens that begin and end a header."""


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
    for opening, label, closing, header, headed in _CHANNELS:
        marks = [_mark(tokenizer, text) for text in (opening, closing, *headed)]
        if all(mark.token_id is not None for mark in marks):
            turn, message = marks[2:] or (None, None)
            return ThoughtMarks(marks[0], marks[1], label, header, True, turn, message)
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


Pair = tuple[str, str]
"""An opening and a closing mark."""
TAG = r"(?:<\|?|\[|◁|⟨|«){slash}[^\s<>\[\]◁▷⟨⟩«»/|]+(?:\|?>|\]|▷|⟩|»)"
_OPENING, _ANY = TAG.format(slash=""), TAG.format(slash="/?")
_OPENED = re.compile(rf"({_OPENING})\s*\Z")
_EMPTY = re.compile(rf"({_OPENING})\s*({_ANY})\s*\Z")
_ENDS = (("begin", "end"), ("start", "end"), ("start", "stop"), ("open", "close"))
_OTHERS = re.compile(r"tool|func|call|image|audio|video|system|user|assistant|inst|code|document|answer|response", re.I)
"""Names of tags that are no thoughts."""
_TEXT = r"(?P<{0}>['\"])(?P<{1}>(?:(?!(?P={0})).)+)(?P={0})"
_BEFORE = r"\.split\(\s*" + _TEXT.format("q", "closing") + r"\s*\)\s*(?:\[\s*0\s*\]|\|\s*first)"
_BETWEEN = re.compile(_BEFORE + r"[^%}]*?\.split\(\s*" + _TEXT.format("r", "opening") + r"\s*\)")
_BEHIND = re.compile(r"\.split\(\s*" + _TEXT.format("q", "closing") + r"\s*\)\s*(?:\[\s*-\s*1\s*\]|\|\s*last)")
_SENTENCE = r"['\"“‘](?P<{}>[^'\"“”‘’\n]{{3,80}}:)['\"”’]"
_ASKED = re.compile(
    r"(?:thought|think|reason)[^.\n]{0,120}?" + _SENTENCE.format("opening") + r"[^.\n]{0,160}?"
    r"(?:response|answer|solution)[^.\n]{0,120}?" + _SENTENCE.format("closing"),
    re.IGNORECASE,
)
_SIGNS = re.compile(
    r"\b(enable_thinking|reasoning_effort|thinking_budget|reasoning_content)\b|\{[%{][^%}]*\b(thinking)\b"
)
"""Variables by which templates have a model think, and fields of what it has thought."""
_SAID = "ANSWER 2"


def opened_pair(tokenizer: TextTokenizer) -> Pair | None:
    """The mark with which the prompt ends, and its closing one; None where it ends with none, or opens a turn."""
    prompt, earlier = _prompt(tokenizer), _prompt(tokenizer, _SAID)
    if not (found := _OPENED.search(prompt)) or _SAID not in earlier:
        return None
    if _OTHERS.search(opening := found[1]):
        return None
    closings = list(_closings(opening))
    before = earlier[: earlier.index(_SAID)]
    if opening in before and not any(closing in before[before.rindex(opening) :] for closing in closings):
        return None  # the assistant's turn
    return opening, next((closing for closing in closings if _knows(tokenizer, closing)), closings[0])


def other_pairs(tokenizer: TextTokenizer) -> list[Pair]:
    """Pairs of marks that the template writes, asks for or cuts out, the surest first."""
    on, off = (_prompt(tokenizer, "", **SWITCHES[mode]) for mode in (ThinkingMode.ON, ThinkingMode.OFF))
    pairs = list[Pair]()
    if on != off and (found := _EMPTY.search(off)) and not on.endswith(found[0]):
        pairs.append((found[1], found[2]))
    pairs += [(found["opening"], found["closing"]) for found in _ASKED.finditer(on)]
    source = tokenizer.chat_template or ""
    pairs += [(_literal(found["opening"]), _literal(found["closing"])) for found in _BETWEEN.finditer(source)]
    for closing in (_literal(found["closing"]) for found in _BEHIND.finditer(source)):
        pairs += [(opening, closing) for opening in _openings(closing) if _knows(tokenizer, opening)][:1]
    return [(one, other) for one, other in pairs if one and other and one != other and not _OTHERS.search(_name(one))]


def unknown_thoughts(tokenizer: TextTokenizer) -> str:
    """A warning about a checkpoint without marks whose template has it think all the same; empty for others."""
    if not (found := _SIGNS.search(tokenizer.chat_template or "")):
        return ""
    return (
        f"the generator's chat template reads {found[1] or found[2]}, as those of models that think do, but neither it "
        "nor the tokenizer has marks of thoughts that are known: a thought would be taken for the answer. "
        "--thought-marks '<a> </a>' names them, --thought-marks none says that it does not think"
    )


def pair_of(tag: str, tokenizer: TextTokenizer) -> Pair | None:
    """The pair of marks of which a tag is one; None where neither tokenizer nor template has the closing one."""
    openings = list(_openings(tag))
    opening = next((each for each in openings if _knows(tokenizer, each)), openings[0]) if openings else tag
    closings = [tag] if openings else [each for each in _closings(tag) if _knows(tokenizer, each)]
    return (opening, closings[0]) if closings else None


def _prompt(tokenizer: TextTokenizer, said: str = "", **switches: bool) -> str:
    """A prompt, behind an earlier answer if there is one; empty where the template refuses."""
    earlier = [{"role": "user", "content": "2"}, {"role": "assistant", "content": said}] if said else []
    with suppress(CheckpointError):
        return tokenizer.render_chat([*earlier, {"role": "user", "content": "1+1?"}], **switches)
    return ""


def _knows(tokenizer: TextTokenizer, mark: str) -> bool:
    return tokenizer.token_id(mark) is not None or mark in (tokenizer.chat_template or "")


def _literal(text: str) -> str:
    """A literal of a template without blanks around it."""
    return text.replace("\\n", "\n").strip()


def _name(mark: str) -> str:
    return mark if re.fullmatch(_ANY, mark) else ""  # of a sentence there is none


def _closings(opening: str) -> Iterator[str]:
    """Marks that may close what a tag opens."""
    yield from _replaced(opening, _ENDS)
    begin = re.match(r"<\|?|.", opening)
    assert begin
    yield f"{begin[0]}/{opening[begin.end() :]}"


def _openings(closing: str) -> Iterator[str]:
    """Marks that may open what a tag closes."""
    if re.fullmatch(_ANY, closing):
        if "/" in closing:
            yield closing.replace("/", "", 1)
        yield from _replaced(closing, [(end, begin) for begin, end in _ENDS])


def _replaced(mark: str, words: Iterable[Pair]) -> Iterator[str]:
    for word, other in words:
        for one, its in ((word, other), (word.upper(), other.upper())):
            if re.search(rf"(?<![A-Za-z]){one}(?![A-Za-z])", mark):
                yield re.sub(rf"(?<![A-Za-z]){one}(?![A-Za-z])", its, mark, count=1)
