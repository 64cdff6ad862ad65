r"""Finding the answer in a solution's text, and telling whether two answers are spelled alike.

An answer is what a text says it is, in the words of the benchmarks and of the models trained for them: `\boxed{}`
(MATH), `<answer>`, `#### ` (GSM8K), "the answer is", "Answer:". A number that merely stands last is no answer.
"""

import re
from collections.abc import Iterator

from espalier.search.voting.latex import undressed
from espalier.search.voting.reading import letter_of, read

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"(?<!\\)[{}]")
_UNBRACED = re.compile(r"(?!-?\\(?:boxed|fbox))(?:\([^()\n]{1,80}\)|-?\\?[^\s${}\\]+(?:\{[^{}\n]{0,80}\}){0,2})")
"""What a box without braces holds: TeX would take one digit, and models mean the whole number."""
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BESIDE = re.compile(
    r"(?=.*(?:,|and|or))(?:[\s$,]|\\[()\[\],;! ]|and\b|or\b|\\text\{\s*(?:and|or)\s*\}|[a-z]\s*=)*", re.DOTALL
)
"""What stands between two boxes that are one answer."""
_MOST_BETWEEN = 40
_MOST_BOXES = 16
# Text may be long and repeat itself without end, so nothing is tried twice: what is repeated is not given back (`++`).
_HASHES = re.compile(
    r"^####\s*+[*\\$]*+(-?[\\$]*+(?=[.,/]*+\d)[\d.,/]++[^\S\n]*+\\?%?)(?:[*$.]|[^\S\n])*+$", re.MULTILINE
)
_HASHED_LINE = re.compile(r"^####(?!#)[^\S\n]*+(?!\d++[.)]\s)([^\n]{1,200})$", re.MULTILINE)
_SAID = re.compile(
    r"(?:^(?:\#++\s*+|\*\*)(?:final\s++)?answer[:*]*+\s*\n|"
    r"\b(?:ans(?:wer)?|(?:correct|right|best)\s++(?:option|choice))\b[*_]*+(?:,\s*+(?:therefore|thus|hence|then),)?"
    r"(?:\s++(?:to|for)\s++(?:the|this|that|our)\s++[^.:\n]{1,60}?)?"
    r"(?:\s++(?:is|(?:will|would|must|should)\s++be|equals|comes\s++(?:out\s++)?to)\b|\s*+[:=]))[\s:*_]*+"
    r"(?:(?:indeed|therefore|thus|hence|then|simply|clearly|just|exactly)\b[\s,:]*+)?",
    re.IGNORECASE | re.MULTILINE,
)
_MATHS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
_ANOTHER = re.compile(r"\s*(?:,|and\b|or\b)\s*(?:\$|\\[(\[]|-?\d)")
_PRICE = re.compile(r"\d[\d.,]*\s+[A-Za-z]{2,}")
_SENTENCE = re.compile(r".*?(?=\.(?:\s|\*|\"|$)|\*\*(?:\W|$)|$)", re.MULTILINE)
_REASON = re.compile(
    r"[,;]?(?<!\s)\s++(?:[(-]++\s*+)?(?:because|since|which|where|so|due\s+to|given\s+that|as\s+(?:we|it|the|there|required|desired|shown|above))\b.*|;\s.*",
    re.IGNORECASE,
)
_STATES_NOTHING = re.compile(
    r"(?:not|no|the|a|an|that|what|this|in|to|by|at|of|as|if|it|we|i|you|they|there|one|given|found|obtained|equal|also|"
    r"always|still|now|only|very|too)\s+[^\W\d_]|(?:not|unknown|unclear|wrong|right|correct|incorrect|true that|given|"
    r"found|obtained|shown|below|above|as follows|yet)\b",
    re.IGNORECASE,
)
_SOLVED_BY_NOTHING = re.compile(
    r"no\s+(?:real\s+|such\s+|integer\s+)?(?:solutions?|answers?|values?|roots?)$", re.IGNORECASE
)
_MOST_WORDS = 3
_MOST_WORDS_OF_A_UNIT = 10
_LONGEST = 1000
"""Characters after "the answer is" of which an answer must be made."""
_LAST = 64
"""Places where a text may say its answer that are looked at, from the end on."""
_CHOSEN = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\(([A-J])\)|([A-J])(?:[).:]|$))(?!\s*(?:(?:,|and|or|&)\s*\(?[A-J]\b|[-+*/^=]))"
)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?")


def extract_answer(text: str) -> str:
    r"""The answer a solution gives; empty when it gives none.

    Looks for what stands between the last `<answer>` and `</answer>`, or in the last `\boxed{}` or `\fbox{}` with
    balanced braces, whichever comes later; then after GSM8K's last `#### `; then after the last "the answer is" or
    "Answer:" that something short follows. A choice comes as its letter alone, of A to J.
    """
    boxes = list(_BOX.finditer(text))
    opening, closing = _last_tags(text)
    if closing > (boxes[-1].start() if boxes else 0):
        inside = text[opening:closing]
        return extract_answer(_TAG.sub(" ", inside)) or _phrase(inside.strip()) or _short(_undressed(inside))
    if boxed := _boxed(text, boxes):
        return boxed
    if found := _HASHES.findall(text):
        return re.sub(r"[\s$]|\\(?=\$)", "", found[-1]).rstrip(".,")
    return next(_hashed(text), "") or next(_said(text), "")


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}` or `\fbox{...}`, nested braces kept; None when there is none."""
    boxes = list(_BOX.finditer(text))
    closings = _closing_braces(text) if boxes else {}
    for box in reversed(boxes):
        if box.end() in closings:
            return text[box.end() + 1 : closings[box.end()]].strip()
    return None


def canonical(answer: str) -> str:
    r"""A spelling of an answer's value under which equal ones usually meet, whatever its unit and styling.

    It is cheap and groups votes inside a search; whether an answer is right is the grader's to say.
    """
    return read(answer).key


def exact_match_key(answer: str) -> str:
    """`canonical`, and beside it the name and unit, which may make another answer of the same value."""
    reading = read(answer)
    return f"{reading.key} {reading.mark}" if reading.mark else reading.key


def is_number(text: str) -> bool:
    """Whether `text` is a number or a fraction of two, in digits."""
    return _NUMBER.fullmatch(text) is not None


def _last_tags(text: str) -> tuple[int, int]:
    """Where the content of the last complete `<answer>` begins and ends; zeros when there is none."""
    closing = 0
    for tag in reversed(list(_TAG.finditer(text))):
        if tag[1] and not closing:
            closing = tag.start()
        elif not tag[1] and closing:
            return tag.end(), closing
    return 0, 0


def _boxed(text: str, boxes: list[re.Match[str]]) -> str:
    """What the last box that holds something says, with the boxes that stand beside it; empty without any."""
    closings = _closing_braces(text) if boxes else {}
    said: list[str] = []
    after = 0
    for box in reversed(boxes):
        braced = box.end() in closings
        end = closings[box.end()] + 1 if braced else box.end()
        beside = 0 <= after - end <= _MOST_BETWEEN and _BESIDE.fullmatch(text, end, after)
        if said and (not beside or len(said) == _MOST_BOXES):
            break
        inside = text[box.end() + 1 : end - 1] if braced else _unbraced(text, box.end())
        if content := _undressed(inside):
            said.append(content)
            after = box.start()
    by_value = {canonical(content): content for content in said}
    return ", ".join(reversed(by_value.values()))


def _unbraced(text: str, start: int) -> str:
    """The number, letter or formula behind a box without braces; a word is none."""
    found = _UNBRACED.match(text, start, start + _LONGEST)
    return found[0] if found and (re.search(r"[\d\\(]", found[0]) or len(found[0]) == 1) else ""


def _hashed(text: str) -> Iterator[str]:
    """What follows each `####` on its line, from the last on, where that is a number, choice or formula."""
    for line in reversed(list(_HASHED_LINE.finditer(text))[-_LAST:]):
        said = _undressed(_REASON.sub("", line[1]))
        reading = read(said)
        counts = reading.number is not None and not re.search(r"\d\s+[A-Z][a-z]", said)
        if counts or reading.choice or (said and line[1].lstrip().startswith(("$", "\\"))):
            yield said


def _said(text: str) -> Iterator[str]:
    """What follows each "the answer is", from the last on, where it is an answer."""
    for marker in reversed(list(_SAID.finditer(text))[-_LAST:]):
        rest = text[marker.end() : marker.end() + _LONGEST]
        if said := _formula(rest) or _phrase(rest):
            yield said


def _formula(rest: str) -> str:
    """The formula that `rest` begins with; empty where it is none, says nothing, is a price, or one of several."""
    for opening, closing in _MATHS:
        if rest.startswith(opening) and (end := rest.find(closing, len(opening))) > 0:
            inside, after = rest[len(opening) : end].strip(), end + len(closing)
            price = _PRICE.match(inside) and (rest[after : after + 1].isdigit() or read(inside).number is None)
            states = re.search(r"\w", inside) and not (price or _ANOTHER.match(rest, after) or "\n\n" in inside)
            return _undressed(inside) if states else ""
    return ""


def _phrase(rest: str) -> str:
    """The choice, number or few words that `rest` begins with; empty where it tells a story."""
    sentence = _SENTENCE.match(rest)
    said = _REASON.sub("", sentence[0].rstrip() if sentence else "").strip()
    if choice := _CHOSEN.match(said):
        return choice[1] or choice[2]
    said = _undressed(re.sub(r"\\?\$|\\[()\[\]]", "", said))
    return said if _SOLVED_BY_NOTHING.match(said) else _short(said)


def _short(said: str) -> str:
    """`said`, where it is few words, or a number with its unit; else nothing."""
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", said)
    if _STATES_NOTHING.match(said) or not re.search(r"\w", said) or len(words) > _MOST_WORDS_OF_A_UNIT:
        return ""
    return said if len(words) <= _MOST_WORDS or read(said).number is not None else ""


def _undressed(answer: str) -> str:
    """`answer` without what only sets it off: markdown, quotes, dollars, punctuation; a choice as its letter."""
    text = undressed(answer)
    return letter_of(text) or text


def _closing_braces(text: str) -> dict[int, int]:
    """Where the brace opened at each index closes, for those that do; escaped braces do not count."""
    open_ones: list[int] = []
    closings: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_ones.append(brace.start())
        elif open_ones:
            closings[open_ones.pop()] = brace.start()
    return closings
