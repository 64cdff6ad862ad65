"""Espalier: test-time-compute search with a generator and a process reward model in one engine.

    from espalier import Solver

    problem = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
    with Solver() as solver:
        print(solver.solve(problem).answer)

The sub-packages are layers, and imports only point down:
`kernels` <- `engine` <- `prm` <- `search` <- `experiments`; `v1` is the wire contract.

Names are imported when they are first used: importing this package imports nothing heavy.
"""

import os
import tempfile
from importlib import import_module
from typing import TYPE_CHECKING

try:
    tempfile.gettempdir()
except FileNotFoundError:
    # No folder for temporary files can be written, as in a read-only container. torch imports packages (dill) that ask
    # for its name and never use it; whoever does writes nothing, and gets an error that names this folder.
    tempfile.tempdir = os.path.join(os.sep, "tmp")

if TYPE_CHECKING:
    from espalier.engine.errors import EspalierError
    from espalier.search.client import AsyncSearchClient, SearchClient
    from espalier.search.request import SearchRequest
    from espalier.search.result import SearchResult
    from espalier.search.solver import Scorer, Solver

    __version__: str

__all__ = [
    "AsyncSearchClient",
    "EspalierError",
    "Scorer",
    "SearchClient",
    "SearchRequest",
    "SearchResult",
    "Solver",
    "__version__",
]

DISTRIBUTION = "espalier-search"
"""The name to install it by; PyPI's `espalier` is another project."""
_HOMES = {
    "AsyncSearchClient": "espalier.search.client",
    "EspalierError": "espalier.engine.errors",
    "Scorer": "espalier.search.solver",
    "SearchClient": "espalier.search.client",
    "SearchRequest": "espalier.search.request",
    "SearchResult": "espalier.search.result",
    "Solver": "espalier.search.solver",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(DISTRIBUTION)
        except PackageNotFoundError:  # run from source, never installed
            return "unknown"
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'espalier' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
