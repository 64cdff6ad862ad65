r"""Marks of thoughts that have no usual name, found by what a chat template does with them.

the prompt ends with a mark          `<reason>`, which no earlier answer has before it; it ends with the same and a
                                     slash, or with "end" for "begin"
the switch writes an empty thought   `<|begin_of_thought|><|end_of_thought|>`
the prompt asks for them             "thoughts after 'Here is my thought process:' and … response after '…:'"
code cuts them out of a content      `content.split('</reason>')[0].split('<reason>')[-1]`
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from espalier.engine.errors import CheckpointError
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.mode import SWITCHES, ThinkingMode

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
