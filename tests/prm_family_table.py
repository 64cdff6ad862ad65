"""Generates the table of verifier families in `prm/README.md` from the families' descriptions.

`python tests/prm_family_table.py prm/README.md` rewrites it between its markers.
"""

import sys
from pathlib import Path

from espalier.prm.base import FamilyInfo
from espalier.prm.families import entries

MARKERS = (
    "<!-- families: made by python tests/prm_family_table.py prm/README.md -->",
    "<!-- /families -->",
)
_COLUMNS = ("family", "checkpoints", "architecture", "incremental", "layout", "head", "read at", "score", "source")


def family_table() -> str:
    """Return a Markdown table with a row for every family that comes with Espalier."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(_cells(entry.info) for entry in entries())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(info: FamilyInfo) -> tuple[str, ...]:
    classes = ", ".join(f"`{name}`" for name in info.architectures) or "any, by its flag"
    adds = "yes" if info.incremental else "no"
    if info.whole_answers:
        adds = "no: whole answers only"
    spoken = (info.layout, info.head, info.score_positions, info.score, info.source)
    return tuple(cell.replace("|", "\\|") for cell in (f"`{info.name}`", info.models, classes, adds, *spoken))


def _write(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    before, start, rest = text.partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not start or not end:
        sys.exit(f"{file} has no {MARKERS[0]} … {MARKERS[1]}")
    file.write_text(f"{before}{start}\n\n{family_table()}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
