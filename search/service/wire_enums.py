"""Enum members and the numbers `espalier.v1` gives them; the wire's names are Python's with a prefix."""

from enum import StrEnum
from typing import Any, Generic, TypeVar

from espalier.search.request import Aggregation, AlgorithmName, Vote
from espalier.search.result import StopReason
from espalier.v1 import search_pb2 as pb

E = TypeVar("E", bound=StrEnum)


class WireEnum(Generic[E]):
    """One enum on both sides.

    Attributes:
        words: the members' values. Each must be on the wire; importing this module fails otherwise.
    """

    def __init__(self, kind: type[E], wire: Any, prefix: str) -> None:
        self.words: tuple[str, ...] = tuple(kind)
        self._numbers: dict[str, int] = {member: wire.Value(_wire_name(prefix, member)) for member in kind}
        self._members: dict[int, E] = {self._numbers[member]: member for member in kind}

    def to_wire(self, member: str) -> Any:
        """The wire's number, typed Any because the stubs make a class of every enum; KeyError for what is no member."""
        return self._numbers[member]

    def from_wire(self, number: int) -> E | None:
        """The member, or None where the number has no meaning here."""
        return self._members.get(number)


def _wire_name(prefix: str, word: str) -> str:
    return prefix + word.upper().replace("-", "_")


ALGORITHM = WireEnum(AlgorithmName, pb.Algorithm, "ALGORITHM_")
AGGREGATION = WireEnum(Aggregation, pb.Aggregation, "AGGREGATION_")
VOTE = WireEnum(Vote, pb.Vote, "VOTE_")
STOP_REASON = WireEnum(StopReason, pb.StopReason, "STOP_REASON_")

# Terminations are plain words in Python, so that the search may add one before the contract has it.
_TERMINATIONS: dict[str, int] = {
    name.removeprefix("TERMINATION_").lower(): number for name, number in pb.Termination.items()
}
_TERMINATION_WORDS = {number: word for word, number in _TERMINATIONS.items()}


def termination_to_wire(word: str) -> Any:
    """The wire's number; None for an inner node's empty word, UNSPECIFIED for one the contract does not have."""
    return _TERMINATIONS.get(word, 0) if word else None


def termination_from_wire(number: int) -> str:
    """The word; `unspecified` where the number has no meaning here."""
    return _TERMINATION_WORDS.get(number, "unspecified")
