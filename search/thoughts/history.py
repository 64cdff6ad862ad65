"""Thoughts of earlier turns: told apart from what was said, so that the chat template keeps or drops them.

    reasoning_content     handed to the template as it is
    <think> in a content  apart for templates that read thoughts apart, else in the content, between the marks' tokens

Marks in the rest of a message are text, so that no template cuts an answer that quotes one.
"""

import re

from espalier.search.thoughts.marks import ThoughtMarks

_APART = re.compile(r"\breasoning_content\b|\.thinking\b|\[['\"]thinking['\"]\]")
"""Templates that read the thought of a message apart."""


def reads_thoughts_apart(template: str) -> bool:
    """Return whether a chat template looks at `reasoning_content` or `thinking` of messages."""
    return bool(_APART.search(template))


def split_message(content: str, marks: ThoughtMarks) -> tuple[str, str]:
    """Split what an assistant said into its thought, which stands between marks at the beginning, and the rest.

    Returns:
        The thought, empty without one, and the content behind it.
    """
    opening, closing = marks.opening.text + marks.label, marks.closing.text
    if not content.lstrip().startswith(opening):
        return "", content
    begin = content.index(opening) + len(opening)
    depth = 1
    for mark in re.compile(f"{re.escape(marks.opening.text)}|{re.escape(closing)}").finditer(content, begin):
        depth += 1 if mark[0] == marks.opening.text else -1
        if not depth:
            rest = content[mark.end() :].removeprefix(marks.header)
            return content[begin : mark.start()].strip("\n"), rest.lstrip("\n")
    return "", content
