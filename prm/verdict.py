"""What a verification says of a step: that it is being scored, and then its score."""

from typing import NamedTuple

from espalier.engine.sequence import Sequence


class Verdict(NamedTuple):
    """A verifier sequence whose work is done, and the score of the step it ends in; None where nothing was read.

    `late_tokens` are those that scoring took beside the `Scoring`'s: how many was not known before.
    """

    sequence: Sequence
    score: float | None
    late_tokens: int = 0


class Scoring(NamedTuple):
    """A step that is being scored: the sequence that will hold it, and the tokens it adds to its parent's."""

    sequence: Sequence
    num_tokens: int
