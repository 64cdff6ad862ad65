"""Triton's filters, and draws from what they leave, under its interpreter against the references in torch."""

import pytest
import torch
import triton
import triton.language as tl

from espalier.kernels import sampling as reference
from espalier.kernels.sampling import FILTERED, Filters
from espalier.kernels.torch_backend import TorchBackend
from espalier.kernels.triton import filters, sampling

ROWS = 8


def random_logits(vocabulary: int, rows: int = ROWS) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))


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
    for name, value in {"SEGMENT": 64, "GROUPS": 32, "CANDIDATES": 32, "ENOUGH_GROUPS": 8}.items():
        monkeypatch.setattr(filters, name, tl.constexpr(value))


def limits_of(rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    values = torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)
    return Filters(torch.arange(rows), *(value.repeat(rows) for value in values))


def left_of(logits: torch.Tensor, temperatures: torch.Tensor, its: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens are left, bool, and from how many candidates each row is drawn; 0 for all of its tokens."""
    (rows, vocabulary), group = logits.shape, tl.constexpr(filters.group_size(logits.shape[1]))
    segments = -(-vocabulary // filters.SEGMENT.value)
    group_tops, log_masses, tops = (torch.empty(rows, n) for n in (filters.GROUPS.value, segments, segments))
    best, masses = (torch.empty(rows, segments, dtype=dtype) for dtype in (torch.int32, torch.int64))
    given = logits, logits, temperatures
    sampling.measure_segments[rows, segments](
        *given, log_masses, group_tops, tops, best, masses, vocabulary, GROUP=group
    )
    min_ps, limits, counts, _ = sampling.limit_rows(logits, temperatures, its, group_tops, tops, masses)
    bits = (logits.float() + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31
    keys = order * 2**24 + 2**24 - 1 - torch.arange(vocabulary)
    shares = torch.exp((logits - logits.amax(1, keepdim=True)) / temperatures.clamp(min=1e-6)[:, None])
    return (keys >= limits[:, None]) & (shares >= min_ps[:, None]) & (shares > 0), counts


def require_equal(logits: torch.Tensor, temperatures: torch.Tensor, its: Filters) -> None:
    expected = reference.filter_logits(logits, temperatures, *its[1:]) != FILTERED
    unequal = (left_of(logits, temperatures, its)[0] != expected).nonzero()
    assert len(unequal) <= 1, unequal  # a token whose mass is within rounding of a limit may be left or not


def require_equal_draws(logits: torch.Tensor, temperatures: torch.Tensor, its: Filters, each: int) -> None:
    """Draws spread over the distribution of each row are the reference's, but at most two that round otherwise."""
    rows = torch.arange(len(logits)).repeat_interleave(each)
    draws = ((torch.arange(each, dtype=torch.float64) + 0.37) / each).repeat(len(logits))
    drawn = logits, logits, temperatures, draws, rows
    ids, log_probabilities = sampling.draw_tokens(*drawn, its)
    expected, expected_log = TorchBackend().draw_filtered(*drawn, its)
    same = ids == expected
    assert same.sum() >= len(ids) - 2
    torch.testing.assert_close(log_probabilities[same], expected_log[same], rtol=1e-5, atol=1e-5)


CASES = [
    *(("small", 300, limits) for limits in FILTERS),
    *(
        pytest.param("usual", vocabulary, limits, marks=() if (i + j) % 2 else pytest.mark.slow)
        for i, vocabulary in enumerate([7, 300])
        for j, limits in enumerate(FILTERS)
    ),
]


@pytest.mark.parametrize(("sizes", "vocabulary", "limits"), CASES, ids=str)
def test_filters_leave_what_the_reference_leaves_and_draws_are_its_own(
    sizes: str, vocabulary: int, limits: tuple, request: pytest.FixtureRequest
):
    if sizes == "small":
        request.getfixturevalue("small_sizes")
    logits = random_logits(vocabulary)
    logits[:3] *= 0.01
    logits[3:6] = logits[3:6].bfloat16().float()  # many equal ones
    temperatures = torch.tensor([0.3, 1.0, 2.5, 1e-5]).repeat(ROWS // 4)
    require_equal(logits, temperatures, limits_of(ROWS, *limits))
    require_equal_draws(logits, temperatures, limits_of(ROWS, *limits), each=4)


def test_usual_filters_of_a_large_vocabulary_need_few_candidates():
    logits = random_logits(20_000, rows=4)
    logits[2:, :3000] += 4  # likely tokens have neighbouring ids
    for limits in [(20, 0.8, 0.0), (1, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.02)]:
        its = limits_of(4, *limits)
        left, counts = left_of(logits, torch.full((4,), 0.7), its)
        assert (counts > 0).all()
        assert (counts >= left.sum(1)).all()
        require_equal(logits, torch.full((4,), 0.7), its)
    require_equal_draws(logits, torch.full((4,), 0.7), limits_of(4, 20, 0.8), each=3)


@pytest.mark.usefixtures("small_sizes")
def test_candidates_that_are_collected_in_any_order_give_the_same_draws(request: pytest.FixtureRequest):
    logits, temperatures = random_logits(300), torch.tensor([0.5, 1.0]).repeat(ROWS // 2)
    draws = torch.linspace(0, 0.99, ROWS, dtype=torch.float64)
    drawn = logits, logits, temperatures, draws, torch.arange(ROWS), limits_of(ROWS, 9, 0.9)
    in_order = sampling.draw_tokens(*drawn)
    request.getfixturevalue("any_order")
    for _ in range(3):
        assert all(map(torch.equal, sampling.draw_tokens(*drawn), in_order))


def test_more_candidates_than_there_is_room_for_are_all_searched():
    logits = random_logits(9000, rows=2) / 100
    temperatures = torch.tensor([1.0, 2.0])
    for its in (limits_of(2, top_p=0.9), limits_of(2, top_k=5000), limits_of(2, min_p=0.9)):
        assert left_of(logits, temperatures, its)[1].tolist() == [0, 0]
        require_equal(logits, temperatures, its)
    require_equal_draws(logits, temperatures, limits_of(2, top_p=0.9), each=4)


@pytest.mark.usefixtures("small_sizes")
def test_filtered_and_greedy_rows_stand_beside_others():
    logits, temperatures = random_logits(300), torch.tensor([0.0, 1.0]).repeat(ROWS // 2)
    top_ks = torch.tensor([0, 0, 0, 5, 5, 0, 200, 200])
    filtered = (top_ks > 0).nonzero()[:, 0]
    its = Filters(filtered, top_ks, torch.ones(ROWS), torch.zeros(ROWS))
    require_equal_draws(logits, temperatures, its, each=8)


def test_logits_are_read_in_half_precision_as_they_are():
    """They and what is drawn from may differ in their dtype, as penalties make it float32."""
    logits, rows = random_logits(300).half(), torch.arange(ROWS)
    given = torch.full((ROWS,), 0.8), torch.linspace(0, 0.99, ROWS, dtype=torch.float64), rows
    for its in (None, limits_of(ROWS, 20, 0.8)):
        ids, log_probabilities = sampling.draw_tokens(logits, logits, *given, its)
        for candidates in (logits, logits.float()):
            others = sampling.draw_tokens(logits.float(), candidates, *given, its)
            assert torch.equal(ids, others[0])
            assert torch.equal(log_probabilities, others[1])


@pytest.mark.usefixtures("small_sizes")
def test_any_rank_is_found_among_candidates_or_among_all_tokens():
    top_ks = torch.tensor([6, 7, 20, 31, 32, 33, 47])
    logits = random_logits(200)[0].expand(len(top_ks), -1).contiguous()
    its = limits_of(len(top_ks))._replace(top_ks=top_ks)
    left, counts = left_of(logits, torch.ones(len(top_ks)), its)
    assert torch.equal(left.sum(1), top_ks)
    assert set((counts > 0).tolist()) == {True, False}
    require_equal(logits, torch.ones(len(top_ks)), its)


def test_a_vocabulary_of_one_token_keeps_it():
    its = limits_of(1, 5, 0.1, 1.0)
    assert left_of(torch.ones(1, 1), torch.ones(1), its)[0].tolist() == [[True]]
    drawn = torch.ones(1, 1), torch.ones(1, 1), torch.ones(1), torch.zeros(1, dtype=torch.float64), torch.arange(1)
    assert sampling.draw_tokens(*drawn, its)[0].tolist() == [0]


@pytest.mark.usefixtures("small_sizes")
def test_of_equal_logits_those_with_the_lowest_ids_are_left():
    logits = torch.zeros(2, 1300)
    logits[:, [1250, 20, 100, 31]] = 4.0
    left, _ = left_of(logits, torch.ones(2), limits_of(2)._replace(top_ks=torch.tensor([3, 6])))
    assert [row.nonzero()[:, 0].tolist() for row in left] == [[20, 31, 100], [0, 1, 20, 31, 100, 1250]]


@pytest.mark.usefixtures("small_sizes")
def test_negative_logits_and_zeros_of_either_sign_are_in_order():
    logits = torch.tensor([[-1.0, -0.0, 0.0, -3.0, 2.0, -2.0]])
    left, _ = left_of(logits, torch.ones(1), limits_of(1, 4))
    assert left[0].nonzero()[:, 0].tolist() == [0, 1, 2, 4]


@triton.jit
def weights_of_all(keys, counts, results):
    row = tl.program_id(0)
    _, _, weight = filters.held_candidates(keys, row, tl.load(counts + row), 25.0, 1.0)
    tl.store(results + row, tl.sum(weight, 0))


def test_weights_of_candidates_have_the_same_sum_in_any_order():
    """They are collected in the order in which programs come to them, and a limit must not depend on it."""
    size, generator = 1500, torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(size, generator=generator)
    bits = logits.view(torch.int32)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31) * 2**24 + torch.arange(size)
    orders = torch.zeros(8, filters.CANDIDATES.value, dtype=torch.int64)
    for order in orders:
        order[:size] = keys[torch.randperm(size, generator=generator)]
    results = torch.empty(8, dtype=torch.int64)
    weights_of_all[(8,)](orders, torch.full((8,), size, dtype=torch.int32), results)
    assert results.unique().numel() == 1
    expected = torch.exp(logits - 25).double().sum() * 2**44
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-6, atol=0)
