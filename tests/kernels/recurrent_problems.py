"""Problems for convolutions, delta rule and scans: what an operation is given, and where its states lie."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.kernels.recurrent import StateRows
from espalier.kernels.torch_backend import TorchBackend

Operation = Callable[[TorchBackend, Sequence[torch.Tensor], StateRows], torch.Tensor]
LENGTHS = (1, 40, 2, 3, 7)
FILLING = 3


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


class Problem:
    """An operation, what it is given of a number of tokens, and how many elements a state has."""

    def __init__(self, operation: Operation, given: list[torch.Tensor], elements: int) -> None:
        self.operation, self.given, self.elements = operation, given, elements
        self.memory = torch.randn(3 + 10 * elements)

    def run(self, backend: TorchBackend, memory: torch.Tensor, lengths: Sequence[int], places: Any, cut: slice) -> Any:
        spans = torch.tensor([0, *lengths]).cumsum(0)
        sources, targets = (torch.tensor(each) for each in zip(*places, strict=True))
        rows = StateRows(memory, spans, sources, targets)
        return self.operation(backend, [each[cut] for each in self.given], rows)


def convolution(tokens: int, channels: int = 40, width: int = 4, biased: bool = True, silu: bool = True) -> Problem:
    weight, bias = random(channels, width), random(channels) if biased else None
    strided = random(tokens, channels + 5)[:, 2 : channels + 2]

    def run(backend: TorchBackend, given: Sequence[torch.Tensor], rows: StateRows) -> torch.Tensor:
        return backend.causal_convolution(given[0], weight, bias, silu, rows)

    return Problem(run, [strided], (width - 1) * channels)


def delta_rule(
    tokens: int, heads: int = 4, key_heads: int = 2, key_dim: int = 12, value_dim: int = 40, wide: bool = False
) -> Problem:
    mixed = random(tokens, 2 * key_heads * key_dim + heads * value_dim)
    q, k, v = mixed.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], dim=1)
    decay = -torch.rand(tokens, heads, key_dim) if wide else -torch.rand(tokens, heads)
    given = [q.unflatten(1, (-1, key_dim)), k.unflatten(1, (-1, key_dim)), v.unflatten(1, (-1, value_dim))]

    def run(backend: TorchBackend, given: Sequence[torch.Tensor], rows: StateRows) -> torch.Tensor:
        q, k, v, decay, beta = given
        return backend.gated_recurrence(q, k, v, decay, beta, rows)

    return Problem(run, [*given, decay, torch.rand(tokens, heads)], heads * key_dim * value_dim)


def scan(tokens: int, heads: int = 6, groups: int = 2, size: int = 16, dim: int = 20, skips: bool = True) -> Problem:
    a, d = -3 * torch.rand(heads), random(heads) if skips else None

    def run(backend: TorchBackend, given: Sequence[torch.Tensor], rows: StateRows) -> torch.Tensor:
        x, dt, b, c = given
        return backend.state_space_scan(x, dt, a, b, c, d, rows)

    given = [random(tokens, heads, dim), torch.rand(tokens, heads), *random(2, tokens, groups, size)]
    return Problem(run, given, heads * size * dim)


def selective(tokens: int, channels: int = 40, size: int = 16, skips: bool = True) -> Problem:
    a, d = -3 * torch.rand(channels, size), random(channels) if skips else None

    def run(backend: TorchBackend, given: Sequence[torch.Tensor], rows: StateRows) -> torch.Tensor:
        x, dt, b, c = given
        return backend.selective_scan(x, dt, a, b, c, d, rows)

    given = [random(tokens, channels), torch.rand(tokens, channels), *random(2, tokens, size)]
    return Problem(run, given, channels * size)


CASES: dict[str, Callable[[int], Problem]] = {
    "convolution": convolution,
    "convolution of width 7, no bias": lambda tokens: convolution(tokens, 17, 7, biased=False, silu=False),
    "convolution of width 2": lambda tokens: convolution(tokens, 1100, 2),
    "delta rule": delta_rule,
    "delta rule of one head": lambda tokens: delta_rule(tokens, 1, 1, 3, 5),
    "delta rule of 128": lambda tokens: delta_rule(tokens, 2, 1, 128, 128),
    "delta rule with decays of rows": lambda tokens: delta_rule(tokens, wide=True),
    "scan": scan,
    "scan without skip": lambda tokens: scan(tokens, 4, 4, 8, 64, skips=False),
    "selective scan": selective,
    "selective scan of odd sizes without skip": lambda tokens: selective(tokens, 35, 5, skips=False),
}


def places_of(elements: int) -> list[tuple[int, int]]:
    """Sources and targets of `LENGTHS`: three states in place, one that a copy is begun of, and one that begins."""
    return [(3 + r * elements, 3 + r * elements) for r in range(3)] + [
        (3 + 3 * elements, 3 + 4 * elements),
        (-1, 3 + 5 * elements),
    ]
