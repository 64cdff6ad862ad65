"""The problems that the bundled generator was taught to read, and what of another problem is not of them."""

import re
from textwrap import shorten

from espalier.experiments.demo.problems import MAX_OPERATIONS, MIN_OPERATIONS, TRAINING_OPERANDS
from espalier.experiments.demo.templates import HE, ITEMS, SHE, THEMES

DOMAIN = (
    f"a quantity that changes, one sentence for each of {MIN_OPERATIONS} to {MAX_OPERATIONS} operations, lettered (a), "
    "(b), (c), as in the demo benchmark"
)
"""In a few words."""
_SMALLEST, _LARGEST = 10, max(TRAINING_OPERANDS)
"""Of the numbers: the recipe draws few with one digit, and the pair is weak at them."""
_SHOWN = 5
"""Words that are named at most."""
_LONGEST = 2000
"""Characters of a problem that is looked at, several times those of the recipe's longest."""
_LONGEST_WORD, _LONGEST_SENTENCE = 40, 100
"""Characters of a word and of a sentence that are shown."""


_FIELDS = {"n": r"\d+", "name": r"(?:an? )?\w+", "who": r"\w+", "items": r"[\w ]+"}


def _pattern(template: str) -> str:
    return re.sub(r"\\{(\w+)\\}", lambda field: _FIELDS[field[1]], re.escape(template))


_OPENINGS, _CHANGES, _QUESTIONS = (
    re.compile("|".join(_pattern(template) for theme in THEMES for template in templates(theme)), re.IGNORECASE)
    for templates in (
        lambda theme: theme.openings,
        lambda theme: (*theme.gains, *theme.losses),
        lambda theme: theme.questions,
    )
)
_LETTER = re.compile(r"\(([a-z])\) ")
_WORDS = {
    word.lower()
    for theme in THEMES
    for texts in (theme.openings, theme.gains, theme.losses, theme.questions, theme.holders, theme.items)
    for text in texts
    for word in re.findall(r"[^\W\d_]+", re.sub(r"\{\w+\}", "", text))
} | {word.lower() for word in (*HE, *SHE, *ITEMS, "he", "she", "it")}


def warnings(problem: str) -> tuple[str, ...]:
    """Warnings about a problem that the bundled generator was not taught to read, as it answers anyway."""
    if not (unknown := not_taught(problem)):
        return ()
    return (
        f"the bundled generator reads {DOMAIN}; it was hardly or never taught {' or '.join(unknown)}. "
        "Its answer is likely to be wrong; --generator names another model",
    )


def not_taught(problem: str) -> list[str]:
    """Parts of a problem that the generator was hardly or never taught, in words; empty where it can read all of it."""
    if len(problem) > _LONGEST:  # nor are long texts worth the time
        return [f"problems of {len(problem)} characters"]
    words = dict.fromkeys(re.findall(r"[^\W\d_]+", _LETTER.sub("", problem)))
    if unknown := [word for word in words if word.lower() not in _WORDS]:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        return [f"the words {', '.join(word[:_LONGEST_WORD] for word in unknown[:_SHOWN])}{more}"]
    sentences = [sentence.strip() for sentence in re.findall(r"[^.?!]+[.?!]*", problem) if sentence.strip()]
    letters = [match[1] if (match := _LETTER.match(sentence)) else "" for sentence in sentences[1:-1]]
    if letters != [chr(ord("a") + index) for index in range(len(letters))]:
        return ["changes that are not lettered (a), (b), (c)"]
    sentences = [_LETTER.sub("", sentence) for sentence in sentences]
    kinds = [_OPENINGS, *[_CHANGES] * (len(sentences) - 2), _QUESTIONS]
    found = [
        f'the sentence "{shorten(sentence, _LONGEST_SENTENCE, placeholder=" …")}" in this place'
        for sentence, kind in zip(sentences, kinds, strict=False)
        if not kind.fullmatch(sentence)
    ][:1]
    operations = len(sentences) - 2
    if not found and not MIN_OPERATIONS <= operations <= MAX_OPERATIONS:
        found.append(f"problems of {operations} operation{'s' if operations != 1 else ''}")
    if small := [number for number in re.findall(r"\d+", problem) if int(number) < _SMALLEST]:
        found.append(f"numbers such as {small[0]}, for few are below {_SMALLEST}")
    if large := [number for number in re.findall(r"\d+", problem) if int(number) > _LARGEST]:
        found.append(f"numbers such as {large[0]}, for the largest is {_LARGEST}")
    return found
