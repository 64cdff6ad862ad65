"""Finds programs that are answers: code between fences, and text that is code without one."""

import re
import warnings

_FENCE = re.compile(r"^[^\S\n]*(`{3,}|~{3,})[^\n`]*\n")
_OPENING = re.compile(r"(?:[^\n`]{0,80}:)?\s*(`{3,}|~{3,})[^\n`]*\n")
_IN_BRACES = re.compile(r"(?:\)|\b(?:else|do|try|(?:struct|class|interface)\s+\w+))\s*\{\s*$", re.MULTILINE)
_STATEMENT = re.compile(
    r"^\s*(?:return|int|float|double|void|var|let|const|SELECT|INSERT|UPDATE|DELETE|print\w*|cout|System)\b[^\n]*;\s*$|"
    r"^(?:(?:async\s+)?function\b.*\(|(?:const|var|public|static)\s+\w+.*[=;({]|#include\b)|^SELECT\b[^;]{1,500}\bFROM\b",
    re.MULTILINE,
)
"""Lines of languages whose statements end in a semicolon, and the first words of some."""
_MAY_BE_PYTHON = re.compile(r"\w\([^()]*\)|\b(?:return|import|lambda|for|assert|raise|del)\s")
_FORMULA = re.compile(r"\\(?:boxed|begin|frac|text|sqrt|math[a-z]+|[,;!()\[\]])|\$")
_LINE_WITH_WORD = re.compile(r"^.*[^\W\d_]{2}.*$", re.MULTILINE)
_MAX_CODE = 20_000
"""Characters of a text that may be code."""


def fenced(text: str) -> str | None:
    """The content of all fences of a text; None without one, empty if one is not closed."""
    found, start = list[str](), 0
    for line in re.finditer(r"^[^\S\n]*(?:```|~~~)", text, re.MULTILINE):
        if line.start() < start:
            continue
        opening = _FENCE.match(text[line.start() :])
        if not opening:
            continue
        content, start = _closed(text, line.start() + opening.end(), opening[1])
        if start < 0:
            return ""
        found.append(content)
    return as_program("\n".join(found)) if found else None


def fenced_at(text: str, start: int) -> str | None:
    """The content of the fence that follows in a text, perhaps behind a few words and a colon; else as `fenced`."""
    opening = _OPENING.match(text, start)
    return as_program(_closed(text, opening.end(), opening[1])[0]) if opening else None


def as_program(text: str) -> str:
    """A text as programs are compared: without blanks at the ends of lines, and blank lines around it."""
    return "\n".join([line.rstrip() for line in text.splitlines()]).strip("\n")


def are_calls(answer: str) -> bool:
    """Return whether an answer is calls of tools, as `tools.declared.answer_of_calls` writes them."""
    return answer.startswith('{"tool_calls":[{"arguments":{')


def is_program(text: str) -> bool:
    """Return whether a text is code: by what its lines end in, or because Python can parse it and no formula is so."""
    if len(text) > _MAX_CODE:
        return False
    several = "\n" in text.strip()
    if not several and (not re.search(r"[ (]", text) or ("\\" in text and not re.search("[\"']", text))):
        return False
    if not (several or _MAY_BE_PYTHON.search(text) or _STATEMENT.search(text)):
        return False
    if _FORMULA.search(text):
        return False
    return bool(_IN_BRACES.search(text) or _STATEMENT.search(text)) or _is_python(text, several)


def is_text_of_lines(text: str) -> bool:
    """Return whether several lines have words, as those of a program or its output: they are no formula."""
    return "\n" in text and not _FORMULA.search(text) and len(_LINE_WITH_WORD.findall(text)) > 1


def _closed(text: str, start: int, mark: str) -> tuple[str, int]:
    """The content of a fence up to its closing mark, and where that ends; empty and -1 without one."""
    closing = re.compile(rf"^[^\S\n]*{mark}[^\S\n]*$", re.MULTILINE).search(text, start)
    return (text[start : closing.start()], closing.end()) if closing else ("", -1)


def _is_python(text: str, several: bool) -> bool:
    import ast

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            statements = ast.parse(text.strip("\n") if several else text.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    nodes = [node for statement in statements for node in ast.walk(statement)]
    sure = (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.JoinedStr)
    formulas = (ast.Expr, ast.Assign, ast.AnnAssign)
    if any(isinstance(node, sure) or (isinstance(node, ast.stmt) and not isinstance(node, formulas)) for node in nodes):
        return len(nodes) > 1
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    prints = any(
        isinstance(call, ast.Attribute) or (isinstance(call, ast.Name) and call.id == "print") for call in calls
    )
    texts = any(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in nodes)
    return prints or bool(calls and (several or texts))
