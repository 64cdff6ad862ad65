"""Triton's draws under its interpreter, against the reference in torch."""

import pytest
import torch

from espalier.kernels import sampling as reference
from espalier.kernels.sampling import FILTERED
from espalier.kernels.triton import sampling

ROWS = 12


def problem(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(ROWS, vocabulary, generator=generator)
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.5]).repeat(ROWS // 4)
    return logits, temperatures, torch.rand(ROWS, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("vocabulary", [1, 7, 257, 4096, 9000])
@pytest.mark.parametrize("filtered", [False, True])
def test_draws_equal_the_reference(vocabulary: int, filtered: bool):
    logits, temperatures, draws = problem(vocabulary)
    candidates = logits
    if filtered:
        candidates = logits.masked_fill(torch.rand(logits.shape) < 0.5, FILTERED)
        candidates[:, -1] = logits[:, -1]
    drawn = logits, candidates, temperatures, draws, torch.tensor([0, 0, 0, 1, 2, 3, 5, 7, 8, 8, 10, 11])
    ids, log_probabilities = sampling.draw_tokens(*drawn)
    expected, expected_log = reference.draw_tokens(*drawn)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(log_probabilities, expected_log, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_the_ends_of_the_distribution_are_tokens_that_may_be_drawn(draw: float):
    logits = torch.zeros(1, 5000)
    candidates = torch.full((1, 5000), FILTERED)
    candidates[0, [30, 4500]] = 0.0
    draws = torch.tensor([draw], dtype=torch.float64)
    ids, _ = sampling.draw_tokens(logits, candidates, torch.ones(1), draws, torch.arange(1))
    assert ids.tolist() == [30 if draw == 0 else 4500]


def test_of_equal_logits_the_lowest_id_is_the_most_likely():
    logits = torch.zeros(1, 5000)
    logits[0, [4999, 70, 4200]] = 2.0
    ids, _ = sampling.draw_tokens(logits, logits, torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.arange(1))
    assert ids.tolist() == [70]
