"""Grammars that callers write: regular expressions, JSON schemas, and grammars in llguidance's dialect of Lark."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from espalier.engine.errors import EspalierError, first_line

OPTIONS = "x-guidance"
"""Key of a schema for what is no part of it: how its texts are written."""
_FEW_BLANKS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Blanks where `json.dumps` writes them, or none: a small model in doubt writes as many as there may be."""
_SOME_BLANKS = r"([ \t]{1,24}|\r?\n[ \t]{0,24})"
"""Blanks anywhere between the tokens of JSON, no blank line: a model that writes nothing else would never end."""
_ANSWER = "answer"


class GrammarError(EspalierError):
    """A grammar cannot be used; the text says why, without what it was asked for."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as the library reads it, not compiled yet; hashable and picklable.

    Attributes:
        source: JSON with a list of `grammars`, the first of which is where a text starts.
    """

    source: str

    def within(self, lark: str) -> "Grammar":
        """A grammar in Lark that refers to this one as `@answer`."""
        return lark_with(lark, {_ANSWER: self})


def lark_with(lark: str, parts: Mapping[str, Grammar]) -> Grammar:
    """A grammar in Lark that refers to others, each of one grammar, by their names: `@name`."""
    own = [{**json.loads(part.source)["grammars"][0], "name": name} for name, part in parts.items()]
    return _of({"name": "text", "lark_grammar": lark}, *own)


def regex_grammar(*patterns: str) -> Grammar:
    r"""Texts that regular expressions match, each of them as a whole; `\d` is an ASCII digit, as in JSON schemas."""
    from llguidance import regex_to_lark  # only those who guide need the library

    each = " & ".join(f"/{regex_to_lark(pattern, 'd')}/" for pattern in patterns)
    return _of({"lark_grammar": f"start: TEXT\nTEXT: {each}"})


def json_grammar(schema: dict[str, Any] | bool) -> Grammar:
    """JSON values that a schema allows, on one line with at most one blank behind each comma and colon.

    A caller's `x-guidance` may say otherwise: no blanks (`whitespace_flexible` false), up to a line's (true), or those
    of a regular expression (`whitespace_pattern`). Nothing else in it has an effect: it could switch off that unknown
    keywords are refused.

    Raises:
        GrammarError: one of the two is of the wrong type.
    """
    given = {**schema} if isinstance(schema, dict) else {} if schema else {"not": {}}
    return _of({"json_schema": {**given, OPTIONS: _blanks(given.get(OPTIONS))}})


def _blanks(own: Any) -> dict[str, Any]:
    own = own if isinstance(own, dict) else {}
    flexible, pattern = own.get("whitespace_flexible"), own.get("whitespace_pattern")
    if not isinstance(flexible, bool | None) or not isinstance(pattern, str | None):
        raise GrammarError(f"{OPTIONS} takes true or false for whitespace_flexible, a text for whitespace_pattern")
    if flexible is False:
        return {"whitespace_flexible": False}
    if pattern is None:
        return {"whitespace_pattern": _SOME_BLANKS} if flexible else _FEW_BLANKS
    return {"whitespace_pattern": pattern}


def lark_grammar(text: str) -> Grammar:
    """Texts of a grammar in Lark, from the rule `start`, or in llama.cpp's notation, from `root ::= `.

    Raises:
        GrammarError: it is in neither.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return _of({"lark_grammar": any_to_lark(text)})
    except Exception as error:  # of whatever kind the library's converter has
        raise GrammarError(f"is not read: {first_line(error)}") from None


def _of(*grammars: dict[str, Any]) -> Grammar:
    return Grammar(json.dumps({"grammars": grammars}))
