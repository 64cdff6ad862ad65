"""One line of what `espalier doctor` reports."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `value` is empty if missing, `fatal` is set if no search can run because of it."""

    name: str
    value: str
    advice: str = ""
    fatal: bool = False

    def __str__(self) -> str:
        mark = "✗" if self.fatal else "–" if not self.value else "!" if self.advice else "✓"
        return f"{mark} {self.name:<26}{self.value or 'missing'}{self.advice and f'; {self.advice}'}"
