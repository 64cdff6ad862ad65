r"""Extracts the answer from a solution's text, and computes keys by which answers are compared.

An answer is recognized by the conventions of benchmarks and of models trained for them: `\boxed{}` (MATH),
`<answer>`, `#### ` (GSM8K), "the answer is", "Answer:" and their like in other languages (`notation.languages`). A
number at the end of the text is not taken for an answer.

The last box counts, together with those beside it that belong to the same answer: separated by commas, conjunctions,
space or new lines alone, and by the names of unknowns, as in `x=\boxed{1}, y=\boxed{2}`. If only space separates them,
their contents must be numbers or have names: formulas may be two forms of one answer. Words between two boxes correct
the first.

A box without braces holds the number, letter or formula that follows. An empty box, and `\boxed` before a word, mention
the command and hold nothing. A last box that is not closed was cut off: its answer is not known, and the boxes before
it were no longer the answer, so there is none.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from espalier.search.grading.notation import languages
from espalier.search.grading.programs import as_program, fenced, is_program
from espalier.search.grading.reading import MAX_PARSED, bare, is_words, read
from espalier.search.grading.statements import MAX_PLACES, few_words, phrase, statements, without_reason

Weight = TypeVar("Weight", int, float)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
# Texts may be long and repetitive, so repetitions are possessive (`++`): no backtracking.
_HASHES = re.compile(
    r"^####\s*+[*\\$]*+(-?[\\$]*+(?=[.,/]*+\d)[\d.,/]++[^\S\n]*+\\?%?)(?:[*$.]|[^\S\n])*+$", re.MULTILINE
)
_HASHED_LINE = re.compile(r"^####(?!#)[^\S\n]*+(?!\d++[.)]\s)([^\n]{1,200})$", re.MULTILINE)
_VARIABLE = re.compile(r"[a-z]")
_OPERATOR = re.compile(r"[-+*/^=<>,()\[\]\\]|\d[a-z]\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_GOLD_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")
_MAX_GOLD_WORDS = 10
_EQUATION = re.compile(r"[A-Za-z](?:_\w+)?\s*=[^=]{1,100}")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?")


def extract_answer(text: str) -> str:
    r"""Extract the answer of a solution; empty if it gives none.

    Takes the last `<answer>...</answer>`, or the last `\boxed{}` with those beside it, whichever comes later (see
    above); otherwise the number or formula after the last GSM8K `#### `; otherwise the last "the answer is" or
    "Answer:" followed by a short answer, also in other languages. A multiple-choice answer is returned as its letter,
    A to J.

    A program between `<answer>` tags, or between fences there or after "the answer is", is taken whole without fences.

    A box that is begun and not closed was cut off: what stands before it is no longer the answer.
    """
    boxes = boxed(text)
    opening, closing = _last_tags(text)
    if closing > max(boxes.last, 0):
        inside = text[opening:closing]
        if (program := _program(inside)) is not None:
            return program
        return extract_answer(_TAG.sub(" ", inside)) or phrase(inside.strip()) or few_words(bare(inside))
    if boxes.answer:
        return boxes.answer
    rest = text[max(boxes.cut, 0) :]
    if found := _HASHES.findall(rest):
        return re.sub(r"[\s$]|\\(?=\$)", "", found[-1]).rstrip(".,")
    return next(_hashed(rest), "") or next(statements(rest), "")


def extract_gold(text: str) -> str:
    """Extract the gold answer of a benchmark's field, by the rules for answers; empty if it gives none.

    A worked solution is searched as a solution to grade is. A few words, and a text of one line in which no answer is
    found, are the gold answer themselves. The commas of thousands after `####` are dropped.
    """
    boxes = boxed(text)
    if boxes.cut >= 0:
        return ""
    stripped = text.strip()
    if "####" not in text and not _TAG.search(text) and (stripped.startswith(("```", "~~~")) or is_program(stripped)):
        return _program(stripped) or ""
    one_line = "\n" not in stripped or "\\begin" in stripped
    if one_line and boxes.last < 0 and "####" not in text and not _TAG.search(text):
        return (few_words(stripped) and stripped) or extract_answer(text) or stripped
    found = extract_answer(text)
    return found if boxes.answer else _THOUSANDS.sub("", found)


def doubt_of(gold: str) -> str:
    """Why a gold answer is right only beside the same text, in a few words; empty if it can be read."""
    reading = read(gold)
    if len(gold) > MAX_PARSED and reading.number is None:
        return f"it has {len(gold)} characters, of which {MAX_PARSED} can be read"
    if boxed(gold).cut >= 0 or "\\boxed" in reading.whole:
        return "its box has no end"
    if len(_BRACE.findall(gold)) != 2 * len(_closing_braces(gold)):
        return "its braces do not match"
    words = len(_GOLD_WORD.findall(reading.whole))
    return f"it is a text of {words} words" if words > _MAX_GOLD_WORDS and reading.number is None else ""


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
    """Return whether `text` is a number, or a fraction of two, in digits."""
    return _NUMBER.fullmatch(text) is not None


def leader_and_rival(weights: Mapping[str, Weight]) -> tuple[Weight, Weight]:
    """Return the largest weight of an answer, and an upper bound on that of any other.

    The bound assumes that other answers are equal to each other, except plain numbers, which are known to differ.

    Args:
        weights: weights of answers by their exact-match key.
    """
    leader = max(weights, key=lambda key: weights[key])
    numbers = [weight for key, weight in weights.items() if key != leader and is_number(key)]
    unsure = [weight for key, weight in weights.items() if key != leader and not is_number(key)]
    return weights[leader], sum(unsure, start=max(numbers, default=weights[leader] * 0))


def _program(text: str) -> str | None:
    """The text between fences, or the whole if it is code; None for other texts, and for those with a box."""
    if "\\boxed" in text:
        return None
    content = fenced(text)
    if content is None:
        if is_program(text):
            return as_program(text)
        equations = [bare(line) for line in text.strip().splitlines()]
        return ", ".join(equations) if len(equations) > 1 and all(map(_EQUATION.fullmatch, equations)) else None
    return content if is_program(content) else bare(content)


def _last_tags(text: str) -> tuple[int, int]:
    """Start and end of the content of the last complete `<answer>`; zeros without one."""
    closing = 0
    for tag in reversed(list(_TAG.finditer(text))):
        if tag[1] and not closing:
            closing = tag.start()
        elif not tag[1] and closing:
            return tag.end(), closing
    return 0, 0


def _hashed(text: str) -> Iterator[str]:
    """Yield the rest of each line after `####`, from the last, if it is a number, choice or formula."""
    for line in reversed(list(_HASHED_LINE.finditer(text))[-MAX_PLACES:]):
        said = bare(without_reason(line[1]))
        reading = read(said)
        counts = reading.number is not None and not re.search(r"\d\s+[A-Z][a-z]", said)
        marked = said and line[1].lstrip().startswith(("$", "\\"))
        formula = not is_words(said) and (_OPERATOR.search(said) or _VARIABLE.fullmatch(said))  # and no heading
        if counts or reading.choice or marked or formula:
            yield said


# ---- boxes

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"(?<!\\)[{}]")
_UNBRACED = re.compile(r"(?!-?\\(?:boxed|fbox))(?:\([^()\n]{1,80}\)|-?\\?[^\s${}\\]+(?:\{[^{}\n]{0,80}\}){0,2})")
"""Content of a box without braces: TeX would take one digit, models mean the whole number."""
_WORDS = f"{languages.AND_OR}|{languages.AND_OR_LETTERS}"
_CONJUNCTION = rf"(?:(?<![\w\\])(?:{_WORDS})(?!\w)|{languages.AND_OR_UNSPACED})"
_NAME = r"(?:\\[a-z]+|[A-Za-z])(?:_\{?\w+\}?|'|\([\w, ]{1,12}\))?"
_NAMED = re.compile(rf"(?<![A-Za-z\\+*/^)}}-])({_NAME})\s*&?\s*=\s*&?\s*(?:\$|\\[(\[,;! ])?\s*$")
_BESIDE = re.compile(
    rf"(?:[\s$,;&*、，；]|\\[()\[\],;:!> ]|\\\\|\\(?:q?quad|l?or|vee)(?![A-Za-z])|(?<=\n)[-•]\s|"
    rf"(?<![A-Za-z\\]){_NAME}\s*&?\s*=|{_CONJUNCTION}|\\(?:text|textrm|mathrm|mbox)\{{[\s,;]*(?:{_WORDS}|{languages.AND_OR_UNSPACED})?[\s,;]*\}})*+",
    re.IGNORECASE,
)
"""Text between two boxes that belong to one answer."""
_JOINT = re.compile(rf"[,;&、，；]|\\\\|\\q?quad|\\l?or(?![A-Za-z])|\\vee|{_CONJUNCTION}", re.IGNORECASE)
"""Text between boxes that makes them one answer whatever they hold; a mere space or new line does not."""
_MAX_BETWEEN = 80
_MAX_BOXES = 16
_MAX_UNBRACED = 1000
_MAX_NAME = 40


class Boxed(NamedTuple):
    """Content of the boxes of a text.

    Attributes:
        answer: content of the last box, with the boxes beside it; empty without one.
        last: where the last of all boxes starts; -1 without one.
        cut: where a last box starts that is not closed; -1 if there is none.
    """

    answer: str = ""
    last: int = -1
    cut: int = -1


class _Box(NamedTuple):
    name: str
    content: str


def boxed(text: str) -> Boxed:
    """Read the last box of a text, and those beside it."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return Boxed()
    closings, last = _closing_braces(text), boxes[-1].start()
    found: list[_Box] = []
    after = 0
    for box in reversed(boxes):
        braced = box.end() in closings
        if not braced and text.startswith("{", box.end()):
            if found:
                break
            return Boxed(last=last, cut=box.start())
        inside = text[box.end() + 1 : closings[box.end()]] if braced else _unbraced(text, box.end())
        end = closings[box.end()] + 1 if braced else box.end() + len(inside)
        content = bare(inside)
        if not content or (found and end > after):  # it encloses the box after it
            continue
        name = _NAMED.search(text, max(0, box.start() - _MAX_NAME), box.start())
        this = _Box(name[1] if name else "", content)
        if found and (len(found) == _MAX_BOXES or not _belong(this, found[-1], text[end:after])):
            break
        found.append(this)
        after = box.start()
    return Boxed(_joined(found[::-1]), last)


def content_before_brace(text: str) -> str | None:
    """The content of a box whose text begins behind its opening brace; None if the box is not closed."""
    closing = _closing_braces("{" + text).get(0)
    return None if closing is None else text[: closing - 1].strip()


def _belong(one: _Box, other: _Box, between: str) -> bool:
    """Return whether two boxes are parts of one answer, by what stands between them."""
    if len(between) > _MAX_BETWEEN or not _BESIDE.fullmatch(between):
        return False
    if _JOINT.search(between) or (one.name and other.name and one.name != other.name):
        return True
    return read(one.content).number is not None and read(other.content).number is not None


def _joined(boxes: list[_Box]) -> str:
    """The contents of boxes that are one answer, each once; with the names of several unknowns."""
    named = len(boxes) > 1 and all(box.name for box in boxes) and len({box.name for box in boxes}) > 1
    by_value: dict[str, str] = {}
    for box in boxes:
        content = f"{box.name}={box.content}" if named and "=" not in box.content else box.content
        by_value.setdefault((box.name if named else "") + read(box.content).key, content)
    return ", ".join(by_value.values())


def _unbraced(text: str, start: int) -> str:
    """The number, letter or formula after a box without braces; empty for a word."""
    found = _UNBRACED.match(text, start, start + _MAX_UNBRACED)
    return found[0] if found and (re.search(r"[\d\\(]", found[0]) or len(found[0]) == 1) else ""


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
