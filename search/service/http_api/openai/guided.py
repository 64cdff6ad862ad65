"""Parameters of guided decoding, of OpenAI's, vLLM's and SGLang's bodies, as the `text_form` of a request."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from espalier.engine.errors import Violation
from espalier.engine.guidance.grammar import OPTIONS

_ANY_OBJECT = "json:" + json.dumps({"type": "object"})
_FORMATS = "must have the type text, json_object or json_schema"
_KNOWN = ("json", "regex", "choice", "grammar", "json_object")
_COMPACT, _CLOSED = "disable_any_whitespace", "disable_additional_properties"
_FLAGS = (_COMPACT, _CLOSED, "disable_fallback")
"""Options of `structured_outputs`; the last one chooses between ways to the same texts."""
_OF_BACKEND = {"disable-any-whitespace": _COMPACT, "no-additional-properties": _CLOSED}
"""The same as older clients write them, behind the name of a backend: `guidance:disable-any-whitespace`."""
_PATTERN = "whitespace_pattern"


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
        case "json_object":  # with a schema from clients of llama.cpp
            return _ANY_OBJECT if value.get("schema") is None else _json(value["schema"])
        case "json_schema":
            inner = value.get("json_schema")
            return _json(inner.get("schema") if isinstance(inner, dict) else None)
        case _:
            raise ValueError(_FORMATS)


def _structured(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    options = (*_FLAGS, _PATTERN)
    given = {name: each for name, each in value.items() if each not in (None, False) and name not in options}
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
FORM_PARAMETERS = frozenset({*_READERS, f"guided_{_PATTERN}", "guided_decoding_backend"})


def set_form(body: Mapping[str, Any], values: dict[str, Any], places: dict[str, str], found: list[Violation]) -> None:
    """Set `text_form` of a request to the form that a body asks for."""
    forms = list(_forms(body, found))
    for name, _ in forms[1:]:
        found.append(Violation(name, f"binds what {forms[0][0]} binds; give one of them"))
    options = _options(body, found)
    for name, form in forms[:1]:
        try:
            values["text_form"], places["text_form"] = _written(form, **options), name
        except ValueError as error:
            found.append(Violation(name, str(error)))


def _options(body: Mapping[str, Any], found: list[Violation]) -> dict[str, Any]:
    """Options of how JSON is written: without blanks or with those of a pattern, and closed."""
    structured = body.get("structured_outputs")
    structured = structured if isinstance(structured, dict) else {}
    for name in _FLAGS:
        if not isinstance(structured.get(name), bool | None):
            found.append(Violation(f"structured_outputs.{name}", "must be true or false"))
    patterns = {"structured_outputs.whitespace_pattern": structured.get(_PATTERN)}
    patterns = {**patterns, "guided_whitespace_pattern": body.get(f"guided_{_PATTERN}")}
    patterns = {place: each for place, each in patterns.items() if each is not None}
    found += (Violation(place, "must be a text") for place, each in patterns.items() if not isinstance(each, str))
    asked = {name for name in (_COMPACT, _CLOSED) if structured.get(name)}
    if isinstance(backend := body.get("guided_decoding_backend"), str):
        asked |= {_OF_BACKEND[each] for each in backend.partition(":")[2].split(",") if each in _OF_BACKEND}
    place, pattern = next(iter(patterns.items()), ("", None))
    if len({*patterns.values(), *([""] if _COMPACT in asked else [])}) > 1:
        found.append(Violation(place, "contradicts another pattern, or that there be no blanks"))
    return {"compact": _COMPACT in asked, "closed": _CLOSED in asked, "pattern": pattern}


def _written(form: str, compact: bool, closed: bool, pattern: str | None) -> str:
    """A form with options, which are those of JSON alone."""
    kind, _, text = form.partition(":")
    if kind != "json" or not (compact or closed or pattern is not None):
        if pattern is not None:
            raise ValueError("has no blanks to choose: whitespace_pattern is of JSON")
        return form
    try:
        schema = json.loads(text)
        if closed:
            _close(schema)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if isinstance(schema, dict) and (compact or pattern is not None):
            schema = {**schema, OPTIONS: {"whitespace_flexible": False} if compact else {_PATTERN: pattern}}
        return f"json:{json.dumps(schema)}"
    except (ValueError, RecursionError):
        return form  # which is refused as what it is


def _close(schema: Any) -> None:
    """Let objects have no other properties than those that they list, where a schema does not say so itself."""
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _close(each)
    if isinstance(schema, dict) and ("properties" in schema or "patternProperties" in schema):
        schema.setdefault("additionalProperties", False)


def _forms(body: Mapping[str, Any], found: list[Violation]) -> Iterator[tuple[str, str]]:
    for name, read in _READERS.items():
        if (value := body.get(name)) is not None:
            try:
                if form := read(value):
                    yield name, form
            except ValueError as error:
                found.append(Violation(name, str(error)))
