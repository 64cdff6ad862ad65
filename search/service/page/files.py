"""The page's files, as a server sends them, and as one HTML file with traces that opens from disk."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

from espalier.search.algorithms import ALGORITHMS, default_algorithm
from espalier.search.request import AlgorithmName, SearchRequest

PACKAGE = files(__package__ or "")
INDEX = "index.html"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The header with which the page is to be sent; it needs nothing more."""

_ALGORITHMS = "<!-- algorithms -->"
_FORM = '<form id="form"'
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

_MAIN = "main.js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async |class |const |function )", re.MULTILINE)
_STYLE = '<link rel="stylesheet" href="page.css">\n'
_SCRIPT = f'<script type="module" src="{_MAIN}"></script>\n'


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file: its bytes, and its media type with the charset."""

    content: bytes
    media_type: str


def page_files(asks_token: bool = False) -> dict[str, PageFile]:
    """Return the files of the page by their path on the server: the page itself is at `/`, the others beside it.

    With `asks_token` the page asks the server for nothing before it is given a token.
    """
    found: dict[str, PageFile] = {}
    for file in PACKAGE.iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _MEDIA_TYPES:
            path = "/" if file.name == INDEX else f"/{file.name}"
            text = read_text(file.name)
            if asks_token and file.name == INDEX:
                text = text.replace(_FORM, f"{_FORM} data-asks-token")
            found[path] = PageFile(text.encode(), f"{_MEDIA_TYPES[suffix]}; charset=utf-8")
    return found


def fits_examples(generator: str) -> bool:
    """Return whether a generator of this name was made for problems like the page's examples."""
    return bool(entry_points(group="espalier.advice", name=generator))


def read_text(name: str) -> str:
    """Return the text of a file; the page offers all algorithms, each with those of N and M that it uses."""
    text = (PACKAGE / name).read_text(encoding="utf-8")
    return text.replace(_ALGORITHMS, "\n        ".join(map(_choice, AlgorithmName))) if name == INDEX else text


def _choice(name: AlgorithmName) -> str:
    fields = ALGORITHMS[name].uses
    uses = "N" * ("beam_width" in fields) + "M" * ("expansion" in fields)
    selected = " selected" if name is default_algorithm(SearchRequest(""), "steps") else ""
    return f'<option data-uses="{uses}"{selected}>{name}</option>'


# ---- one file


def standalone_page(traces: Sequence[dict[str, Any]]) -> str:
    """Return the page that shows one trace, or two side by side.

    Its content security policy allows nothing but its own script and style. Whatever the traces say is data: it cannot
    end the block it stands in.
    """
    style, script = read_text("page.css"), _bundle()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{style}</style>\n"
        f'<script type="application/json" id="traces">{_harmless(traces)}</script>\n'
        f'<script type="module">{script}</script>\n'
    )
    page = read_text(INDEX)
    assert page.count(_STYLE + _SCRIPT) == 1
    return page.replace(_STYLE + _SCRIPT, head)


def _bundle() -> str:
    """Return all modules as one: each after those that it imports, without `import` and `export`."""
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        if name in texts:
            return
        text = read_text(name)
        for imported in _IMPORT.findall(text):
            add(imported)
        texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(_MAIN)
    script = "\n".join(texts.values())
    assert not re.search(r"</script|<!--|^(import|export)\b", script, re.IGNORECASE | re.MULTILINE)
    return script


def _harmless(traces: Sequence[dict[str, Any]]) -> str:
    """Return traces as JSON without a character that HTML gives a meaning."""
    text = json.dumps(list(traces), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(block: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
