"""The page's files, as a server sends them."""

from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.resources import files

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
