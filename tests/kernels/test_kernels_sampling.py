from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from espalier.kernels.cpu.sampling import draw_tokens_cpu, filter_logits_cpu, mask_tokens_cpu, penalize_tokens_cpu
from espalier.kernels.sampling import (
    FILTERED,
    LEAST_REPETITION,
    TokenPenalties,
    draw_tokens,
    filter_logits,
    mask_tokens,
    penalize_tokens,
)

EACH = torch.arange(200)
"""One draw from each of 200 rows."""


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
            draw(logits, allowed, temperatures, draws, EACH) for draw in (draw_tokens_cpu, draw_tokens)
        )
        # A draw within rounding of the boundary of two tokens may fall on either side.
        assert (ids != expected).sum() <= 1
        same = ids == expected
        torch.testing.assert_close(log_probabilities[same], expected_log[same], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("draw", [draw_tokens_cpu, draw_tokens])
def test_a_row_gives_each_of_its_draws_what_it_gives_a_draw_alone(draw):
    logits, temperatures, _ = problem(645, 8)
    draws = torch.rand(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.tensor([0] * 20 + [1] * 3 + [3] * 30 + [6] * 6 + [7])  # nothing from some rows
    ids, log_probabilities = draw(logits, logits, temperatures, draws, rows)
    alone = draw(logits[rows], logits[rows], temperatures[rows], draws, torch.arange(60))
    assert torch.equal(ids, alone[0])
    assert torch.equal(log_probabilities, alone[1])
    assert len(ids[23:53].unique()) > 5


FILTERS = [
    (5, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.05),
    (20, 0.8, 0.0),
    (3, 0.999, 0.3),
    (10_000, 0.5, 1e-6),
    (0, 0.9, 0.9),
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("size", [0.01, 3.0, 40.0])
@pytest.mark.parametrize("vocabulary", [1, 7, 257, 5000])
def test_compiled_filters_leave_what_the_reference_leaves(vocabulary: int, size: float, filters: tuple):
    logits = size / 3 * problem(vocabulary)[0]
    logits[:50] = logits[:50].bfloat16().float()  # many equal ones
    temperatures = torch.tensor([0.3, 1.0, 2.5, 1e-5]).repeat(50)
    top_k, top_p, min_p = (torch.full((200,), value) for value in filters)
    left, expected = (kept(logits, temperatures, top_k, top_p, min_p) for kept in (filter_logits_cpu, filter_logits))
    assert torch.equal(left[left != FILTERED], logits[left != FILTERED])
    # A token whose mass is within rounding of a limit may be left or not, and with it those as likely as it is.
    unequal = (left != expected).nonzero()
    weight = torch.softmax(logits / temperatures[:, None], dim=-1)[unequal[:, 0], unequal[:, 1]]
    assert len(unequal[:, 0].unique()) <= 4
    assert weight.sum() < 0.01


def test_of_equal_logits_those_with_the_lowest_ids_are_left():
    logits = torch.zeros(2, 300)
    logits[:, [250, 20, 100, 31]] = 4.0
    for kept in (filter_logits_cpu, filter_logits):
        left = kept(logits, torch.ones(2), torch.tensor([3, 0]), torch.tensor([1.0, 0.1]), torch.zeros(2))
        assert [(row != FILTERED).nonzero()[:, 0].tolist() for row in left] == [[20, 31, 100], [20]]


def test_what_is_no_number_breaks_no_filter():
    logits = torch.randn(3, 400)
    logits[0, 7], logits[1], logits[2, ::2] = float("nan"), float("-inf"), float("-inf")
    filter_logits_cpu(logits, torch.ones(3), torch.tensor([0, 4, 0]), torch.full((3,), 0.9), torch.zeros(3))
    left = filter_logits_cpu(logits[2:], torch.ones(1), torch.tensor([50]), torch.ones(1), torch.zeros(1))
    assert (left != FILTERED).nonzero()[:, 1].tolist() == logits[2].topk(50).indices.sort().values.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_logit_is_a_number_nothing_is_drawn(temperature: float):
    logits = torch.randn(3, 700)
    logits[1] = float("nan")
    draws = torch.full((3,), 0.5, dtype=torch.float64)
    ids, log_probabilities = draw_tokens_cpu(logits, logits, torch.full((3,), temperature), draws, torch.arange(3))
    assert (ids >= 0).tolist() == [True, False, True]
    assert log_probabilities.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("draw", [draw_tokens_cpu, draw_tokens])
def test_the_ends_of_the_interval_draw_the_first_and_the_last_token_there_is(draw):
    logits = torch.zeros(1, 600)
    candidates = torch.full((1, 600), FILTERED)
    candidates[:, [300, 301, 520]] = 0.0
    draws, rows = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), torch.tensor([0, 0])
    ids, _ = draw(logits, candidates, torch.ones(1), draws, rows)
    assert ids.tolist() == [300, 520]


@pytest.mark.parametrize("draw", [draw_tokens_cpu, draw_tokens])
def test_of_equal_logits_the_first_is_the_most_likely(draw):
    logits = torch.zeros(1, 50)
    logits[0, [20, 31]] = 4.0
    ids, log_probabilities = draw(logits, logits, torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.arange(1))
    assert ids.tolist() == [20]
    torch.testing.assert_close(log_probabilities, torch.log_softmax(logits, -1)[:, 20])


def test_a_row_has_the_same_bits_alone_and_in_company():
    logits, temperatures, draws = problem(645)
    ids, log_probabilities = draw_tokens_cpu(logits, logits, temperatures, draws, EACH)
    for row in range(0, 200, 17):
        one = slice(row, row + 1)
        alone = draw_tokens_cpu(logits[one], logits[one], temperatures[one], draws[one], EACH[:1])
        assert torch.equal(alone[0], ids[one])
        assert torch.equal(alone[1], log_probabilities[one])


@pytest.mark.parametrize("draw", [draw_tokens_cpu, draw_tokens])
@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-38, 1e-7])
def test_a_tiny_temperature_draws_the_most_likely_token(temperature: float, draw):
    logits = problem(645)[0]
    draws = torch.linspace(0, 1 - 2**-53, 200, dtype=torch.float64)
    ids, log_probabilities = draw(logits, logits, torch.full((200,), temperature), draws, EACH)
    assert torch.equal(ids, logits.argmax(-1))
    assert log_probabilities.isfinite().all()


def test_what_cannot_be_drawn_has_no_log_probability():
    logits = torch.randn(2, 700)
    logits[1, 3] = float("inf")  # of which no exponential is a number
    draws = torch.full((2,), 0.5, dtype=torch.float64)
    ids, log_probabilities = draw_tokens_cpu(logits, logits, torch.ones(2), draws, torch.arange(2))
    assert ids[0] >= 0
    assert log_probabilities.isnan().tolist() == [False, True]


@pytest.mark.parametrize("kept", [filter_logits_cpu, filter_logits])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("top_p", [0.0, 1e-46, 1e-9])
def test_the_smallest_share_leaves_the_most_likely_token(top_p: float, top_k: int, kept):
    logits = problem(645)[0]
    rows = (torch.ones(200), torch.full((200,), top_k), torch.full((200,), top_p), torch.zeros(200))
    left = kept(logits, *rows)
    assert torch.equal(left.argmax(-1), logits.argmax(-1))
    assert ((left != FILTERED).sum(-1) == 1).all()


@pytest.mark.parametrize("kept", [filter_logits_cpu, filter_logits])
def test_a_share_of_nothing_filters_nothing(kept):
    logits, no_top_k = problem(645)[0], torch.zeros(200, dtype=torch.int64)
    left = kept(logits, torch.ones(200), no_top_k, torch.ones(200), torch.full((200,), 1e-46))
    assert torch.equal(left, logits)


@pytest.mark.parametrize("mask", [mask_tokens, mask_tokens_cpu])
@pytest.mark.parametrize("vocabulary", [1, 7, 8, 9, 257, 5000])
def test_a_mask_leaves_the_tokens_whose_bits_are_set(vocabulary: int, mask):
    logits = problem(vocabulary, 12)[0]
    allowed = torch.rand(12, vocabulary, generator=torch.Generator().manual_seed(1)) < 0.5
    allowed[0], allowed[1] = True, False
    bits = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little"))
    before = logits.clone()
    assert torch.equal(mask(logits, bits), torch.where(allowed, logits, FILTERED))
    assert torch.equal(logits, before)
    memory = torch.full_like(logits, 5.0)
    assert mask(logits, bits, memory) is memory
    assert torch.equal(memory, torch.where(allowed, logits, FILTERED))


@pytest.mark.parametrize("penalize", [penalize_tokens, penalize_tokens_cpu])
@pytest.mark.parametrize("vocabulary", [1, 7, 257, 5000])
def test_penalties_are_those_of_transformers_and_of_the_openai_api(vocabulary: int, penalize):
    """Also far from the usual values, where tokens stand there many times and only behind the prompt, or before."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = problem(vocabulary, 12)[0]
    rows, length = torch.tensor([0, 2, 3, 7, 8, 11]), 40
    tokens = torch.randint(min(vocabulary, 30), (6, length), generator=generator, dtype=torch.int32)
    starts, ends = torch.tensor([0, 5, 12, 12, 40, 1]), torch.tensor([40, 6, 30, 12, 40, 1])
    tokens[torch.arange(length) >= ends[:, None]] = -7  # what is not there yet
    values = torch.tensor([[1.05, 0.5, 1e6, 1.0, 1e-30, 3.0], [0, 1.5, -2, 2, 0.5, 1], [2, 0, -1, 0.3, 0, 1]])
    repetitions, presences, frequencies = values
    expected = logits.clone()
    for r, row in enumerate(rows.tolist()):
        its: Any = tokens[r, : ends[r]].long()
        processor = RepetitionPenaltyLogitsProcessor(max(float(repetitions[r]), LEAST_REPETITION))
        expected[row] = processor(its[None], expected[row : row + 1].clone())[0]
        counts = torch.bincount(its[starts[r] :], minlength=vocabulary)
        expected[row] -= frequencies[r] * counts
        expected[row] -= presences[r] * (counts > 0)
    penalize(logits, TokenPenalties(rows, tokens, starts, ends, repetitions, presences, frequencies))
    assert torch.equal(logits, expected)
