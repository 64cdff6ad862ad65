"""Compiled convolutions, delta rule and scans against those in torch, and their bits in any cut and company."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from espalier.kernels.cpu.backend import CpuBackend
from espalier.kernels.recurrent import StateRows
from espalier.kernels.torch_backend import TorchBackend

OURS, REFERENCE = CpuBackend(), TorchBackend()
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
        return backend.gated_delta_rule(q, k, v, decay, beta, rows)

    return Problem(run, [*given, decay, torch.rand(tokens, heads)], heads * key_dim * value_dim)


def scan(tokens: int, heads: int = 6, groups: int = 2, size: int = 16, dim: int = 20, skips: bool = True) -> Problem:
    a, d = -3 * torch.rand(heads), random(heads) if skips else None

    def run(backend: TorchBackend, given: Sequence[torch.Tensor], rows: StateRows) -> torch.Tensor:
        x, dt, b, c = given
        return backend.state_space_scan(x, dt, a, b, c, d, rows)

    given = [random(tokens, heads, dim), torch.rand(tokens, heads), *random(2, tokens, groups, size)]
    return Problem(run, given, heads * size * dim)


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
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def problem(request: pytest.FixtureRequest) -> Problem:
    torch.manual_seed(0)
    return request.param(sum(LENGTHS) + FILLING)


def test_rows_of_any_length_equal_torchs_and_states_are_written_where_they_belong(problem: Problem):
    size = problem.elements
    places = [(3 + r * size, 3 + r * size) for r in range(3)] + [(3 + 3 * size, 3 + 4 * size), (-1, 3 + 5 * size)]
    results, memories = [], [problem.memory.clone(), problem.memory.clone()]
    for backend, memory in zip((OURS, REFERENCE), memories, strict=True):
        results.append(problem.run(backend, memory, LENGTHS, places, slice(None))[: sum(LENGTHS)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(memories[0], memories[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(memories[0][3 + 6 * size :], problem.memory[3 + 6 * size :])
    assert torch.equal(memories[0][3 + 3 * size : 3 + 4 * size], problem.memory[3 + 3 * size : 3 + 4 * size])


@pytest.mark.parametrize("pieces", [(40,), (1,) * 40, (1, 2, 3, 30, 4), (39, 1)])
def test_a_text_has_the_same_bits_in_any_cut_and_company(problem: Problem, pieces: tuple[int, ...]):
    first, size = LENGTHS[0], problem.elements
    whole, own = problem.memory.clone(), problem.memory.clone()
    places = [(3 + r * size, 3 + r * size) for r in range(len(LENGTHS))]
    expected = problem.run(OURS, whole, LENGTHS, places, slice(None))[first : first + sum(pieces)]
    found, done = [], first
    for number, count in enumerate(pieces):
        cut, place = slice(done, done + count), (3 + size, 3 + size)
        if number == 1:  # as a fork goes on: from one place to another
            place = (3 + size, 3 + 8 * size)
        elif number > 1:
            place = (3 + 8 * size, 3 + 8 * size)
        found.append(problem.run(OURS, own, [count], [place], cut))
        done += count
    assert torch.equal(torch.cat(found), expected)
    last = 3 + (8 if len(pieces) > 1 else 1) * size
    assert torch.equal(own[last : last + size], whole[3 + size : 3 + 2 * size])


def test_what_fades_below_the_least_normal_number_is_zero():
    torch.manual_seed(0)
    problem = delta_rule(18)
    problem.given[3].fill_(-5.0)
    problem.given[1].zero_()
    problem.run(OURS, problem.memory, [18], [(0, 0)], slice(None))
    assert (problem.memory[: problem.elements] == 0).all()
