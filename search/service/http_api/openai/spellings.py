"""Spellings that other servers' clients have for one thing: a switch for thinking, and the form of a text.

Of thinking: whether to think, for how many tokens, and whether thoughts are shown. OpenAI's, OpenRouter's, Anthropic's,
DeepSeek's and GLM's, Qwen's, Ollama's, Groq's, vLLM's and llama.cpp's clients each have their own, and proxies add them
by the provider's name. Of guided decoding: parameters of OpenAI's, vLLM's and SGLang's bodies, as the `text_form` of a
request.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from espalier.engine.errors import Violation
from espalier.engine.guidance.grammar import OPTIONS
from espalier.search.rules import MAX_THINKING, SWITCHES, ThinkingMode

_OBJECTS = ("thinking", "reasoning", "chat_template_kwargs")
"""Parameters whose fields are spellings; `chat_template_kwargs` holds other variables of the template, too."""


@dataclass(frozen=True, slots=True)
class _Said:
    """The meaning of one spelling; None for what it leaves open."""

    on: bool | None = None
    budget: int | None = None
    shown: bool | None = None


_ON, _OFF, _OPEN = _Said(on=True), _Said(on=False), _Said()


def _words(*words: Mapping[Any, _Said]) -> Callable[[Any], _Said]:
    """A reader of texts, of true and of false."""
    known = {each: said for some in words for each, said in some.items()}

    def read(value: Any) -> _Said:
        found = known.get(value) if isinstance(value, str | bool) else None
        if found is None:
            raise ValueError(f"must be one of {', '.join(str(each).lower() for each in known)}")
        return found

    return read


def _budget(value: Any) -> _Said:
    """Tokens of a thought; 0 is none, -1 as many as there is room for."""
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise ValueError("must be a number of tokens, 0 for no thought or -1 for no limit")
    return _OFF if value == 0 else _Said(budget=value) if 0 < value <= MAX_THINKING else _OPEN


def _effort(value: Any) -> _Said:
    """An effort; other words than `none` are for the template, and leave the switch open."""
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return _OFF if value == "none" else _OPEN


_SWITCH = {True: _ON, False: _OFF}
_EFFORTS = dict.fromkeys(("minimal", "low", "medium", "high", "xhigh", "max"), _ON) | {"none": _OFF}
_TOLD, _HIDDEN = _Said(shown=True), _Said(shown=False)
_OF_TEMPLATE = "chat_template_kwargs."
_SWITCHES = ("enable_thinking", "thinking", "reasoning", "reasoning.enabled")
_BUDGETS = ("thinking_budget_tokens", "thinking_token_budget", "reasoning_budget", "thinking.budget_tokens")
_SPELLINGS: Mapping[str, Callable[[Any], _Said]] = {
    **dict.fromkeys((*_SWITCHES, *(f"{_OF_TEMPLATE}{name}" for name in _SWITCHES[:2])), _words(_SWITCH)),
    **dict.fromkeys((*_BUDGETS, "reasoning.max_tokens"), _budget),
    **dict.fromkeys(("thinking_budget", f"{_OF_TEMPLATE}thinking_budget"), _budget),
    **dict.fromkeys(("reasoning_effort", "reasoning.effort", f"{_OF_TEMPLATE}reasoning_effort"), _effort),
    **dict.fromkeys(("reasoning.summary", "reasoning.generate_summary"), lambda _: _OPEN),
    "think": _words(_SWITCH, _EFFORTS),
    "thinking.type": _words({"enabled": _ON, "disabled": _OFF, "adaptive": _OPEN, "auto": _OPEN}),
    "thinking.display": _words({"summarized": _OPEN, "omitted": _HIDDEN}),
    "reasoning.exclude": _words({False: _TOLD, True: _HIDDEN}),
    "include_reasoning": _words({True: _TOLD, False: _HIDDEN}),
    "reasoning_format": _words({"hidden": _HIDDEN, "parsed": _OPEN, "deepseek": _OPEN, "auto": _OPEN}),
}
"""Readers of the spellings, by the place in the body; each says in a ValueError what its value must be."""
THINKING_PARAMETERS = frozenset(name.partition(".")[0] for name in _SPELLINGS)


@dataclass(frozen=True, slots=True)
class AskedThinking:
    """The thinking that a body asks for in all its spellings together.

    Attributes:
        on: whether to think; None if that is left open.
        budget: most tokens of a thought, the lowest of all that are given; None for no limit.
        shown: whether thoughts are told.
        effort: for the template; None without.
        place: of the body, that says `field`.
    """

    on: bool | None = None
    budget: int | None = None
    shown: bool = True
    effort: str | None = None
    place: str = ""

    @property
    def field(self) -> str | None:
        """The `thinking` of a search; None if it is left open."""
        if self.on is False:
            return "off"
        return str(self.budget) if self.budget else "on" if self.on else None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of a chat template; templates do not look at what they do not know."""
        effort = {} if self.effort is None else {"reasoning_effort": self.effort}
        mode = ThinkingMode.AUTO if self.on is None else ThinkingMode.ON if self.on else ThinkingMode.OFF
        return {**effort, **SWITCHES[mode]}


def read_thinking_parameters(body: Mapping[str, Any], found: list[Violation]) -> AskedThinking:
    """Read all spellings of a body; what is wrong, or contradicts another one, goes to `found`.

    A budget is a limit, so it does not contradict that there be no thought.
    """
    said: dict[str, _Said] = {}
    for place, value in _places(body):
        try:
            said[place] = _SPELLINGS[place](value)
        except (KeyError, ValueError) as error:
            if not place.startswith(_OF_TEMPLATE):  # whose variables may be anything, and null a value
                rule = "is unknown" if isinstance(error, KeyError) else str(error)
                found.append(Violation(place[:80], rule))
    switches = {place: its.on for place, its in said.items() if its.on is not None}
    shown = {place: its.shown for place, its in said.items() if its.shown is not None}
    for given in (switches, shown):
        for place in given:
            if given[place] != given[first := next(iter(given))]:
                found.append(Violation(place, f"contradicts `{first}`; give one of them"))
    budgets = {place: its.budget for place, its in said.items() if its.budget is not None}
    reasoning = body.get("reasoning")
    efforts = (
        body.get("reasoning_effort"),
        body.get("think"),
        reasoning.get("effort") if isinstance(reasoning, dict) else None,
    )
    on, switch = next(iter(switches.values()), None), next(iter(switches), "")
    lowest = min(budgets, key=budgets.__getitem__, default="")
    effort = next((each for each in efforts if isinstance(each, str)), None)
    place = switch if on is False else lowest or switch
    return AskedThinking(on, budgets.get(lowest), all(shown.values()), effort, place)


def is_spelling(place: str, value: Any) -> bool:
    """Return whether a value at this place of a body is a spelling of thinking."""
    try:
        return bool(_SPELLINGS[place](value))
    except (KeyError, ValueError):
        return False


def _places(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a body that are spellings, fields of objects by both names; null says nothing."""
    for name in sorted(THINKING_PARAMETERS & body.keys()):
        value = body[name]
        if name in _OBJECTS and isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items() if each is not None)
        elif value is not None:
            yield name, value


# ---- the form of a text

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


def asked_form(body: Mapping[str, Any], found: list[Violation]) -> tuple[str, str] | None:
    """The form of the text that a body asks for, and the parameter that does; what is wrong goes to `found`."""
    forms = list(_forms(body, found))
    for name, _ in forms[1:]:
        found.append(Violation(name, f"binds what {forms[0][0]} binds; give one of them"))
    options = _options(body, found)
    for name, form in forms[:1]:
        try:
            return _written(form, **options), name
        except ValueError as error:
            found.append(Violation(name, str(error)))
    return None


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
