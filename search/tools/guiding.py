"""Binds calls by guided decoding, so that their arguments are JSON that fits the tool's schema.

A call that is required is bound from the answer's beginning. One that the model may make is bound from its mark on:
before it nothing is bound, and draws are those of a request without tools.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from espalier.engine.guidance.grammar import Grammar, GrammarError, json_grammar, lark_with
from espalier.engine.guidance.matcher import Matcher
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.tools.declared import Tool
from espalier.search.tools.forms import CallForm, Writing

_NO_TAG = re.compile(r'[<>"\n]')
"""Characters of names that cannot stand in a tag."""


def calls_grammar(
    form: CallForm, tools: Sequence[Tool], several: bool, behind: str = "", other: Grammar | None = None
) -> Grammar:
    """The grammar of a message's calls, or of what of it stands behind its first text, `behind`.

    Behind a mark it is of one call where each has a mark of its own. The message may be one of `other` instead.

    Raises:
        GrammarError: guided decoding does not write this form, or a name of the schema cannot be written in it.
    """
    if (writing := form.writing) is None:
        raise GrammarError(f"calls in the form of {form.family} are not bound; let tool_choice be auto")
    arguments: dict[str, Grammar] = {}
    rules = [f"call{i}: {_text(tool.name)} {_arguments(writing, tool, arguments)}" for i, tool in enumerate(tools)]
    names, start = " | ".join(f"call{i}" for i in range(len(tools))), (writing.first + writing.before)[len(behind) :]
    repeated = several and writing.several and not (behind and not writing.last)
    more = f"({_text(writing.between)} {_text(writing.before)} any)*" if repeated else ""
    closing = writing.parameter[1] if writing.parameter else writing.quote
    lines = [
        f"start: {_text(start)} any {more} {_text(writing.last)}{' | @other' if other else ''}",
        f"any: ({names}) {_text(writing.after)}",
        *([f"raw[suffix={_text(closing)}]: /(?s:.*)/"] if closing else []),
        *rules,
    ]
    return lark_with("\n".join(lines), arguments | ({"other": other} if other else {}))


def _arguments(writing: Writing, tool: Tool, grammars: dict[str, Grammar]) -> str:
    """Rule for the text between a tool's name and the end of its call, in Lark; grammars of JSON go to `grammars`."""

    def json_of(schema: Any) -> str:
        grammars[name := f"json{len(grammars)}"] = json_grammar(schema)
        return f"@{name}"

    if writing.parameter is None and not writing.quote:
        return f"{_text(writing.middle)} {json_of(dict(tool.parameters))}"
    properties = tool.parameters.get("properties") or {}
    required = [name for name in tool.parameters.get("required") or () if isinstance(name, str)]
    shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    names = dict.fromkeys([*properties, *required])
    if quote := writing.quote:
        members = "", ""  # of an object that has begun, and of one that has not
        for name in sorted(names, reverse=True):
            value = _text_value(properties.get(name, {}), quote)
            value = f"{_text(quote)} {value}" if value else json_of({**properties[name], **shared})
            member, (more, first) = f"{_text(f'{name}:')} {value}", members
            behind = f"({_text(',')} {member}){'' if name in required else '?'} {more}"
            members = behind, f"({member} {more}" + (")" if name in required else f" | {first or _text('')})")
        return f"{_text(writing.middle)} {members[1]}"
    parts, (opening, closing, *of_json) = [_text(writing.middle)], writing.parameter or ("", "")
    for name in names:
        if _NO_TAG.search(name):
            raise GrammarError(f"the argument {name[:80]!r} of {tool.name} cannot be written in a tag")
        schema = properties.get(name, {})
        value, before = _text_value(schema, closing), opening
        if not value:
            value, before = f"{json_of({**schema, **shared})} {_text(closing)}", (*of_json, opening)[0]
        parts.append(f"({_text(before.format(name))} {value}){'' if name in required else '?'}")
    return " ".join(parts)


def _text_value(schema: Any, closing: str) -> str:
    """A text up to its closing tag, in Lark; empty for a value in JSON."""
    its = schema if isinstance(schema, Mapping) else {}
    values = its.get("enum") or ([its["const"]] if "const" in its else [])
    if values and all(isinstance(value, str) for value in values):
        return f"({' | '.join(map(_text, values))}) {_text(closing)}"
    return "raw" if its.get("type") == "string" or not its else ""


def _text(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(slots=True)
class FromMark:
    """Binds what stands behind each of an answer's marks, and nothing before.

    Attributes:
        calls: binds it, at its beginning.
        mark: begins calls.
        tokenizer: of the generator.
    """

    calls: Matcher
    mark: bytes
    tokenizer: TextTokenizer
    _inside: Matcher | None = None
    _known: int = 0  # bytes of the mark with which the text ends
    _overruns: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return (self._inside or self.calls).error

    @property
    def ended(self) -> bool:
        """See `Matcher`: a text may always follow."""
        return False

    def allow(self, bits: np.ndarray) -> None:
        """See `Matcher`."""
        if self._inside or self.error:
            (self._inside or self.calls).allow(bits)
            return
        bits[:] = 255
        overruns = self._tokens_beyond()
        np.bitwise_and.at(bits, overruns // 8, ~(1 << overruns % 8).astype(np.uint8))

    def advance(self, token_id: int) -> None:
        """See `Matcher`."""
        if self._inside:
            self._inside.advance(token_id)
            if self._inside.ended:
                self._inside = None
            return
        tail = self.mark[: self._known] + self.tokenizer.decode_bytes([token_id])
        if tail.endswith(self.mark):
            self._inside, self._known = self.calls.copy(), 0
        else:
            longest = min(len(tail), len(self.mark) - 1)
            self._known = next((n for n in range(longest, 0, -1) if tail.endswith(self.mark[:n])), 0)

    def give_up(self) -> None:
        """See `Matcher`."""
        (self._inside or self.calls).give_up()

    def copy(self) -> "FromMark":
        """See `Matcher`."""
        return replace(self, _inside=self._inside and self._inside.copy())

    def _tokens_beyond(self) -> np.ndarray:
        """Tokens that hold the end of the mark and more: what stands behind it begins with a token of its own."""
        if self._known not in self._overruns:
            begun, mark = self.mark[: self._known], self.mark
            found = [i for i, its in enumerate(self.tokenizer.token_bytes) if mark in begun + its and its[-1:] != b""]
            beyond = [i for i in found if not (begun + self.tokenizer.token_bytes[i]).endswith(mark)]
            self._overruns[self._known] = np.array(beyond, dtype=np.int64)
        return self._overruns[self._known]
