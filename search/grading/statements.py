"""Finds the answer that a text states: "the answer is", "Answer:", and the like in all languages of `words.toml`."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from espalier.search.grading.notation import languages
from espalier.search.grading.notation.latex import undressed
from espalier.search.grading.programs import fenced_at, is_program
from espalier.search.grading.reading import bare, read, without_remark

_ORNAMENT = "\u2190-\u2794\u2798-\u2bff\ufe0f\u20e3\U0001f000-\U0001f51e\U0001f520-\U0001faff"
"""Arrows, check marks, emoji and other symbols, but for signs and the keycap of ten."""
_GAP = rf"[\s:：*_{_ORNAMENT}]*+(?:-{{3,}}[\s:*_]*+)?"
"""Between what introduces an answer and the answer; a rule may stand there."""
_LINK = rf"\s*+(?:->|=>|[:=：＝])|(?<=[{_ORNAMENT}])(?=\s*[-\d$\\(*])"
"""Between the name of an answer and the answer, where there is no verb."""
_MATHS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
_ANOTHER = re.compile(
    rf"\s*(?:[,，、]|(?:{languages.AND_OR}|{languages.AND_OR_LETTERS})(?!\w)|{languages.AND_OR_UNSPACED})\s*"
    r"(?:\$|\\[(\[]|-?\d)"
)
_PRICE = re.compile(r"\d[\d.,]*\s+[A-Za-z]{2,}")
_SENTENCE = re.compile(r".*?(?=\.(?:\s|\*|\"|$)|[。।۔؟]|\*\*(?:\W|$)|$)", re.MULTILINE)
_STATES_NOTHING = re.compile(
    r"(?:not|no|the|a|an|that|what|this|in|to|by|at|of|as|if|it|we|i|you|they|there|one|given|found|obtained|equal|also|"
    r"always|still|now|only|very|too)\s+[^\W\d_]|(?:not|unknown|unclear|wrong|right|correct|incorrect|true that|given|"
    r"found|obtained|shown|below|above|as follows|yet)\b",
    re.IGNORECASE,
)
_SOLVED_BY_NOTHING = re.compile(
    r"no\s+(?:real\s+|such\s+|integer\s+)?(?:solutions?|answers?|values?|roots?)$", re.IGNORECASE
)
_STOPS = re.compile(r"(?<!\\)[ ,;.，；。．]+$")
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")
_UNSPACED_LETTER = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")
_MAX_WORDS = 3
_MAX_WORDS_OF_A_UNIT = 10
_LETTERS_OF_A_WORD = 3
"""Letters that are counted as a word where words are not separated."""
_MAX_LENGTH = 1000
"""Characters after "the answer is" that are searched for the answer."""
MAX_PLACES = 64
"""Maximum number of candidate places in a text that are examined, from the end."""
_CHOSEN = re.compile(
    rf"(?i:(?:(?:{languages.ARTICLES})\s+)?(?:{languages.OPTIONS})\s*+)?"
    r"(?:\(([A-J])\)|([A-J])(?:[).:]|$|选项|選項))(?!\s*(?:(?:,|and|or|&)\s*\(?[A-J]\b|[-+*/^=]))"
)
_NARROW = str.maketrans("（）：．，", "():.,")


class _Patterns(NamedTuple):
    """Patterns of one language; see `languages.Language`."""

    marker: re.Pattern[str]
    reason: re.Pattern[str]
    nothing: re.Pattern[str]
    denied: re.Pattern[str]
    endings: tuple[str, ...]


def statements(text: str) -> Iterator[str]:
    """Yield what follows each "the answer is", from the last, if it is an answer."""
    text = text if text.isascii() else unicodedata.normalize("NFC", text)
    markers = list[tuple[int, _Patterns]]()
    folded = text.casefold()
    for name, stems in _stems().items():
        if any(stem in folded for stem in stems):
            patterns = _patterns(name)
            markers += [(found.end(), patterns) for found in patterns.marker.finditer(text)]
    for end, patterns in sorted(markers, key=lambda marker: marker[0])[: -MAX_PLACES - 1 : -1]:
        if (program := fenced_at(text, end)) is not None:
            if program:
                yield program if is_program(program) else bare(program)
            return  # where the fence is not closed, the answer was cut off
        rest = text[end : end + _MAX_LENGTH]
        if statement := _formula(rest) or _phrase(rest, patterns):
            yield statement


def phrase(text: str) -> str:
    """The choice, number or few words at the start of `text`; empty for a longer text."""
    return _phrase(text, _patterns("English"))


def without_reason(text: str) -> str:
    """Strip "because ..." from the end of an answer."""
    return _patterns("English").reason.sub("", text)


def few_words(statement: str) -> str:
    """Return `statement` if it is a few words, or a number with its unit; else an empty string."""
    if _STATES_NOTHING.match(statement) or not re.search(r"\w", statement):
        return ""
    words = sum(
        max(1, len(word) // _LETTERS_OF_A_WORD) if _UNSPACED_LETTER.match(word) else 1
        for word in _WORD.findall(statement)
    )
    if words > _MAX_WORDS_OF_A_UNIT:
        return ""
    return statement if words <= _MAX_WORDS or read(statement).number is not None else ""


def _formula(rest: str) -> str:
    """The formula at the start of `rest`; empty if it is none, has no content, is a price, or one of several."""
    for opening, closing in _MATHS:
        if rest.startswith(opening) and (end := rest.find(closing, len(opening))) > 0:
            inside, after = rest[len(opening) : end].strip(), end + len(closing)
            price = _PRICE.match(inside) and (rest[after : after + 1].isdigit() or read(inside).number is None)
            states = re.search(r"\w", inside) and not (price or _ANOTHER.match(rest, after) or "\n\n" in inside)
            return bare(inside) if states else ""
    return ""


def _phrase(rest: str, patterns: _Patterns) -> str:
    """The choice, number or few words at the start of `rest`, in English and another language."""
    sentence = _SENTENCE.match(rest)
    statement = without_reason(sentence[0].rstrip() if sentence else "").strip()
    statement = _trimmed(statement, patterns)
    statement = without_remark(statement if statement.isascii() else undressed(statement))
    if choice := _chosen(statement):
        return choice
    statement = bare(re.sub(r"\\?\$|\\[()\[\]]", "", statement).rstrip("*_ "))
    return statement if _SOLVED_BY_NOTHING.match(statement) else few_words(statement)


def _trimmed(statement: str, patterns: _Patterns) -> str:
    """An answer without its reason and the end of its sentence; empty if it is denied, or none."""
    statement = _STOPS.sub("", patterns.reason.sub("", statement))
    if patterns.denied.search(statement) or (patterns.nothing.match(statement) and not _chosen(statement)):
        return ""
    ending = next((ending for ending in patterns.endings if statement.endswith(ending)), "")
    return statement.removesuffix(ending).rstrip()


def _chosen(statement: str) -> str:
    """The letter of a choice at the start of `statement`; empty if none is there."""
    choice = _CHOSEN.match(statement if statement.isascii() else statement.translate(_NARROW))
    return (choice[1] or choice[2]) if choice else ""


@cache
def _stems() -> dict[str, tuple[str, ...]]:
    """For each language the shortest names of an answer: without any of them a text has none of its markers."""
    table = languages.LANGUAGES
    names = {name: [word.casefold() for word in languages.listed(of.answer)] for name, of in table.items()}
    return {
        name: tuple(word for word in words if not any(other != word and other in word for other in words))
        for name, words in names.items()
    }


@cache
def _patterns(name: str) -> _Patterns:
    """Compile the patterns of a language."""
    of = languages.LANGUAGES[name]
    start, end, blank = (r"(?<![^\W_])", r"(?![^\W_])", r"\s++") if of.spaced else ("", "", r"\s*+")
    answer = rf"{start}(?:{languages.any_of(of.answer)}){end}"
    links = [_LINK, r"\s*+[—–]", r"\s++-(?=\s)"]
    if of.verbs:
        links.append(rf"{blank}(?:{languages.any_of(of.verbs)}){end}")
    if of.verb_last:
        links.append(r"\s++(?=[-\d$\\(])")
    then = languages.any_of(of.then) or "(?!)"
    of_what = rf"(?:\s++(?:{languages.any_of(of.of_what)})\s++[^.:\n]{{1,60}}?)?" if of.of_what else ""
    # Texts may be long and repetitive, so repetitions are possessive (`++`): no backtracking.
    marker = (
        rf"(?:^[^\w\n#*]{{0,8}}+(?:\#++[^\w\n]{{0,8}}+|\*\*){answer}[^\w\n$\\]*+\n|"
        rf"{answer}(?:[*_]|\s?[{_ORNAMENT}])*+(?:,\s*+(?:{then}),)?{of_what}(?:{'|'.join(links)}))"
        rf"{_GAP}(?:(?:{then}){end}{_GAP},?\s*+)*+"
    )
    before_reason = r"[,;(]?(?<!\s)\s++(?:[(-]++\s*+)?" if of.spaced else r"[,，;；(（\s]\s*+"
    reasons = languages.any_of(of.reasons) or "(?!)"
    return _Patterns(
        re.compile(marker, re.IGNORECASE | re.MULTILINE),
        re.compile(rf"{before_reason}(?:{reasons}){end}.*|;\s.*", re.IGNORECASE),
        re.compile(rf"(?:{languages.any_of(of.nothing)}){blank}[^\W\d_]" if of.nothing else "(?!)", re.IGNORECASE),
        re.compile(languages.any_of(of.not_right) or "(?!)", re.IGNORECASE),
        tuple(languages.listed(of.endings)),
    )
