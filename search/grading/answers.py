r"""Extracts the answer from a solution's text, and computes keys by which answers are compared.

An answer is recognized by the conventions of benchmarks and of models trained for them: `\boxed{}` (MATH),
`<answer>`, `#### ` (GSM8K), "the answer is", "Answer:" and their like in other languages (`notation.languages`). A
number at the end of the text is not taken for an answer.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

from espalier.search.grading.boxes import boxed, closes_all_braces
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
    `boxes`); otherwise the number or formula after the last GSM8K `#### `; otherwise the last "the answer is" or
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
    if not closes_all_braces(gold):
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
