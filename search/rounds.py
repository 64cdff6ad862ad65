"""What passed between a search and its algorithm, as plain data: enough to do it over."""

from dataclasses import dataclass

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One expansion; see `Expand`."""

    path: Path
    children: int
    to_end: bool
    greedy: bool


@dataclass(frozen=True, slots=True)
class Told:
    """A node as it was when the algorithm was told of it; the search may change these later."""

    path: Path
    termination: str
    multiplicity: int
    draws: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One `ask`, its `tell`, and the paths kept after it."""

    asked: tuple[Asked, ...]
    told: tuple[Told, ...]
    kept: tuple[Path, ...]
