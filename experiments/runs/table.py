"""A table of values, as CSV and in Markdown."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Table:
    """Column titles, and rows of values; None is an empty cell."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, columns: Mapping[str, Iterable[Any]]) -> Self:
        """Create it from the values of each column, by title."""
        return cls(list(columns), list(map(list, zip(*columns.values(), strict=True))))

    def markdown(self) -> str:
        """The table in Markdown; its values are texts."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)

    def csv(self) -> str:
        """The table as CSV."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()
