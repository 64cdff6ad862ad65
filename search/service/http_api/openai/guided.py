"""Parameters of guided decoding, of OpenAI's, vLLM's and SGLang's bodies, as the `text_form` of a request."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from espalier.engine.errors import Violation

_ANY_OBJECT = "json:" + json.dumps({"type": "object"})
_FORMATS = "must have the type text, json_object or json_schema"
_KNOWN = ("json", "regex", "choice", "grammar", "json_object")
_DROPPED = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
"""Options of `structured_outputs` that choose between ways to the same texts."""


def _json(value: Any) -> str:
    """A schema, which clients also send as text."""
    if isinstance(value, dict):
        return f"json:{json.dumps(value)}"
    if isinstance(value, str):
        return f"json:{value}"
    raise ValueError("must be a JSON schema")


def _text_of(kind: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError("must be a text that is not empty")
        return f"{kind}:{value}"

    return read


def _choice(value: Any) -> str:
    if not (isinstance(value, list) and value and all(isinstance(each, str) for each in value)):
        raise ValueError("must be a list of texts")
    return "grammar:start: " + " | ".join(map(json.dumps, value))


def _format(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError(_FORMATS)
    match value.get("type"):
        case "text":
            return ""
        case "json_object":
            return _ANY_OBJECT
        case "json_schema":
            inner = value.get("json_schema")
            return _json(inner.get("schema") if isinstance(inner, dict) else None)
        case _:
            raise ValueError(_FORMATS)


def _structured(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    given = {name: each for name, each in value.items() if each not in (None, False) and name not in _DROPPED}
    if not given:
        return ""
    if len(given) > 1 or not given.keys() <= set(_KNOWN):
        raise ValueError(f"must have one of {', '.join(_KNOWN)}, has {', '.join(given)[:200]}")
    ((name, each),) = given.items()
    return _ANY_OBJECT if name == "json_object" else _READERS[f"guided_{name}"](each)


_READERS: Mapping[str, Callable[[Any], str]] = {
    "guided_json": _json,
    "guided_regex": _text_of("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text_of("grammar"),
    "response_format": _format,
    "structured_outputs": _structured,
    "regex": _text_of("regex"),
    "json_schema": _json,
    "ebnf": _text_of("grammar"),
}
"""Readers of each parameter; an empty text asks for nothing. The last three are SGLang's."""
FORM_PARAMETERS = frozenset(_READERS)


def set_form(body: Mapping[str, Any], values: dict[str, Any], places: dict[str, str], found: list[Violation]) -> None:
    """Set `text_form` of a request to the form that a body asks for."""
    forms = list(_forms(body, found))
    for name, _ in forms[1:]:
        found.append(Violation(name, f"binds what {forms[0][0]} binds; give one of them"))
    for name, form in forms[:1]:
        values["text_form"], places["text_form"] = form, name


def _forms(body: Mapping[str, Any], found: list[Violation]) -> Iterator[tuple[str, str]]:
    for name, read in _READERS.items():
        if (value := body.get(name)) is not None:
            try:
                if form := read(value):
                    yield name, form
            except ValueError as error:
                found.append(Violation(name, str(error)))
