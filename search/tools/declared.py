"""Tools as a request declares them, and calls of them."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.search.conversation import ToolCall

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ANY_ARGUMENTS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the generator may call.

    Attributes:
        name: its name, of letters, digits, `_`, `-` and `.`.
        description: what it does, for the generator.
        parameters: JSON schema of its arguments, an object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: _ANY_ARGUMENTS)

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates list it."""
        described = {"description": self.description} if self.description else {}
        its = {"name": self.name, **described, "parameters": dict(self.parameters)}
        return {"type": "function", "function": its}


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools of a request; once it is resolved, a `CallPlan`."""

    tools: tuple[Tool, ...]


def answer_of_calls(calls: Sequence[ToolCall]) -> str:
    """The answer of a path that ends in calls: canonical JSON, equal for calls that are equal as values.

    The order of keys and the spelling of numbers and strings do not count. The order of calls and of a list's items
    does, `true` is not 1, and an argument that is left out is not one with the default's value.
    """
    listed = [{"name": call.name, "arguments": _canonical(call.values)} for call in calls]
    return json.dumps({"tool_calls": listed}, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _canonical(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_canonical, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_tools(text: str) -> Offered:
    """Read a JSON list of tools, as OpenAI's or Anthropic's clients send them.

    Raises:
        ValueError: it is none; says which tool is wrong.
    """
    if len(text.encode(errors="replace")) > MAX_TOOLS_BYTES:
        raise ValueError(f"must be at most {MAX_TOOLS_BYTES} bytes of JSON")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be a JSON list of tools: {error or 'it is nested too deep'}") from None
    if not isinstance(given, list):
        raise ValueError("must be a list of tools")
    if len(given) > MAX_TOOLS:
        raise ValueError(f"must be at most {MAX_TOOLS} tools, are {len(given)}")
    tools = [_tool(f"[{index}]", each) for index, each in enumerate(given)]
    if twice := next((tool.name for i, tool in enumerate(tools) if tool.name in {t.name for t in tools[:i]}), ""):
        raise ValueError(f"have two tools named {twice!r}")
    return Offered(tuple(tools))


def tools_text(tools: str | Iterable[Mapping[str, Any] | Callable[..., Any]]) -> str:
    """Write tools as `read_tools` reads them: their JSON, or a list of declarations and of Python functions.

    A function needs type hints, and a docstring that describes it and its arguments in Google's style.

    Raises:
        ValueError: a function cannot be described.
    """
    if isinstance(tools, str):
        return tools
    return json.dumps([_described(each) if callable(each) else each for each in tools])


def _described(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema  # slow to import

    try:
        return get_json_schema(function)
    except Exception as error:  # of several kinds, of its own
        raise ValueError(f"the function {getattr(function, '__name__', function)!r} is no tool: {error}") from None


def _tool(place: str, given: Any) -> Tool:
    """A tool from its declaration; its fields stand in `function`, or beside its type."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{place} must be an object")
    if (kind := given.get("type") or "function") not in ("function", "custom") or (
        kind == "custom" and "input_schema" not in given
    ):
        raise ValueError(f"{place}.type must be function, is {str(kind)[:40]!r}; other tools are not offered")
    its = given.get("function", given)
    if not isinstance(its, Mapping):
        raise ValueError(f"{place}.function must be an object")
    name, description = its.get("name"), its.get("description") or ""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{place}.name must be 1 to 64 letters, digits, _, - and ., is {str(name)[:80]!r}")
    parameters = its.get("parameters", its.get("input_schema")) or _ANY_ARGUMENTS
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ValueError(f"{place}.parameters must be a JSON schema of an object")
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError(f"{place}.parameters must have an object of properties, and a list of those that are required")
    if not isinstance(description, str):
        raise ValueError(f"{place}.description must be a text")
    return Tool(name, description, parameters)
