"""Counts lines of logic of the product by room: `python tests/house/logic_lines.py [COMMIT]`.

A line counts if it holds a token of code: no docstring, no comment, no blank line. The laboratory is no part
of the product, and counted apart. Without a commit it counts the files as they are.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "engine", "prm", "search", "experiments")
APART = "experiments/lab"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def logic_lines(text: str) -> int:
    """Lines of a Python source that hold code, those of a string of several lines included."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def by_room(commit: str = "") -> Counter[str]:
    """Lines of logic of each room, in a commit or in the working tree."""
    listing = ["git", "ls-tree", "-r", "--name-only", commit] if commit else ["git", "ls-files"]
    rooms: Counter[str] = Counter()
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if name.endswith(".py") and name.split("/")[0] in FOLDERS:
            path = ROOT / name
            if commit:
                show = ["git", "show", f"{commit}:{name}"]
                text = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
            elif path.is_file():
                text = path.read_text(encoding="utf-8")
            else:
                continue
            rooms["/".join(name.split("/")[:-1][:2])] += logic_lines(text)
    return rooms


if __name__ == "__main__":
    found = by_room(*sys.argv[1:2])
    apart = found.pop(APART, 0)
    for room, count in sorted(found.items()):
        print(f"{count:6,}  {room}")
    print(f"{found.total():6,}  in all, and {apart:,} of {APART}")
