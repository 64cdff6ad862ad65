"""A matcher whose state is all that was drawn."""

from collections.abc import Iterable

import numpy as np


class Residues:
    """Allows the tokens whose id leaves a remainder that depends on all tokens before; fails after `most`."""

    def __init__(self, history: Iterable[int] = (), most: int = 10_000) -> None:
        self.history, self.most = list(history), most

    @property
    def error(self) -> str:
        return "that is enough" if len(self.history) >= self.most else ""

    def permits(self, token_id: int) -> bool:
        return token_id % 7 == (sum(self.history) * 31 + len(self.history)) % 7

    def allow(self, bits: np.ndarray) -> None:
        permitted = np.array([self.permits(i) for i in range(8 * len(bits))])
        bits[:] = np.packbits(permitted, bitorder="little")

    def advance(self, token_id: int) -> None:
        assert self.permits(token_id), f"token {token_id} was not allowed behind {self.history}"
        self.history.append(token_id)

    def give_up(self) -> None:
        self.most = 0

    def copy(self) -> "Residues":
        return Residues(self.history, self.most)
