"""Compiled convolutions, delta rule and scans against those in torch, and their bits in any cut and company."""

import pytest
import torch
from recurrent_problems import CASES, FILLING, LENGTHS, Problem, delta_rule, places_of

from espalier.kernels.cpu.backend import CpuBackend
from espalier.kernels.torch_backend import TorchBackend

OURS, REFERENCE = CpuBackend(), TorchBackend()


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def problem(request: pytest.FixtureRequest) -> Problem:
    torch.manual_seed(0)
    return request.param(sum(LENGTHS) + FILLING)


def test_rows_of_any_length_equal_torchs_and_states_are_written_where_they_belong(problem: Problem):
    size = problem.elements
    places = places_of(size)
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
