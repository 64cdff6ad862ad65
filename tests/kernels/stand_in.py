"""A stand-in for CUDA graphs that computes again."""

from collections.abc import Callable

import torch


class StandIn:
    """Records a step by keeping what computes it; counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        output = compute()
        self.recorded.append(len(output))

        def replay() -> None:
            self.replayed.append(len(output))
            output.copy_(compute())

        return replay, output
