"""Engines that are given what to draft."""

from collections.abc import Callable, Sequence

from espalier.engine.engine import Engine
from espalier.engine.roles import GENERATOR
from espalier.engine.scheduling.running_samples import RunningRequest
from espalier.engine.speculation.lengths import MeasuredLength
from espalier.engine.work import Generated

Make = Callable[..., Engine]


class Scripted:
    """Proposes the same tokens for every branch, from its first one on."""

    def __init__(self, text: Sequence[int], engine: Engine) -> None:
        self.text = list(text)
        self.lengths = engine.schedulers[GENERATOR].table.lengths

    def propose(self, branches: Sequence[RunningRequest], most: Sequence[int]) -> list[list[int]]:
        return [
            self.text[self.lengths[branch.row] - branch.start :][:count]
            for branch, count in zip(branches, most, strict=True)
        ]

    def learn(self, finished: Sequence[Generated]) -> None:
        pass


class FixedLength(MeasuredLength):
    """Drafts the same number of tokens always."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._length = most

    def choose(self, branches: int) -> int:
        return self._length

    def record(self, branches: int, length: int, tokens: int, seconds: float) -> None:
        pass


def drafting(make_engine: Make, text: Sequence[int], length: int = 4, **options: object) -> Engine:
    engine = make_engine(draft_tokens=length, **options)
    speculation = engine.schedulers[GENERATOR].speculation
    speculation.drafter, speculation.lengths, speculation.length = Scripted(text, engine), FixedLength(length), length
    return engine
