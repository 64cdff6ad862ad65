"""Triton's filters under its interpreter, against the reference in torch."""

import pytest
import torch
import triton
import triton.language as tl

from espalier.kernels import sampling as reference
from espalier.kernels.sampling import FILTERED
from espalier.kernels.triton import filters

ROWS = 8


def random_logits(vocabulary: int) -> torch.Tensor:
    return 3 * torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(vocabulary))


FILTERS = [
    (5, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.05),
    (20, 0.8, 0.0),
    (3, 0.999, 0.3),
    (10_000, 0.5, 1e-6),
    (0, 0.9, 0.9),
]


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have many segments and groups, and candidates often do not suffice."""
    for name, value in {"SEGMENT": 64, "GROUPS": 32, "CANDIDATES": 32}.items():
        monkeypatch.setattr(filters, name, tl.constexpr(value))
    monkeypatch.setattr(filters, "ENOUGH_GROUPS", 8)


def require_equal(logits: torch.Tensor, *limits: torch.Tensor) -> None:
    left, expected = (m.filter_logits(logits, *limits) for m in (filters, reference))
    # A token whose mass is within rounding of a limit may be left or not.
    unequal = (left != expected).nonzero()
    assert len(unequal) <= 1, unequal
    assert torch.equal(left[left != FILTERED], logits[left != FILTERED])


@pytest.mark.parametrize(
    ("sizes", "vocabulary", "limits"),
    [
        *(("small", 300, limits) for limits in FILTERS),
        *(
            pytest.param("usual", vocabulary, limits, marks=() if (i + j) % 2 else pytest.mark.slow)
            for i, vocabulary in enumerate([7, 300])
            for j, limits in enumerate(FILTERS)
        ),
    ],
    ids=str,
)
def test_filters_leave_what_the_reference_leaves(
    sizes: str, vocabulary: int, limits: tuple, request: pytest.FixtureRequest
):
    if sizes == "small":
        request.getfixturevalue("small_sizes")
    logits = random_logits(vocabulary)
    logits[:3] *= 0.01
    logits[3:6] = logits[3:6].bfloat16().float()  # many equal ones
    temperatures = torch.tensor([0.3, 1.0, 2.5, 1e-5]).repeat(ROWS // 4)
    require_equal(logits, temperatures, *(torch.full((ROWS,), value) for value in limits))


@pytest.mark.usefixtures("small_sizes")
def test_any_rank_is_found_among_candidates_or_among_all_tokens():
    top_ks = torch.arange(6, 20)
    logits = random_logits(200)[0].expand(len(top_ks), -1).contiguous()
    require_equal(logits, torch.ones(len(top_ks)), top_ks, torch.ones(len(top_ks)), torch.zeros(len(top_ks)))


def test_a_vocabulary_of_one_token_keeps_it():
    left = filters.filter_logits(torch.ones(1, 1), torch.ones(1), torch.tensor([5]), torch.tensor([0.1]), torch.ones(1))
    assert left.tolist() == [[1.0]]


@pytest.mark.usefixtures("small_sizes")
def test_of_equal_logits_those_with_the_lowest_ids_are_left():
    logits = torch.zeros(2, 1300)
    logits[:, [1250, 20, 100, 31]] = 4.0
    left = filters.filter_logits(logits, torch.ones(2), torch.tensor([3, 6]), torch.ones(2), torch.zeros(2))
    assert [(row != FILTERED).nonzero()[:, 0].tolist() for row in left] == [[20, 31, 100], [0, 1, 20, 31, 100, 1250]]


@pytest.mark.usefixtures("small_sizes")
def test_negative_logits_and_zeros_of_either_sign_are_in_order():
    logits = torch.tensor([[-1.0, -0.0, 0.0, -3.0, 2.0, -2.0]])
    left = filters.filter_logits(logits, torch.ones(1), torch.tensor([4]), torch.ones(1), torch.zeros(1))
    assert (left[0] != FILTERED).nonzero()[:, 0].tolist() == [0, 1, 2, 4]


@triton.jit
def weights_of_all(logits, order, results, SIZE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.load(order + row) * SIZE
    thresholds = filters._ordered(tl.full([16], -100.0, tl.float32))
    total = filters._weight_from(logits + at, thresholds, 25.0, 1.0, SIZE, False)
    tl.store(results + row * 16 + tl.arange(0, 16), total)


def test_weights_of_candidates_have_the_same_sum_in_any_order():
    """They are collected in the order in which programs come to them, and a limit must not depend on it."""
    size, generator = 3000, torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(size, generator=generator)
    orders = torch.stack([logits[torch.randperm(size, generator=generator)] for _ in range(8)])
    results = torch.empty(8, 16, dtype=torch.float64)
    weights_of_all[(8,)](orders, torch.arange(8), results, SIZE=size)
    assert results.unique().numel() == 1
    expected = torch.exp(logits - 25).double().sum()
    torch.testing.assert_close(results[0, 0], expected, rtol=1e-6, atol=0)
