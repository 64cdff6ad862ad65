r"""What an answer says: a value, and beside it a name, a unit and other words.

"x = 18 dollars", "\$18" and `18\text{ dollars}` have one value, 18. Plain text is read as words, LaTeX as LaTeX: the
letters of "dollars" are no product of variables.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from espalier.search.latex import plain, undressed
from espalier.search.numerals import number_in
from espalier.search.units import symbol, unit_of, units_agree

_LONGEST = 400
"""Characters of an answer that is read; a longer one is only what it is."""
_KEPT = 4096

_LETTER = r"(?:\\(?:text|bf)\s*\{\s*)*(?:\(\s*([A-J])\s*\)|([A-J])%s)[\s.:}]*"
_CHOICE = re.compile(_LETTER % r"\)?")
_CHOICE_AND_VALUE = re.compile(_LETTER % r"(?:[).]|[.:]?\s*\})(?=\s)" + r"(?![-+*/^=,&()\s.:}]|and\b|or\b)(.+)")
_NAME = (
    r"(?>(?:[A-Za-z][a-z]{2,}+|[A-Z]{2,3}|[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega)|"
    r"\\(?:angle|overline|triangle)\s*+\{?[A-Z]{1,3}\}?)(?:_\{?\w+\}?|')?(?:\((?:[A-Za-z]|-?\d+)(?:\s*,\s*(?:[A-Za-z]|-?\d+))*\))?)"
)
_NAMED = re.compile(rf"({_NAME}(?:\s*+[-+]?\s*+{_NAME})*+)\s*+(?:=|\\in(?![A-Za-z])|:=)\s*+(?=\S)")
_UNEQUAL = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_SUM = re.compile(r"[\d\s.,+*/()^-]*(?:\\(?:times|cdot|frac|sqrt|pi)[\d\s.,+*/()^{}-]*)*=")
_LEAD = re.compile(
    r"(?:(?:about|approximately|roughly|around|exactly|only|just|simply|equals?|is|an?\s+total\s+of|a\s+total\s+of|"
    r"USD|Rs\.?)(?![A-Za-z])|=|\\approx(?![A-Za-z]))\s*"
)
_PRICE = re.compile(r"(-?)\s*([$€£¥₹])\s*(-?)\s*(?=[\d.])")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_UNIT_QUOTIENT = re.compile(r"\\frac\{\s*\\text\{([^{}]*)\}\s*\}\{\s*\\text\{([^{}]*)\}\s*\}")
_TAIL_WORD = re.compile(r"(?:/\s*)?(?:[A-Za-z][A-Za-z'-]*|[$€£¥₹¢])\.?(?:\^?\{?\d\}?)?(?:/[A-Za-z]+(?:\^?\{?\d\}?)?)*[.,;]?|/")
_GLUED = re.compile(r"(.*[\d)}])((?:[A-Za-z]{2,}|[¢€£$¥₹])(?:\^?\{?\d\}?)?(?:/[A-Za-z]+(?:\^?\{?\d\}?)?)?)")
_BASE = re.compile(r"(.*[0-9A-F])\s*(?:_\s*\{?|base)\s*(\d{1,2})\s*\}?")
_FREE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_VALUE = re.compile(r"[\d\\]")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-z]*\*?\}|\\math[a-z]+\{[A-Za-z]\}")
_JOINED = re.compile(r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))\s*")
_CALLED = re.compile(r"([^=:<>,;\d+*/^]{2,60}+)[=:]\s*(?=[^\s=])")
_HOUR = re.compile(r"(?<=\d)\s*(?:\\text\{\s*)?([AaPp])\.?\s?[Mm]\b\.?\s*\}?")
_COLONS = re.compile(r"\d+(?:\s*:\s*\d+)+")
_FUNCTIONS = frozenset("sin cos tan cot sec csc log exp max gcd lcm det dim arcsin arccos arctan sinh cosh tanh".split())
_NOT_A_UNIT = _FUNCTIONS | frozenset(
    "or and to than plus minus over factorial choose mod modulo is are was not no if when where but half halves third "
    "thirds fourth fourths quarters fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths "
    "hundredth hundredths thousandth thousandths hundred thousand million billion trillion dozen dozens score negative "
    "squared cubed root roots base infinity remainder through until between from abc xyz pqr".split()
)
"""Words after a number that make it another one, or something else than a number."""
_FILLERS = frozenset(
    "unit total more left altogether overall in of the a an per each every for to on at from with by and so far now".split()
)
_STOPS = re.compile(r"(?<!\d)[,.;!?\"'](?!\d)|[,.;!?\"'](?!\w)|(?<!\w)(?:the|an?|there\s+(?:is|are))(?!\w)", re.IGNORECASE)


@dataclass(frozen=True)
class Reading:
    """One answer, read.

    Attributes:
        whole: the answer in plain spelling.
        value: what is left without the rest, as LaTeX or as words.
        number: the value, where it is a plain number; of a percentage, what stands before the sign.
        percent: whether a percent sign follows.
        words: the value in lower case without punctuation, where it is words rather than a formula.
        name: what stands left of `=`, such as `x`.
        unit: of measure or money, such as `cm^2`; the base of a number, such as `_8`.
        nouns: other words that follow the value, in the singular.
        choice: the letter of a choice.
    """

    whole: str
    value: str
    number: Fraction | None = None
    percent: bool = False
    words: str = ""
    name: str = ""
    unit: str = ""
    nouns: frozenset[str] = frozenset()
    choice: str = ""

    @cached_property
    def key(self) -> str:
        """The value in a spelling under which equal ones usually meet."""
        if self.choice:
            return self.choice
        if self.number is not None:
            return str(self.number / 100 if self.percent else self.number)
        return self.words or without_blanks(self.value) + "%" * self.percent

    @property
    def mark(self) -> str:
        """What stands beside the value and may make it another answer; empty in most."""
        chosen = without_blanks(self.value) if self.choice and self.value != self.whole else ""
        return " ".join(filter(None, (self.name and self.name + "=", self.unit, chosen)))


def marks_agree(readings: Iterable[Reading]) -> bool:
    """Whether no two of `readings` have different names, units or chosen values beside their own values."""
    several = list(readings)
    names = {reading.name for reading in several if reading.name}
    chosen = {reading.value for reading in several if reading.choice and reading.value != reading.whole}
    return len(names) <= 1 and len(chosen) <= 1 and units_agree(*(reading.unit for reading in several))


@lru_cache(_KEPT)
def read(answer: str) -> Reading:
    """Read an answer; of any text there is a reading."""
    if len(answer) > _LONGEST:
        return Reading(answer, answer.strip())
    whole = plain(undressed(answer))
    if inside := re.fullmatch(r"\\(?:boxed|fbox)\s*\{(.*)\}", whole):
        whole = plain(undressed(inside[1]))
    while inside := _TEXT.fullmatch(whole):
        whole = plain(undressed(inside[1]))
    whole = undressed(whole)
    if choice := _CHOICE.fullmatch(whole):
        return Reading(whole, whole, choice=choice[1] or choice[2])
    if choice := _CHOICE_AND_VALUE.fullmatch(whole):
        return Reading(whole, choice[3].strip(), choice=choice[1] or choice[2])
    return _value(whole)


def without_blanks(text: str) -> str:
    """`text` without blanks, but for those between two digits: 2 1/2 is not 21/2."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def is_words(text: str) -> bool:
    """Whether `text` holds a word, which no product of variables is."""
    bare = _ENVIRONMENT.sub("", _TEXT.sub(" word ", text))
    return any(_is_word(word[0]) for word in _FREE_WORD.finditer(bare))


def _value(whole: str) -> Reading:
    whole = _HOUR.sub(r" \1m", whole)
    if not is_words(joined := _JOINED.sub(", ", whole)):
        whole = joined
    name, rest = _named(whole)
    rest, price = _lead(rest)
    value, tail = _tail(rest)
    unit, percent = price or unit_of(tail), False
    if tail.lower().startswith(("percent", "per cent", "pct")):
        percent, unit, tail = True, "", tail.partition(" ")[2]
    elif value.endswith("%"):
        percent, value = True, value[:-1].rstrip()
    elif value.endswith("°") and "\\" not in value.replace("\\frac", "").replace("\\pi", ""):
        value, unit = value[:-1].rstrip(), "°" + (tail if tail in ("C", "F") else "")
    if base := _BASE.fullmatch(value):
        value, unit = base[1].rstrip(), "_" + base[2]
    number = number_in(value)
    if number is None and not tail and not name and (is_words(rest) or _COLONS.fullmatch(rest)):
        return Reading(whole, rest, words=_as_words(rest), unit="")
    if number is None and (_COLONS.fullmatch(value) or is_words(value)):
        return Reading(whole, value, words=_as_words(value), name=name, unit=unit)
    return Reading(whole, value, number, percent, "", name, unit, _nouns(tail, unit))


def _named(whole: str) -> tuple[str, str]:
    """The name before an equals sign, and what follows the last; a word or a sum that is worked out is no name."""
    if (found := _CALLED.match(whole)) and is_words(found[1]):
        return "", whole[found.end() :].rpartition("=")[2].strip()
    if (found := _NAMED.match(whole)) and not _UNEQUAL.search(whole):
        rest = whole[found.end() :]
        if "," in rest and "=" in rest:
            return "", whole
        return without_blanks(found[1]), rest.rpartition("=")[2].strip() or rest
    if _SUM.match(whole) and not re.search(r"[,<>]", whole):
        return "", whole.rpartition("=")[2].strip()
    return "", whole


def _lead(text: str) -> tuple[str, str]:
    """`text` without "about" and a sign of money before a number, and the unit of that sign."""
    while found := _LEAD.match(text):
        text = text[found.end() :]
    if found := _PRICE.match(text):
        return found[1] + found[3] + text[found.end() :], unit_of(found[2])
    return text, ""


def _tail(text: str) -> tuple[str, str]:
    """`text` up to the words that follow a number or formula, and these words."""
    unfolded = _TEXT.sub(r" \1 ", _UNIT_QUOTIENT.sub(r"\\text{\1/\2}", text))
    unfolded = re.sub(r"\s*\^", "^", re.sub(r"\s*(?<=[A-Za-z.] )/\s*", "/", unfolded))
    words = unfolded.replace("°", "° ").split()
    first = len(words)
    while first and _TAIL_WORD.fullmatch(words[first - 1]):
        first -= 1
    while first < len(words) and not _starts_a_tail(words[first]):
        first += 1
    value, tail = " ".join(words[:first]).replace("° ", "°"), words[first:]
    if tail and tail[0].lower() in _SCALED_BY and number_in(f"{value} {tail[0].lower()}") is not None:
        value, tail = f"{value} {tail[0].lower()}", tail[1:]
    if not tail and (glued := _GLUED.fullmatch(value)) and unit_of(glued[2]):
        value, tail = glued[1], [glued[2]]
    blocked = any(word.strip(".,;").lower() in _NOT_A_UNIT for word in tail)
    if not tail or blocked or not _VALUE.search(value) or is_words(re.sub(r" [a-z]+$", "", value) if _scaled(value) else value):
        return (value, "") if not tail else (text, "")
    return value, " ".join(tail)


_SCALED_BY = frozenset(("hundred", "thousand", "million", "billion", "trillion"))


def _scaled(value: str) -> bool:
    return value.rpartition(" ")[2] in _SCALED_BY


def _starts_a_tail(word: str) -> bool:
    bare = re.split(r"[\^{/\d]", word.strip(".,;/"), maxsplit=1)[0]
    return bool(symbol(bare)) or (_is_word(bare) and bare.lower() not in _FUNCTIONS) or bare in ("in", "of", "sq", "cu", "C", "F")


def _is_word(word: str) -> bool:
    """Whether letters are a word: three or more with a vowel, and not all of them capitals."""
    return word.lower() in ("no", "or", "up") or (
        len(word) > 2 and word.lower() not in _FUNCTIONS and bool(re.search("[aeiouy]", word)) and word not in ("abc", "xyz")
    ) or (len(word) > 3 and word.isupper() and bool(re.search("[AEIOUY]", word)))


def _as_words(text: str) -> str:
    bare = _TEXT.sub(r" \1 ", text)
    bare = re.sub(r"(?<=\d):0(?=\d)|(?<![\d.])0(?=\d:)", lambda zero: zero[0].rstrip("0"), bare)
    return " ".join(_singular(word) for word in _STOPS.sub(" ", bare.lower()).split())


def _nouns(tail: str, unit: str) -> frozenset[str]:
    if unit:
        return frozenset()
    words = (_singular(word.strip(".,;'").lower()) for word in tail.split())
    return frozenset(word for word in words if word and word not in _FILLERS)


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
