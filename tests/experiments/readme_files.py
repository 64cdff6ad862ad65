"""What the READMEs hold: fenced blocks, commands, links and headings."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[str]:
    """Every Markdown file of the checkout, by its path from the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language, "" for those that name none."""
    return [body for named, body in _FENCE.findall(text_of(page)) if named == language]


def commands(page: str) -> list[str]:
    """Lines of fenced blocks that a reader is to type: after `$ `, or beginning with `make`; comments left out."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    typed = [line.removeprefix("$ ") for line in lines if line.startswith(("$ ", "make "))]
    return [re.sub(r"\s+# .*", "", line).strip() for line in typed]


def words(command: str) -> list[str]:
    """A command's words as a shell would pass them, without what runs it in the background."""
    return shlex.split(command.removesuffix("&"))


def links(page: str) -> Iterator[tuple[str, str]]:
    """The file and the heading of each link that stays in the checkout; either may be empty."""
    prose = _FENCE.sub("", text_of(page))
    for target in re.findall(r"\]\(([^()\s]+)\)", prose):
        if not re.match(r"\w+:", target):
            file, _, heading = target.partition("#")
            yield file, heading


def anchors(page: str) -> set[str]:
    """The headings of a page as links name them."""
    prose = _FENCE.sub("", text_of(page))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
