r"""Forms in which families of checkpoints write calls of tools, found from their chat templates and vocabularies.

The forms stand in `forms.toml`. A call is a mark, the name, the arguments as JSON or between tags, and often a closing
mark, as in `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from espalier.engine.errors import CheckpointError
from espalier.engine.models.tokenizer import TextTokenizer

Content = Literal["json", "tags", "gemma", "python"]


@dataclass(frozen=True, slots=True)
class Writing:
    """The texts around the parts of a message's calls.

    Attributes:
        before: in front of a call's name.
        middle: between its name and its arguments.
        after: behind its arguments.
        first: in front of the first call.
        between: between two calls.
        several: whether a message may have more than one.
        last: behind the last call.
        parameter: before an argument, with `{}` for its name, behind it, and before one in JSON where that differs;
            None for arguments that are one object.
        quote: around texts of an object whose keys are bare; empty for JSON.
    """

    before: str
    middle: str
    after: str
    first: str = ""
    between: str = "\n"
    several: bool = True
    last: str = ""
    parameter: tuple[str, ...] | None = None
    quote: str = ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a family of checkpoints writes calls.

    Attributes:
        family: the name of the checkpoints.
        evidence: texts that the template or the vocabulary has.
        mark: text that begins a call.
        closing: text that ends it; empty where its JSON does.
        content: how the arguments are written; `json` with the name beside them where `head` has none.
        head: regular expression of what stands between the mark and the arguments, with the `name`.
        tag: regular expression of one argument of `tags`, with its `key` and its `value`.
        around: texts before the first call and behind the last one, which are no content.
        bracket: with which its JSON begins.
        at_start: whether the call must be the first thing in the answer, and `mark` is part of its JSON.
        writing: for guided decoding; None where that is not offered.
    """

    family: str
    evidence: tuple[str, ...]
    mark: str
    closing: str
    content: Content = "json"
    head: str = ""
    tag: str = ""
    around: tuple[str, ...] = ()
    bracket: str = "{"
    at_start: bool = False
    writing: Writing | None = None

    @property
    def trigger(self) -> str:
        """The text from which on a message's calls are bound; empty where nothing but a call's JSON tells one."""
        if self.writing is None or self.at_start:
            return ""
        start = self.writing.first + self.writing.before
        return next((text for text in self.around if start.startswith(text)), self.mark)


def _values(given: dict[str, Any]) -> dict[str, Any]:
    """The values of a dataclass, of a table of TOML."""
    return {name: tuple[Any, ...](value) if isinstance(value, list) else value for name, value in given.items()}


def _form(given: dict[str, Any]) -> CallForm:
    writing = given.pop("writing", None)
    return CallForm(**_values(given), writing=writing and Writing(**_values(writing)))


FORMS = tuple(map(_form, tomllib.loads(Path(__file__).with_name("forms.toml").read_text(encoding="utf-8"))["form"]))
"""The first whose evidence a checkpoint has is its form."""
_SHOWN = "zq_shown_xkw"


def find_form(tokenizer: TextTokenizer) -> CallForm | None:
    """The form of a checkpoint's calls; None for one whose template knows no tools, or writes calls in another form.

    What its `response_template` says goes before what its chat template and its tokens show.
    """
    own = tokenizer.response_template
    template = (tokenizer.chat_template_for_tools or "") + json.dumps(own, ensure_ascii=False)
    if not shows_tools(tokenizer):
        return None

    def has(text: str) -> bool:
        return text in template or tokenizer.token_id(text) is not None

    fields = own.get("fields")
    field = (fields.get("tool_calls") if isinstance(fields, dict) else None) or {}
    mark, closing = (field.get(name, "") for name in ("open", "close"))
    if field.get("content") == "json" and mark and isinstance(mark, str) and isinstance(closing, str):
        known = (form for form in FORMS if (form.mark, form.closing) == (mark, closing) and form.content == "json")
        return next(known, CallForm("a response_template", (), mark, closing, bracket="[{"))
    return next((form for form in FORMS if all(map(has, form.evidence))), None)


def shows_tools(tokenizer: TextTokenizer) -> bool:
    """Return whether the chat template shows the tools that it is given."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    function = {"name": _SHOWN, "description": "", "parameters": parameters}
    try:
        listed = [{"type": "function", "function": function}]
        shown = tokenizer.render_chat([{"role": "user", "content": "2"}], tools=listed)
    except CheckpointError:
        return False
    return _SHOWN in shown


def no_form(tokenizer: TextTokenizer) -> str:
    """Why calls of a checkpoint that has no form are not read."""
    if not shows_tools(tokenizer):
        return "the generator's chat template does not show tools; take a checkpoint that was taught to call them"
    known = "; ".join(form.family for form in FORMS)
    return f"the generator writes calls in a form that is not known; known are those of {known}"
