r"""Extracts the answer from a solution's text, and computes keys by which answers are compared.

An answer is recognized by the conventions of benchmarks and of models trained for them: `\boxed{}` (MATH),
`<answer>`, `#### ` (GSM8K), "the answer is", "Answer:". A number at the end of the text is not taken for an answer.
"""

import re
from collections.abc import Iterator

from espalier.search.voting.notation.decoration import undressed
from espalier.search.voting.reading import letter_of, read

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"(?<!\\)[{}]")
_UNBRACED = re.compile(r"(?!-?\\(?:boxed|fbox))(?:\([^()\n]{1,80}\)|-?\\?[^\s${}\\]+(?:\{[^{}\n]{0,80}\}){0,2})")
"""Content of a box without braces: TeX would take one digit, models mean the whole number."""
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BESIDE = re.compile(
    r"(?=.*(?:,|and|or))(?:[\s$,]|\\[()\[\],;! ]|and\b|or\b|\\text\{\s*(?:and|or)\s*\}|[a-z]\s*=)*", re.DOTALL
)
"""Text between two boxes that belong to one answer."""
_MOST_BETWEEN = 40
_MOST_BOXES = 16
# Texts may be long and repetitive, so repetitions are possessive (`++`): no backtracking.
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
"""Characters after "the answer is" that are searched for the answer."""
_LAST = 64
"""Maximum number of candidate places in a text that are examined, from the end."""
_CHOSEN = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\(([A-J])\)|([A-J])(?:[).:]|$))(?!\s*(?:(?:,|and|or|&)\s*\(?[A-J]\b|[-+*/^=]))"
)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?")


def extract_answer(text: str) -> str:
    r"""Extract the answer of a solution; empty if it gives none.

    Takes the last `<answer>...</answer>`, or the last `\boxed{}` or `\fbox{}` with balanced braces, whichever comes
    later; otherwise the number after the last GSM8K `#### `; otherwise the last "the answer is" or "Answer:" followed
    by a short answer. A multiple-choice answer is returned as its letter, A to J.
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
    r"""Content of the last complete `\boxed{...}` or `\fbox{...}`, with nested braces; None without one."""
    boxes = list(_BOX.finditer(text))
    closings = _closing_braces(text) if boxes else {}
    for box in reversed(boxes):
        if box.end() in closings:
            return text[box.end() + 1 : closings[box.end()]].strip()
    return None


def canonical(answer: str) -> str:
    r"""Return a normalized text of an answer's value, without unit and styling; equal values usually have equal texts.

    It is cheap, and groups the votes of a search; correctness is decided by the grader.
    """
    return read(answer).key


def exact_match_key(answer: str) -> str:
    """`canonical` with the answer's name and unit, which can distinguish answers of the same value."""
    reading = read(answer)
    return f"{reading.key} {reading.mark}" if reading.mark else reading.key


def is_number(text: str) -> bool:
    """Whether `text` is a number, or a fraction of two, in digits."""
    return _NUMBER.fullmatch(text) is not None


def _last_tags(text: str) -> tuple[int, int]:
    """Start and end of the content of the last complete `<answer>`; zeros without one."""
    closing = 0
    for tag in reversed(list(_TAG.finditer(text))):
        if tag[1] and not closing:
            closing = tag.start()
        elif not tag[1] and closing:
            return tag.end(), closing
    return 0, 0


def _boxed(text: str, boxes: list[re.Match[str]]) -> str:
    """Content of the last non-empty box, joined with adjacent boxes; empty without one."""
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
    """The number, letter or formula after a box without braces; empty for a word."""
    found = _UNBRACED.match(text, start, start + _LONGEST)
    return found[0] if found and (re.search(r"[\d\\(]", found[0]) or len(found[0]) == 1) else ""


def _hashed(text: str) -> Iterator[str]:
    """Yield the rest of each line after `####`, from the last, if it is a number, choice or formula."""
    for line in reversed(list(_HASHED_LINE.finditer(text))[-_LAST:]):
        said = _undressed(_REASON.sub("", line[1]))
        reading = read(said)
        counts = reading.number is not None and not re.search(r"\d\s+[A-Z][a-z]", said)
        if counts or reading.choice or (said and line[1].lstrip().startswith(("$", "\\"))):
            yield said


def _said(text: str) -> Iterator[str]:
    """Yield what follows each "the answer is", from the last, if it is an answer."""
    for marker in reversed(list(_SAID.finditer(text))[-_LAST:]):
        rest = text[marker.end() : marker.end() + _LONGEST]
        if said := _formula(rest) or _phrase(rest):
            yield said


def _formula(rest: str) -> str:
    """The formula at the start of `rest`; empty if it is none, has no content, is a price, or one of several."""
    for opening, closing in _MATHS:
        if rest.startswith(opening) and (end := rest.find(closing, len(opening))) > 0:
            inside, after = rest[len(opening) : end].strip(), end + len(closing)
            price = _PRICE.match(inside) and (rest[after : after + 1].isdigit() or read(inside).number is None)
            states = re.search(r"\w", inside) and not (price or _ANOTHER.match(rest, after) or "\n\n" in inside)
            return _undressed(inside) if states else ""
    return ""


def _phrase(rest: str) -> str:
    """The choice, number or few words at the start of `rest`; empty for a longer text."""
    sentence = _SENTENCE.match(rest)
    said = _REASON.sub("", sentence[0].rstrip() if sentence else "").strip()
    if choice := _CHOSEN.match(said):
        return choice[1] or choice[2]
    said = _undressed(re.sub(r"\\?\$|\\[()\[\]]", "", said))
    return said if _SOLVED_BY_NOTHING.match(said) else _short(said)


def _short(said: str) -> str:
    """Return `said` if it is a few words, or a number with its unit; else an empty string."""
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", said)
    if _STATES_NOTHING.match(said) or not re.search(r"\w", said) or len(words) > _MOST_WORDS_OF_A_UNIT:
        return ""
    return said if len(words) <= _MOST_WORDS or read(said).number is not None else ""


def _undressed(answer: str) -> str:
    """Strip markdown, quotes, dollars and punctuation from `answer`; a choice becomes its letter."""
    text = undressed(answer)
    return letter_of(text) or text


def _closing_braces(text: str) -> dict[int, int]:
    """Map the index of each opening brace to that of its closing one; escaped and unmatched braces are left out."""
    open_ones: list[int] = []
    closings: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_ones.append(brace.start())
        elif open_ones:
            closings[open_ones.pop()] = brace.start()
    return closings
