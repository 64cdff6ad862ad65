"""Strips what stands around an answer and is no part of it: markdown, HTML, quotes, punctuation, emoji."""

import re
import unicodedata

_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u20e3\ufe00-\ufe0f\ufeff"
    "\U0001f3fb-\U0001f3ff\U000e0000-\U000e0fff]"
)
"""Marks of direction and joining, variation selectors, skin tones, and the frame of a keycap digit."""
_MEANINGFUL = re.compile(
    "[°△\u2654-\u266f\u2680-\u2685"  # degrees, triangles, chessmen, suits, notes, dice
    "✗✘✕✖❌❎➕➖➗\U0001f51f]"  # crosses deny an answer; signs and the keycap of ten
)
_ORNAMENTS = ("So", "Sk", "Cn", "Co")
"""Categories of Unicode: symbols, modifiers, and what is newer than Python's tables, as the latest emoji are."""
_BEFORE = "∴⇒→⟹➔∎"
_AFTER = "∎√→"
_STOPS = ".,;:"
_FOREIGN_STOPS = _STOPS + "。．｡，､、；：！？।॥۔؟،؛・"
_DRESS = (
    *(("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("`", "`"), ('"', '"'), ("==", "==")),
    *(("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")),
)
_FOREIGN_DRESS = (
    *(("“", "”"), ("‘", "’"), ("„", "“"), ("«", "»"), ("‹", "›"), ("「", "」"), ("『", "』")),
    *(("【", "】"), ("〖", "〗"), ("《", "》"), ("〈", "〉")),
)
_HTML = r"</?(?:b|i|u|p|em|strong|mark|big|small|code|span|div|font|center|h[1-6]|br|hr)(?:\s[^<>]*)?/?>"
_HTML_TAG = re.compile(_HTML, re.IGNORECASE)


def undressed(answer: str) -> str:
    """Strip markdown, HTML tags, quotes, dollars, punctuation and ornaments from both ends of `answer`."""
    foreign = not answer.isascii()
    if foreign:
        answer = visible(answer)
    before, text = None, answer
    while text != before:
        before = text
        text = _without_stops(text.strip(), _FOREIGN_STOPS if foreign else _STOPS)
        text = _without_marks(_without_tags(text), _DRESS)
        if foreign:
            text = _without_marks(_without_ornaments(text), _FOREIGN_DRESS)
    return text


def visible(text: str) -> str:
    """Remove characters that show nothing by themselves: 5️⃣ becomes 5."""
    return _INVISIBLE.sub("", text)


def _without_marks(text: str, marks: tuple[tuple[str, str], ...]) -> str:
    """Strip pairs of marks around the whole."""
    for opening, closing in marks:
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            inside = text[len(opening) : len(text) - len(closing)]
            if closing not in (inside.replace("\\$", "") if closing == "$" else inside) and not inside.endswith("\\"):
                text = inside
    return text


def _without_tags(text: str) -> str:
    while text.endswith(">") and (tag := _HTML_TAG.fullmatch(text, text.rfind("<"))):
        text = text[: tag.start()].rstrip()
    while text.startswith("<") and (tag := _HTML_TAG.match(text)):
        text = text[tag.end() :].lstrip()
    return text


def _without_ornaments(text: str) -> str:
    """Strip check marks, emoji and the like, unless nothing else is left."""
    start, end = 0, len(text)
    while end and (text[end - 1].isspace() or text[end - 1] in _AFTER or _is_ornament(text[end - 1])):
        end -= 1
    while start < end and (text[start].isspace() or text[start] in _BEFORE or _is_ornament(text[start])):
        start += 1
    return text[start:end] or text


def _is_ornament(sign: str) -> bool:
    """Return whether a character only decorates: a symbol without meaning that stands for no text, as ℃ does."""
    if sign.isascii() or unicodedata.category(sign) not in _ORNAMENTS:
        return False
    return not unicodedata.decomposition(sign) and not _MEANINGFUL.match(sign)


def _without_stops(text: str, stops: str) -> str:
    r"""Strip punctuation from the end of `text`, except after a backslash, as in `\;`."""
    end = len(text)
    while end and (text[end - 1] in stops or text[end - 1].isspace()):
        end -= 1
    return text[: end + 1] if text[:end].endswith("\\") else text[:end]
