r"""Parses an answer into its value, name, unit and other words.

"x = 18 dollars", "\$18" and `18\text{ dollars}` all have the value 18. Plain text is parsed as words, LaTeX as LaTeX:
the letters of "dollars" are not a product of variables.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache, partial

from espalier.search.grading.notation import languages, numerals
from espalier.search.grading.notation.latex import in_one_line, plain, undressed, until_same, upright
from espalier.search.grading.notation.units import product_unit, ratio, symbol, unit_of, units_agree, upright_unit
from espalier.search.grading.programs import are_calls, as_program, is_program, is_text_of_lines

MAX_PARSED = 400
"""Maximum characters of an answer that is parsed; a longer one is kept as plain text, unless it is a decimal."""
_KEPT = 4096

_FOREIGN = r"[^\W\d_A-Za-z\u0370-\u03ff]"
"""A letter that no formula has: neither Latin without accents nor Greek."""
_FOREIGN_LETTER = re.compile(_FOREIGN)
_FOREIGN_WORD = re.compile(rf"(?<=[\d}})%°])\s*([百千万萬亿億兆만억백천조]?)\s*(?={_FOREIGN}|\s|$)")
_SIMPLE = re.compile(r"-?[0-9]{1,100}(?:\.[0-9]{1,100})?")
_PER = re.compile(r"(?<=\d)\s*/\s*(?=[A-Za-z])")
_IN_BOLD = r"(?:\\(?:text|textbf|textrm|textsf|mathrm|mathbf|mathsf|mbox|bf)\s*\{\s*)*"
_OPTION = rf"(?i:(?:(?:the|{languages.ARTICLES})\s+)?(?:{languages.OPTIONS})\s*)"
_CHOICE = re.compile(rf"{_IN_BOLD}{_OPTION}?(?:\(\s*([A-J])\s*\)|([A-J])\)?)[\s.:}}]*|{_OPTION}\(?([a-j])\)?[\s.:}}]*")
_CHOICE_AND_VALUE = re.compile(
    rf"{_IN_BOLD}{_OPTION}?(?:\(\s*([A-J])\s*\)|([A-J])(?:[).:]|[.:]?\s*\}})(?=\s))[\s.:}}]*"
    r"(?![-+*/^=,&()\s.:}]|and\b|or\b)((?:(?![,;\s]\(?[A-J][).:]\s).)+)"
)
_NAME = (
    r"(?>(?:[A-Za-z][a-z]{2,}+|[A-Z]{2,3}|[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega)|"
    r"\\(?:angle|overline|overrightarrow|triangle)\s*+\{?[A-Z]{1,3}\}?)(?:_\{?\w+\}?|')?"
    r"(?:\((?:[A-Za-z]|-?\d+)(?:\s*,\s*(?:[A-Za-z]|-?\d+))*\))?)"
)
_NAMED = re.compile(rf"({_NAME}(?:\s*+[-+]?\s*+{_NAME})*+)\s*+(?:=|\\in(?![A-Za-z])|:=)\s*+(?=\S)")
_COLON = re.compile(r"([A-Za-z](?:_\{?\w+\}?|')?):\s+(?=[-\d($])")
_UNEQUAL = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_SUM = re.compile(r"[\d\s.,+*/()^-]*(?:\\(?:times|cdot|frac|sqrt|pi)[\d\s.,+*/()^{}-]*)*=")
_LEAD = re.compile(
    r"(?:(?i:about|approximately|roughly|around|exactly|only|just|simply|equals?|is|a\s+total\s+of|"
    r"USD|Rs\.?)(?![A-Za-z])|=|\\approx(?![A-Za-z]))\s*"
)
_PRICE = re.compile(r"(-?)\s*([$€£¥₹₩₽])\s*(-?)\s*(?=[\d.])")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_AROUND = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}|\\text\{([^{}]*)\}")
_FUNCTION = re.compile(r"\\(?!frac|pi(?![a-z]))[a-z]+")
_POWER = r"(?:\^?\{?-?\d\}?)?"
_TAIL_WORD = re.compile(
    rf"(?:/\s*)?(?:[A-Za-z][A-Za-z'-]*|[$€£¥₹₩₽¢Ω]|[^\W\d_][^\x00-\x40\x5b-\x60\x7b-\x7f]*)\.?{_POWER}"
    rf"(?:[/*][A-Za-z]+{_POWER})*[.,;]?|/"
)
_GLUED = re.compile(rf"(.*[\d)}}])((?:[A-Za-z]{{2,}}|[¢€£$¥₹]){_POWER}(?:/[A-Za-z]+{_POWER})*)")
_BASE = re.compile(
    r"\(?(-?(?=[A-F]*\d)[\dA-F,]+(?:\.[\dA-F]+)?)\)?\s*(?:_|\(?(?:in\s+)?base(?![A-Za-z])[-_]?)[\s{(]*(?:\\text\{\s*)?"
    r"(\d{1,2}|[A-Za-z-]+)[\s)}]*"
)
_PAID_FOR = re.compile(r"/\s*|(?:per|an?)\s+")
_ABBREVIATION = re.compile(r"(?:[A-Za-z]\.){2,}[A-Za-z]\.?")
_COMPOUND = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+|[$¢°])\.?(?:,\s*and\s+|\s*,\s*|\s+and\s+|\s+|$)")
_BELOW = re.compile(r"/\s*\(([A-Za-z]+(?:(?:\s|\*|\\cdot)+[A-Za-z]+)*\s*)\)")
_TUPLE = re.compile(r"(\([A-Za-z](?:\s*,\s*[A-Za-z])+\))\s*=\s*(?=[(\[\\])")
_BESIDE_QUOTIENT = re.compile(r"(.*(?:[\d)}]|\\pi))(\s?)\\frac\{(.{1,80})\}\{(.{1,80})\}")
_POWER_IN_TEXT = re.compile(r"(\\text\{[^{}]*\^)\{(-?\d)\}")
_TIMES = re.compile(
    r"((?:(?<=\s)|(?<=[\d}])(?=[A-Za-z]{2}))[A-Za-z]+(?:\^\{?-?\d\}?)?)\s*(?:\\cdot|\*)\s*(?=([A-Za-z]+))"
)
_WITH_REASON = re.compile(
    r"(yes|no|true|false)\b[\s,;.:-]+(?:because|since|as|it|they|this|that|there|he|she|we|you|the)\b[^\d$\\=<>]*",
    re.IGNORECASE,
)
_FREE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
_VALUE = re.compile(r"[\d\\]")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-z]*\*?\}|\\math[a-z]+\{[A-Za-z]\}")
_JOINED = re.compile(
    rf",?\s*(?:\\text\{{\s*(?:{languages.AND_OR})\s*\}}|(?<![\\\w])(?i:{languages.AND_OR})(?!\w)|"
    rf"(?<=[\d\s])\\(?:lor|vee)(?![A-Za-z])|(?:{languages.AND_OR_UNSPACED})(?=\s*[-\d\\$(])|"
    rf"(?<=\d)\s+(?:{languages.AND_OR_LETTERS})(?=\s+(?:-?\d|[a-z]\s*=)))\s*"
)
_REMARK = re.compile(r"(.*[^\s(（])\s*[(（]([^()（）\\\d=+*/^<>_{}$|]{2,60})[)）]")
_REMARKED = re.compile(r"(?:.*\s)?(?:.*[\d})\]%°!]|\(?[A-J]\)?|([^\W\d_]+[.,]?))")
_PRODUCT = re.compile(rf"(.*(?:[\d}})]|\\pi))\s?([A-Za-z]{{1,2}})({_POWER}(?:/[A-Za-z]+{_POWER})*)")
_CALLED = re.compile(r"([^=:<>,;\d+*/^]{2,60}+)[=:]\s*(?=[^\s=])")
_HOUR = re.compile(r"(?<=\d)\s*(?:\\text\{\s*)?([AaPp])\.?\s?[Mm]\b\.?\s*\}?")
_COLONS = re.compile(r"\d+(?:\s*:\s*\d+)+")
_BLOCKED = languages.WORDS["no_unit"] | languages.WORDS["functions"] | languages.SCALES.keys()
_NOTHING = re.compile(
    r"no such [a-z]+(?: exist)?|"
    r"no (?:(?:real|such|possible|valid|finite) )*(?:solution|root|zero|value|answer|number|[a-z])"
    r"(?: (?:of|for) [a-z])?(?: exist| satisf\w+.*)?|(?:[a-z]+ ){0,3}(?:doe not|do not|doesn't|don't) exist"
)
_STOPS = re.compile(
    r"there's|(?<!\d)[,.;!?\"'](?!\d)|[,.;!?\"'](?!\w)|(?<!\w)(?:the|an?|there\s+(?:is|are))(?!\w)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One parsed answer.

    Attributes:
        whole: the normalized text of the answer.
        value: the part without name, unit and other words, as LaTeX or words.
        number: the value, if it is a plain number; for a percentage, the number before the sign.
        percent: whether a percent sign follows.
        words: the value in lower case without punctuation, if it is words rather than a formula.
        name: the name before `=`, such as `x`.
        label: words before `=` or a colon.
        unit: unit of measure or money, such as `cm^2`, or the base of a number, such as `_8`.
        nouns: other words after the value, in the singular.
        choice: the letter of a multiple-choice answer.
        program: whether it is code, which is compared as it is written.
    """

    whole: str
    value: str
    number: Fraction | None = None
    percent: bool = False
    words: str = ""
    name: str = ""
    label: frozenset[str] = frozenset()
    unit: str = ""
    nouns: frozenset[str] = frozenset()
    choice: str = ""
    program: bool = False

    @property
    def key(self) -> str:
        """A normalized text of the value; equal values usually have equal keys."""
        if self.choice:
            return self.choice
        if self.number is not None:
            return numerals.number_text(self.number / 100 if self.percent else self.number)
        return self.words or without_blanks(self.value) + "%" * self.percent

    @property
    def mark(self) -> str:
        """Name, unit or chosen value, which can distinguish answers with the same key; usually empty."""
        chosen = without_blanks(self.value) if self.choice and self.value != self.whole else ""
        return " ".join(filter(None, (self.name and self.name + "=", self.unit, chosen)))


def marks_agree(readings: Iterable[Reading]) -> bool:
    """Return whether no two of `readings` differ in name, unit or chosen value."""
    several = list(readings)
    names = {reading.name for reading in several if reading.name}
    chosen = {reading.value for reading in several if reading.choice and reading.value != reading.whole}
    return len(names) <= 1 and len(chosen) <= 1 and units_agree(*(reading.unit for reading in several))


@lru_cache(_KEPT)
def read(answer: str) -> Reading:
    """Parse an answer; any text can be parsed."""
    if _SIMPLE.fullmatch(answer):
        return Reading(answer, answer, Fraction(answer))
    if is_text_of_lines(answer) or are_calls(answer) or is_program(answer):
        code = as_program(answer)
        return Reading(code, code, words=code, program=True)
    if len(answer) > MAX_PARSED:
        return Reading(answer, answer.strip(), numerals.long_decimal(undressed(answer)))
    whole = without_remark(_unwrapped(answer))
    if " " in whole and (reason := _WITH_REASON.fullmatch(whole)):
        whole = reason[1]
    if choice := _CHOICE_AND_VALUE.fullmatch(whole):
        return Reading(whole, choice[3].strip(), choice=choice[1] or choice[2])
    label, whole = _labelled(whole)
    if choice := letter_of(whole):
        return Reading(whole, whole, label=label, choice=choice)
    return _with_value(whole, label)


def as_measure(reading: Reading) -> Reading | None:
    """The other reading of 5m: five metres, where it was read as a product; None for an answer without it."""
    value = _with_quotient(reading.value, after_blank=False)
    found = _PRODUCT.fullmatch(value) if reading.number is None and not reading.unit else None
    if not found or not product_unit(found[2]):
        return None
    value = found[1].strip()
    return replace(reading, value=value, number=numerals.number_in(value), unit=unit_of(found[2] + found[3]), words="")


def as_foreign_number(reading: Reading) -> Reading | None:
    """The other reading of 3,5 and 10 000: the number of other countries; None for an answer without it."""
    number = numerals.foreign_number(reading.value) if reading.number is None else None
    return None if number is None else replace(reading, number=number, words="")


def as_ratio(reading: Reading, beside: Reading) -> Reading | None:
    """The other reading of 1:10, which was read as a time, if it has the lowest terms or `beside` is a ratio, too."""
    terms = numerals.ratio_in(reading.whole) if reading.words and _COLONS.fullmatch(reading.value) else None
    if not terms or len(terms) != 2:
        return None
    if ":" not in beside.whole and [str(term) for term in terms] != re.split(r"\s*:\s*", reading.value):
        return None
    return replace(reading, number=terms[0] / terms[1], words="")


def without_remark(text: str) -> str:
    """Strip words in brackets after an answer: "73 (seventy-three)"; those of a unit lose their brackets."""
    found = _REMARK.fullmatch(text) if text.endswith((")", "）")) else None
    if not found or not is_words(found[2]) or found[2].split()[0].strip(".,").lower() in _BLOCKED:
        return text
    before, remark = found[1], found[2].strip()
    ends = _REMARKED.fullmatch(before)
    if not ends or (ends[1] and not is_words(ends[1])):
        return text
    if text[len(before)] == "(" and remark.isascii() and not before[-1].isdigit():  # a function's argument
        return text
    measures = unit_of(remark) or remark.lower().startswith(languages.PERCENT)
    return f"{before} {remark}" if measures else before


def bare(answer: str) -> str:
    """Strip markdown, quotes, dollars, punctuation and ornaments from `answer`; a choice becomes its letter."""
    text = undressed(answer)
    return letter_of(text) or text


def letter_of(text: str) -> str:
    """The letter of a multiple-choice answer, if `text` is only that; empty otherwise."""
    choice = _CHOICE.fullmatch(text)
    return (choice[1] or choice[2] or choice[3].upper()) if choice else ""


def without_blanks(text: str) -> str:
    """Remove blanks, except between two digits: 2 1/2 is not 21/2."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def is_words(text: str) -> bool:
    """Return whether `text` contains a word, as opposed to a product of variables."""
    if not text.isascii() and _FOREIGN_LETTER.search(text):
        return True
    bare = _ENVIRONMENT.sub("", _TEXT.sub(" word ", text)) if "\\" in text else text
    return any(_is_word(word[0]) for word in _FREE_WORD.finditer(bare))


def _unwrapped(answer: str) -> str:
    """Normalize `answer`, and unwrap a box or text command around the whole."""
    whole = plain(undressed(answer))
    while inside := _AROUND.fullmatch(whole):
        whole = plain(undressed(inside[1] if inside[1] is not None else inside[2]))
    return in_one_line(undressed(whole))


def _labelled(whole: str) -> tuple[frozenset[str], str]:
    """Split off the words before an equals sign or colon."""
    found = _CALLED.match(whole)
    rest = whole[found.end() :] if found else ""
    if not found or not is_words(upright(found[1])) or (is_words(rest) and re.search("[=:]", rest)):
        return frozenset(), whole
    return frozenset(_as_words(found[1]).split()), rest.rpartition("=")[2].strip()


def _with_value(whole: str, label: frozenset[str]) -> Reading:
    whole = _HOUR.sub(r" \1m", _with_bare_powers(upright(_with_bare_powers(whole))))
    said = " ".join(_TEXT.sub(r" \1 ", whole).split())
    if whole[-1:].isalnum() and (date := numerals.date_in(said.lower())):
        return Reading(whole, whole, words=date, label=label)
    if special := _compound(whole, said) or _ratio(whole, said) or _in_base(whole, said):
        return replace(special, label=label)
    if not is_words(joined := _JOINED.sub(", ", whole)):
        whole = joined
    name, rest = _named(_COLON.sub(r"\1=", whole, count=1) if ": " in whole and _COLON.match(whole) else whole)
    rest, price = _lead(rest)
    value, tail = _tail(rest)
    unit, percent = unit_of(tail), False
    if price:
        paid_for = _PAID_FOR.match(tail)
        per = unit_of(tail[paid_for.end() :]) if paid_for else ""  # $/h of $3 per hour
        unit = f"{price}/{per}" if per else price
    if tail.lower().startswith(languages.PERCENT):
        percent, unit, tail = True, "", tail.partition(" ")[2]
    elif value.endswith("%"):
        percent, value = True, value[:-1].rstrip()
    elif value.endswith("°") and not _FUNCTION.search(value):
        value, unit = value[:-1].rstrip(), "°" + (tail if tail in ("C", "F") else "")
    elif value.endswith("\\Omega") and value != "\\Omega" and not tail:
        value, unit = value.removesuffix("\\Omega").rstrip(), "Ω"
    if unit and re.search(r",\s|[;&]", value):  # of the last member of a list, or of each
        return Reading(whole, rest, name=name, label=label)
    if "." in value and _ABBREVIATION.fullmatch(value):
        value = value.replace(".", "")
    number = numerals.number_in(value)
    if number is not None or not _is_text(value):
        words = "no solution" if value == "\\emptyset" else ""
        return Reading(whole, value, number, percent, words, name, label, unit, _nouns(tail, unit))
    words = _as_words(value)
    if counted := _counted(words):
        number, unit = counted[0], counted[1] or unit
        value, words = numerals.number_text(number), ""
    else:
        words = _phrases().get(words.removeprefix("set of ")) or ("no solution" if _NOTHING.fullmatch(words) else words)
        value, words = (words, "") if words.startswith("\\") else (value, words)
    return Reading(whole, value, number, percent, words, name, label, unit, _nouns(tail, unit))


def _is_text(value: str) -> bool:
    """Return whether a value is words, or numbers with colons, and not a list of quantities."""
    if not (is_words(value) or _COLONS.fullmatch(value) or value.lower() in languages.WORDS["whole"]):
        return False
    parts = [read(part) for part in value.split(", ")] if ", " in value else []
    return not parts or not all(part.unit and part.number is not None for part in parts)


def _counted(words: str) -> tuple[Fraction, str] | None:
    """The number that words denote, and the unit of measure behind it: half an hour; None for other words."""
    if (number := numerals.number_in_words(words)) is not None:
        return number, ""
    counting, _, last = words.rpartition(" ")
    number = numerals.number_in_words(counting) if counting and symbol(last) else None
    return None if number is None else (number, unit_of(last))


def _with_bare_powers(text: str) -> str:
    r"""Drop braces within `\text`: m s^{-2} becomes m s^-2."""
    return until_same(partial(_POWER_IN_TEXT.sub, r"\1\2"), text)


def _compound(whole: str, said: str) -> Reading | None:
    """A quantity in several units, in the first of them: 2 hours and 30 minutes; None for another answer."""
    parts = list(_COMPOUND.finditer(said)) if said[:1].isdigit() and not said[-1:].isdigit() else []
    if len(parts) < 2 or "".join(part[0] for part in parts) != said:
        return None
    units = [unit_of(part[2]) for part in parts]
    sizes = [(ratio(unit, units[0]) if unit else None) or Fraction() for unit in units]
    if not all(sizes) or sorted({*sizes}, reverse=True) != sizes:
        return None
    number = sum((Fraction(part[1]) * size for part, size in zip(parts, sizes, strict=True)), Fraction())
    return Reading(whole, numerals.number_text(number), number, unit=units[0])


def _ratio(whole: str, said: str) -> Reading | None:
    """A ratio such as 3:2, by its value; None for another answer, and for what may be a time."""
    terms = numerals.ratio_in(said) if ":" in said or " to " in said else None
    if not terms or numerals.time_of(said):
        return None
    if len(terms) == 2:
        return Reading(whole, numerals.number_text(terms[0] / terms[1]), terms[0] / terms[1])
    return Reading(whole, whole, words=":".join(map(str, terms)))


def _in_base(whole: str, said: str) -> Reading | None:
    """A number whose base is given: 52_8, 52 base eight; None for another answer."""
    found = _BASE.fullmatch(said) if "_" in said or "base" in said else None
    if not found:
        return None
    base = int(found[2]) if found[2].isdigit() else numerals.number_in_words(found[2].lower())
    value = found[1].replace(",", "")
    if base is None or not 2 <= base <= 36 or any(int(digit, 16) >= base for digit in re.sub("[-.]", "", value)):
        return None
    number = numerals.number_in(value)
    return Reading(whole, value, number, words="" if number is not None else value.lower(), unit=f"_{base}")


@cache
def _phrases() -> dict[str, str]:
    """Phrases with the one that means the same, or with a formula; all as `_as_words` gives them."""
    return {
        _as_words(phrase): meaning if meaning.startswith("\\") else _as_words(meaning)
        for meaning, phrases in languages.PHRASES.items()
        for phrase in (meaning, *languages.listed(phrases))
    }


def _named(whole: str) -> tuple[str, str]:
    """Split off the name before an equals sign; returns the name and what follows the last one. Sums are not names."""
    if whole.startswith("(") and (tuple_ := _TUPLE.match(whole)):
        return without_blanks(tuple_[1]), whole[tuple_.end() :]
    if (found := _NAMED.match(whole)) and not _UNEQUAL.search(whole):
        rest = whole[found.end() :]
        if "," in rest and "=" in rest:
            return "", whole
        return without_blanks(found[1]), rest.rpartition("=")[2].strip() or rest
    if _SUM.match(whole) and not re.search(r"[,<>]", whole):
        return "", whole.rpartition("=")[2].strip()
    return "", whole


def _lead(text: str) -> tuple[str, str]:
    """Strip "about" and a currency sign before a number; returns the text and the currency."""
    while (found := _LEAD.match(text)) and found.end() < len(text):
        text = text[found.end() :]
    if found := _PRICE.match(text):
        return found[1] + found[3] + _PER.sub(" /", text[found.end() :], count=1), unit_of(found[2])
    return text, ""


def _tail(text: str) -> tuple[str, str]:
    """Split `text` into a number or formula and the words after it; no split if these cannot be units."""
    unfolded = _TEXT.sub(r" \1 ", _with_quotient(text))
    unfolded = _TIMES.sub(
        lambda found: f"{found[1]}*" if symbol(re.split(r"\^", found[1])[0]) and symbol(found[2]) else found[0],
        unfolded,
    )
    unfolded = _BELOW.sub(lambda below: "/" + re.sub(r"[\s*]+|\\\\cdot", "*", below[1].strip()), unfolded)
    unfolded = re.sub(r"\s*\^", "^", re.sub(r"(?<=[A-Za-z.])\s*/\s*(?=[A-Za-z])", "/", unfolded))
    if not unfolded.isascii():
        unfolded = _FOREIGN_WORD.sub(r" \1 ", unfolded)
    words = unfolded.replace("°", "° ").split()
    first = _start_of_tail(words)
    value, tail = " ".join(words[:first]).replace("° ", "°"), words[first:]
    scale = tail[0].lower() if tail and tail[0].lower() in languages.SCALES else ""
    tail = tail[1:] if scale else tail
    if not tail and not scale and (glued := _GLUED.fullmatch(value)) and _is_unit(glued[2]):
        value, tail = glued[1], [glued[2]]
    said = [word.strip(".,;").lower() for word in tail]
    blocked = _BLOCKED.intersection(said[:1]) or _BLOCKED.difference(("squared", "cubed")).intersection(said[1:])
    if blocked or not (tail or scale) or not _VALUE.search(value) or is_words(value):
        return text, ""
    return f"{value} {scale}".rstrip(), " ".join(tail)


def _with_quotient(text: str, after_blank: bool = True) -> str:
    r"""Write units of a fraction behind a number in one line: `5 \frac{m}{s}` as 5 m/s."""
    found = _BESIDE_QUOTIENT.fullmatch(text)
    if not found or not (found[2] or "\\text" in found[0] or not after_blank):
        return text
    above, below = (
        re.sub(r"\s*\\cdot\s*", " ", re.sub(r"\^\{(-?\d)\}", r"^\1", _TEXT.sub(r"\1", part)))
        for part in (found[3], found[4])
    )
    return f"{found[1]} {above.strip()}/{below.strip()}" if upright_unit(above) and upright_unit(below) else text


def _start_of_tail(words: list[str]) -> int:
    """Index of the first of the trailing words that may name a unit."""
    first = len(words)
    while first and _TAIL_WORD.fullmatch(words[first - 1]):
        first -= 1
    while first < len(words) and not _starts_a_tail(words[first]):
        first += 1
    return first


def _is_unit(glued: str) -> bool:
    """Return whether letters right behind a number are a unit, and no product of variables."""
    return bool(unit_of(glued)) and not product_unit(re.split(r"[\^{/\d]", glued, maxsplit=1)[0])


def _starts_a_tail(word: str) -> bool:
    bare = re.split(r"[\^{/*\d-]", word.strip(".,;/"), maxsplit=1)[0]
    return bool(symbol(bare)) or _is_word(bare) or bare in languages.WORDS["before_a_unit"]


def _is_word(word: str) -> bool:
    """Return whether letters form a word: at least three (four if all are capitals), with a vowel."""
    if word.lower() in languages.WORDS["short"] or (not word.isascii() and _FOREIGN_LETTER.search(word)):
        return True
    may_be = len(word) >= (4 if word.isupper() else 3) and word.lower() not in languages.WORDS["functions"]
    return may_be and bool(re.search("[aeiouy]", word, re.IGNORECASE))


def _as_words(text: str) -> str:
    bare = _TEXT.sub(r" \1 ", text)
    bare = re.sub(r"(?<![\d.:])0(?=\d:)", "", bare)
    return " ".join(_singular(word) for word in _STOPS.sub(" ", bare.lower()).split())


def _nouns(tail: str, unit: str) -> frozenset[str]:
    if unit:
        return frozenset()
    words = (_singular(word.strip(".,;'").lower()) for word in tail.split())
    return frozenset(word for word in words if word and word not in languages.WORDS["fillers"])


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
