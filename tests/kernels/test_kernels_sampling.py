import pytest
import torch

from espalier.kernels.cpu.sampling import draw_tokens_cpu
from espalier.kernels.sampling import FILTERED, draw_tokens_reference


def problem(vocabulary: int, rows: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.5]).repeat(rows // 4)
    return logits, temperatures, torch.rand(rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("vocabulary", [1, 7, 255, 256, 257, 645, 5000])
def test_compiled_draws_equal_the_reference(vocabulary: int):
    logits, temperatures, draws = problem(vocabulary)
    candidates = logits.masked_fill(torch.rand(logits.shape) < 0.3, FILTERED)
    candidates[:, 0] = logits[:, 0]
    for allowed in (logits, candidates):
        (ids, log_probabilities), (expected, expected_log) = (
            draw(logits, allowed, temperatures, draws) for draw in (draw_tokens_cpu, draw_tokens_reference)
        )
        # A draw within rounding of the boundary of two tokens may fall on either side.
        assert (ids != expected).sum() <= 1
        same = ids == expected
        torch.testing.assert_close(log_probabilities[same], expected_log[same], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("draw", [draw_tokens_cpu, draw_tokens_reference])
def test_the_ends_of_the_interval_draw_the_first_and_the_last_token_there_is(draw):
    logits = torch.zeros(2, 600)
    candidates = torch.full((2, 600), FILTERED)
    candidates[:, [300, 301, 520]] = 0.0
    ids, _ = draw(logits, candidates, torch.ones(2), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert ids.tolist() == [300, 520]


@pytest.mark.parametrize("draw", [draw_tokens_cpu, draw_tokens_reference])
def test_of_equal_logits_the_first_is_the_most_likely(draw):
    logits = torch.zeros(1, 50)
    logits[0, [20, 31]] = 4.0
    ids, log_probabilities = draw(logits, logits, torch.zeros(1), torch.zeros(1, dtype=torch.float64))
    assert ids.tolist() == [20]
    torch.testing.assert_close(log_probabilities, torch.log_softmax(logits, -1)[:, 20])


def test_a_row_has_the_same_bits_alone_and_in_company():
    logits, temperatures, draws = problem(645)
    ids, log_probabilities = draw_tokens_cpu(logits, logits, temperatures, draws)
    for row in range(0, 200, 17):
        one = slice(row, row + 1)
        alone = draw_tokens_cpu(logits[one], logits[one], temperatures[one], draws[one])
        assert torch.equal(alone[0], ids[one])
        assert torch.equal(alone[1], log_probabilities[one])
