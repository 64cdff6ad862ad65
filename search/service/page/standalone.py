"""The page with traces as one HTML file that opens from disk and needs no other."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from espalier.search.service.page.files import INDEX, read_text

_MAIN = "main.js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async |class |const |function )", re.MULTILINE)
_STYLE = '<link rel="stylesheet" href="page.css">\n'
_SCRIPT = f'<script type="module" src="{_MAIN}"></script>\n'


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
