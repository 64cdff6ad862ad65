"""`espalier serve`, but searches of some seeds answer with formulas, which the demo pair never does."""

from dataclasses import replace
from functools import partial
from typing import Any

from espalier.experiments.cli import main as cli
from espalier.search.common_fields import answer_in
from espalier.search.growth import search
from espalier.search.request import SearchRequest
from espalier.search.run.executor import KINDS
from espalier.search.tree import Node

ROOTS, TOWERS = 10**6, 2 * 10**6
"""First seeds of searches that answer with square roots, and with towers of powers."""
_ROOTS = ("x+1", "2\\sqrt{2}", "\\sqrt{8}")
"""Only a vote that finds the last two equal does not select the first."""


def _answer(kind: int, path: tuple[int, ...], text: str, request: SearchRequest) -> str:
    if kind == ROOTS:
        return _ROOTS[path[0] % len(_ROOTS)]
    return f"x+{path[0]}+10^{{10^{{10}}}}" if kind == TOWERS else answer_in(text, request)


class _AnsweringSearch(search.RunningSearch):
    def _on_complete(self, node: Node) -> Any:
        kind = (self.request.seed or 0) // ROOTS * ROOTS
        search.answer_in = partial(_answer, kind, node.path)  # type: ignore[assignment]
        return super()._on_complete(node)


if __name__ == "__main__":
    KINDS[SearchRequest] = replace(KINDS[SearchRequest], runner=f"{__name__}:{_AnsweringSearch.__name__}")
    cli.main()
