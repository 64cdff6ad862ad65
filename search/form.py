r"""Forms that an answer or a whole text must have, read from the text of a request.

\d+                       a regular expression that matches all of it; also regex:\d+
json:{"type": "object"}   a JSON value that a schema allows
grammar:start: "a" | "b"  a text of a grammar in Lark
"""

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from espalier.engine.guidance.grammar import Grammar

FORMS = ("answer_form", "text_form")
"""Fields of requests that hold one."""
MAX_FORM_BYTES = 64 * 1024
_KINDS = ("regex", "json", "grammar")
_PLAIN = r"[^{}\\]|\\+[^\\]"
_IN_BRACES = rf"(?:{_PLAIN}|\{{(?:{_PLAIN}|\{{(?:{_PLAIN})*\}})*\}})*"
"""Texts whose braces match, up to two in one another; a brace behind a backslash is a letter."""
_OPENING = re.compile(r"\\(?:boxed|fbox)\{")
_IN_BOX = r"""start: (before @answer "}")+ AFTER
before[lazy]: BEFORE
BEFORE: /(?s:.*)\\(boxed|fbox)\{/ & ~/(?s:.*)\\(boxed|fbox)[^{](?s:.*)/
AFTER: ~/(?s:.*)\\(boxed|fbox)(?s:.*)/
"""
"""A text with at least one box, each of which holds an answer. Boxes without braces are none."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form.

    Attributes:
        kind: `regex`, `json` or `grammar`.
        text: of that kind.
    """

    kind: str
    text: str

    @property
    def schema(self) -> Any:
        """The schema of a JSON value."""
        return json.loads(self.text)

    def grammar(self) -> "Grammar":
        """The grammar of texts that have the form."""
        from espalier.engine.guidance.grammar import json_grammar, lark_grammar, regex_grammar

        if self.kind == "json":
            return json_grammar(self.schema)
        return regex_grammar(self.text) if self.kind == "regex" else lark_grammar(self.text)

    def in_box(self) -> "Grammar":
        """The grammar of texts with boxes that each hold a text of the form.

        The braces of a regular expression's texts match, up to two in one another, so that the box's own is found.
        """
        return self._before_brace().within(_IN_BOX)

    def to_brace(self) -> "Grammar":
        """The grammar of what is left of a box that is open: a text of the form and the closing brace."""
        return self._before_brace().within('start: @answer "}"')

    def content_before_brace(self, text: str) -> str | None:
        """The content of a box whose text begins behind its opening brace; None if the box is not closed."""
        if self.kind == "json":  # whose texts hold braces that do not match
            try:
                end = json.JSONDecoder().raw_decode(text)[1]
            except (ValueError, RecursionError):
                return None
            return text[:end] if text.startswith("}", end) else None
        from espalier.search.grading.boxes import content_before_brace  # here, as a client needs no grading

        return content_before_brace(text)

    def last_in_box(self, text: str) -> str:
        """The content of the last box of a text; empty without one, or if that is not closed."""
        boxes = list(_OPENING.finditer(text))
        return self.content_before_brace(text[boxes[-1].end() :]) or "" if boxes else ""

    def _before_brace(self) -> "Grammar":
        from espalier.engine.guidance.grammar import regex_grammar

        return regex_grammar(self.text, _IN_BRACES) if self.kind == "regex" else self.grammar()


def read_form(text: str) -> Form:
    """Read a form; whether its grammar can be compiled is found out later.

    Raises:
        ValueError: it is too long, or a schema is no JSON.
    """
    if len(text.encode(errors="replace")) > MAX_FORM_BYTES:
        raise ValueError(f"must be at most {MAX_FORM_BYTES} bytes")
    kind, colon, rest = text.partition(":")
    form = Form(kind, rest) if colon and kind in _KINDS else Form("regex", text)
    if form.kind == "json":
        try:
            schema = form.schema
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json: takes a JSON schema: {error or 'it is nested too deep'}") from None
        if not isinstance(schema, dict | bool):
            raise ValueError("json: takes a JSON schema, which is an object, true or false")
    elif not form.text.strip():
        raise ValueError(f"{form.kind} is empty")
    return form
