"""The contract between the engine and what guides its draws."""

from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """A state of one path: the tokens that may come next. Used by one thread at a time, see `masks`.

    A matcher that cannot go on has an `error` from then on, and allows an end-of-sequence token at most; the branch
    ends with `StopCause.ERROR`.
    """

    @property
    def error(self) -> str:
        """The reason why it cannot go on; empty while it can."""
        ...

    def allow(self, bits: np.ndarray) -> None:
        """Write the allowed tokens to `bits`, uint8 `[ceil(vocabulary / 8)]`: a bit for each, the lowest one first."""
        ...

    def advance(self, token_id: int) -> None:
        """Take the token that was drawn."""
        ...

    def give_up(self) -> None:
        """Have an error from now on, without a look at what another thread may still compute in it."""
        ...

    def copy(self) -> "Matcher":
        """A matcher in the same state, which goes its own way."""
        ...
