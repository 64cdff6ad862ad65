"""Reads calls of tools in the text of an answer, as it comes: what is content, and what is a call.

A call is read once it is whole. What only looks like one is content: marks around what cannot be read, a tool that was
not offered, arguments that are no object. Of a call that a limit cut off nothing is told. Texts cut at any place are
read alike.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from espalier.search.conversation import ToolCall
from espalier.search.tools.declared import Tool
from espalier.search.tools.forms import CallForm

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_GEMMA = re.compile(r'<\|"\|>(.*?)<\|"\|>|([\w.-]+)(?=\s*:)', re.DOTALL)
"""Gemma's texts and keys, where JSON has texts in quotes."""


class CallReader:
    """Reads one answer.

    Attributes:
        calls: those that were read so far.
    """

    def __init__(self, form: CallForm, tools: Sequence[Tool], one: bool = False) -> None:
        """Begin an answer that may call `tools`, and of several calls has the first alone if `one` is set."""
        self.calls: list[ToolCall] = []
        self._form, self._one = form, one
        self._parameters = {tool.name: tool.parameters for tool in tools}
        self._marks = [form.mark, *form.around]
        self._text = ""  # not decided yet
        self._in_call = False
        self._scan = _EndOfCall(form, 0)
        self._said = False  # whether there was content
        self._blank = ""  # which is content if more of it follows

    def feed(self, text: str) -> str:
        """Read more text; returns what of all that was read is content by now."""
        self._text += text
        return "".join(self._pieces(ended=False))

    def end(self, cut: bool) -> str:
        """Read the end of the text, which a limit `cut`; returns the rest of the content."""
        said = "".join(self._pieces(ended=True))
        if not self._in_call:
            return said + ("" if self.calls else self._blank)
        rest, self._text, self._in_call = self._text, "", False
        if cut or self._take(rest):
            return said
        return said + self._content(rest)

    def _pieces(self, ended: bool) -> Iterator[str]:
        """Content, piece by piece, up to a call that is not whole."""
        while True:
            if self._in_call:
                if (end := self._scan.end(self._text)) is None:
                    return
                region, self._text = self._text[:end], self._text[end:]
                self._in_call = False
                if not self._take(region):
                    yield self._content(region)
            at, mark = self._next_mark()
            if mark == self._form.mark:
                yield self._content(self._text[:at])
                self._text, self._in_call = self._text[at:], True
                self._scan = _EndOfCall(self._form, len("" if self._form.at_start else mark))
            elif mark:
                yield self._content(self._text[:at])
                self._text = self._text[at + len(mark) :]
            else:
                held = 0 if ended else self._beginning_of_mark()
                piece = self._text[: len(self._text) - held]
                self._text = self._text[len(piece) :]
                yield self._content(piece)
                return

    def _next_mark(self) -> tuple[int, str]:
        """The first mark in the text, the longest of those at one place, and where; none is an empty text."""
        found = [(at, -len(mark), mark) for mark in self._marks if (at := self._text.find(mark)) >= 0]
        at, _, mark = min(found, default=(-1, 0, ""))
        if self._form.at_start and mark == self._form.mark and (self._said or self._text[:at].strip()):
            return -1, ""
        return at, mark

    def _beginning_of_mark(self) -> int:
        """Characters at the end of the text that may begin a mark."""
        longest = max(map(len, self._marks)) - 1
        tail = self._text[-longest:] if longest else ""
        return next((len(tail) - i for i in range(len(tail)) if any(m.startswith(tail[i:]) for m in self._marks)), 0)

    def _content(self, text: str) -> str:
        """Text as content: blanks around calls are none, and those at its end may stand before one."""
        text = self._blank + text
        if self.calls and not text.strip():
            self._blank = ""
            return ""
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        self._said = self._said or bool(kept)
        return kept

    def _take(self, region: str) -> bool:
        """Read a whole call, or a list of some; False if it is none."""
        form = self._form
        inside = region if form.at_start else region.removeprefix(form.mark)
        inside = inside.removesuffix(form.closing) if form.closing else inside
        try:
            found = [self._call(name, arguments) for name, arguments in _calls(form, inside, self._parameters)]
        except (ValueError, SyntaxError, RecursionError, MemoryError, AttributeError, KeyError, TypeError):
            return False
        self._blank = ""
        self.calls = (self.calls + found)[: 1 if self._one else None]
        return bool(found)

    def _call(self, name: Any, arguments: Any) -> ToolCall:
        """A call of a tool that was offered."""
        arguments = _json(arguments) if isinstance(arguments, str) else arguments
        if name not in self._parameters or not isinstance(arguments, dict):
            raise ValueError(name)
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


class _EndOfCall:
    """Finds the end of a call, where a closing mark within a JSON string is none; each character is seen once."""

    def __init__(self, form: CallForm, start: int) -> None:
        self._form, self._at = form, start
        self._depth = 0
        self._in_string = self._escaped = False

    def end(self, text: str) -> int | None:
        """The end of the call with which the text begins; None if it does not end in it."""
        form = self._form
        if form.content != "json":
            at = text.find(form.closing)
            return None if at < 0 else at + len(form.closing)
        while self._at < len(text):
            char = text[self._at]
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif (closing := form.closing) and closing.startswith(text[self._at : self._at + len(closing)]):
                end = self._at + len(closing)
                return end if end <= len(text) else None  # which may be the closing mark
            elif char == '"':
                self._in_string = self._depth > 0
            elif char in "{[" and (self._depth or char in form.bracket):
                self._depth += 1
            elif char in "}]" and self._depth:
                self._depth -= 1
                if not (self._depth or form.closing):
                    return self._at + 1
            self._at += 1
        return None


def _calls(form: CallForm, inside: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Names and arguments of the calls between the marks; raises what its libraries do where it is no call."""
    if form.content == "python":
        yield from _python_calls(inside)
        return
    name = ""
    if form.head:
        if not (head := re.match(form.head, inside)):
            raise ValueError("no name")
        name, inside = head["name"], inside[head.end() :]
    if form.content == "tags":
        yield name, _tagged(form, inside, parameters.get(name) or {})
    elif form.content == "gemma":
        yield (
            name,
            _json(_GEMMA.sub(lambda found: json.dumps(found[found.lastindex or 0]), inside)),
        )
    else:
        read = _json(inside.strip("` \n\t\r"))
        if form.head:
            yield name, read
            return
        for each in read if isinstance(read, list) else [read]:
            yield each["name"], each.get("arguments", each.get("parameters", {}))


def _finite(number: str) -> float:
    """A number, or the largest one, as what is larger cannot be written as JSON again."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


_json = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant).decode
"""Reads JSON that can be written again."""


def _tagged(form: CallForm, inside: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call that has each between tags."""
    properties, found = schema.get("properties") or {}, dict[str, Any]()
    for tag in re.finditer(form.tag, inside, re.DOTALL):
        key = tag["key"].strip()
        found[key] = _cast(tag["value"], properties.get(key), tag.groupdict().get("string"))
    if not found and inside.strip().removesuffix("</function>").strip():
        raise ValueError("no arguments")
    return found


def _cast(text: str, schema: Any, as_text: str | None) -> Any:
    """A value by the types that its schema allows; text where a text is allowed, and where it is no JSON."""
    types = _types(schema)
    if as_text == "true" or (as_text is None and ("string" in types or not types)):
        return text
    try:
        return _json(_PYTHON_WORDS.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


def _types(schema: Any) -> set[str]:
    """The types of JSON that a schema names, also in its alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set[str]()
    for each in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types |= _types(each)
    types |= {"null"} if schema.get("nullable") else set()
    if not types and (values := schema.get("enum") or ([schema["const"]] if "const" in schema else [])):
        types = {"string"} if any(isinstance(value, str) for value in values) else {"number", "boolean", "null"}
    return types


def _python_calls(inside: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls as a list in Python, with values that are constants."""
    listed = ast.parse(inside.strip(), mode="eval").body
    for call in listed.elts if isinstance(listed, ast.List) else [listed]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call by keywords")
        yield ast.unparse(call.func), {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
