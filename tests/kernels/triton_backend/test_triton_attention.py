"""Triton's attention under its interpreter, against the textbook in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from paged_batch import (
    PagedProblem,
    dense_attention,
    give_up_passed_blocks,
    paged_problem,
    share_leading_blocks,
)

from espalier.kernels.attention import Terms
from espalier.kernels.layers import UnsupportedShapeError
from espalier.kernels.triton.attention import DevicePlan, attend, rows_of_tiles, tiles_of
from espalier.kernels.triton.cache import TokenMajorLayout
from espalier.kernels.triton.plan import FIELDS, AttentionPlan, Costs, Cut, Planner, plan_attention

SMALL = Costs(processors=1, wide_cost=1.0)
"""A device on which reading less is always faster."""
LARGE = Costs(processors=10**6, wide_cost=2.0)
"""One with room for all items at once, where a wide one only takes longer."""
ODD_BATCHES = {
    "one token": [(1, 1)],
    "decode at the ends of blocks and tiles": [(15, 1), (16, 1), (17, 1), (63, 1), (64, 1), (65, 1), (129, 1)],
    "prefill": [(1, 1), (63, 63), (129, 129)],
    "all at once": [(40, 40), (7, 1), (65, 1), (3, 3), (100, 17), (130, 2)],
}


def plan_of(
    problem: PagedProblem,
    window: int | None = None,
    chunk: int | None = 64,
    costs: Costs = SMALL,
    fixed_tiles: bool = False,
) -> AttentionPlan:
    layout, heads = problem.layout, problem.query.shape[1]
    batch = problem.batch
    starts, contexts, tables = (x.numpy() for x in (batch.query_starts, batch.context_lengths, batch.block_tables))
    tiles = tiles_of(layout.head_dim, layout.head_dim, problem.query.element_size())
    tiles = rows_of_tiles(heads // layout.num_kv_heads, tiles, fixed=fixed_tiles)
    sizes = layout.block_size, layout.num_kv_heads, *tiles
    return plan_attention(starts, contexts, tables, *sizes, costs, window=window, chunk=chunk)


def on_device(plan: AttentionPlan, blocks: int) -> DevicePlan:
    sizes = np.array([len(plan.narrow), blocks, len(plan.wide), blocks], np.int32)
    arrays = (plan.narrow, plan.wide, sizes, plan.rows, plan.merge_starts, plan.merges)
    narrow, wide, sizes, rows, starts, merges = map(torch.from_numpy, arrays)
    counters = torch.zeros(8 * len(plan.merge_starts), dtype=torch.int32)
    return DevicePlan(narrow, wide, sizes, rows, starts, merges, counters, plan.partials, programs=3)


def rows_of(plan: AttentionPlan) -> list[tuple[list[int], list[int]]]:
    """Each work item, and its rows."""
    items = np.concatenate([plan.narrow, plan.wide]).tolist()
    return [(item, item[:1] if item[1] == 1 else plan.rows[item[0] : item[0] + item[1]].tolist()) for item in items]


def positions_of(problem: PagedProblem) -> torch.Tensor:
    starts, contexts = problem.batch.query_starts.tolist(), problem.batch.context_lengths.tolist()
    each = [torch.arange(c - (e - s), c) for c, s, e in zip(contexts, starts, starts[1:], strict=False)]
    return torch.cat(each).int()


def attended(
    problem: PagedProblem, plan: AttentionPlan, scale: float = 0.2, window: int | None = None, **terms: Any
) -> torch.Tensor:
    tables = problem.batch.block_tables
    placed = on_device(plan, tables.shape[1])
    read = problem.query, problem.layer_kv, placed, positions_of(problem), tables
    output = attend(*read, Terms(scale, window, **terms))
    assert not placed.counters.any()
    return output


def forest(groups: int = 1) -> list[tuple[int, int]]:
    """Two families and a stranger: see `plant`. With `groups` query heads to a KV head, one takes two wide tiles."""
    return [(150, 1), (141, 1), (200, 9), (143, 1), (20, 1), (170, 2), (195, 1), (131, -(-67 // groups)), (137, 1)]


def plant(problem: PagedProblem) -> PagedProblem:
    """Let sequences of `forest` share blocks: siblings that part at any depth, not side by side, from two roots."""
    for sequence, other, blocks in [(2, 0, 8), (3, 1, 8), (6, 0, 4), (5, 1, 8), (8, 2, 8)]:
        share_leading_blocks(problem, sequence, other, blocks)
    return problem


@pytest.mark.parametrize("sequences", ODD_BATCHES.values(), ids=ODD_BATCHES.keys())
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (6, 1, 80)])
def test_attention_equals_dense_attention(sequences, heads: int, kv_heads: int, head_dim: int):
    problem = paged_problem(sequences, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kind=TokenMajorLayout)
    output = attended(problem, plan_of(problem))
    torch.testing.assert_close(output, dense_attention(problem, 0.2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "head_dim", "dtype"),
    [
        *((groups, dim, torch.float32) for groups, dim in [(1, 128), (6, 96), (7, 64)]),
        *((groups, dim, torch.float16) for groups, dim in [(3, 32), (4, 128)]),
        *(pytest.param(*case, torch.float32, marks=pytest.mark.slow) for case in [(2, 64), (4, 128), (8, 80)]),
        pytest.param(7, 64, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention_over_shared_blocks_equals_dense_attention(groups: int, head_dim: int, dtype: torch.dtype):
    problem = plant(
        paged_problem(forest(groups), heads=groups, kv_heads=1, head_dim=head_dim, kind=TokenMajorLayout, dtype=dtype)
    )
    plan = plan_of(problem)
    assert plan.partials
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    expected = dense_attention(problem, head_dim**-0.5)
    torch.testing.assert_close(
        attended(problem, plan, head_dim**-0.5).float(), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(
    ("softcap", "sinks", "window", "chunk"),
    [
        pytest.param(softcap, sinks, window, chunk, marks=() if (i + j + k) % 2 else pytest.mark.slow)
        for i, (softcap, sinks) in enumerate([(None, True), (0.7, False), (30.0, True)])
        for j, window in enumerate([None, 9])
        for k, chunk in enumerate([64, 512])
    ],
)
def test_caps_and_sinks_take_part_once_in_each_row(softcap: float | None, sinks: bool, window: int | None, chunk: int):
    problem = plant(paged_problem(forest(), heads=6, kv_heads=3, head_dim=24, kind=TokenMajorLayout))
    terms = {"softcap": softcap, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0, 9.0, -9.0]) if sinks else None}
    plan = plan_of(problem, window, chunk, LARGE)
    assert window or bool(plan.partials) == (chunk == 64)
    expected = dense_attention(problem, 0.4, window, **terms)
    torch.testing.assert_close(attended(problem, plan, 0.4, window, **terms), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 12), (8, 40), (96, 64)])
def test_values_narrower_or_wider_than_keys(head_dim: int, value_dim: int):
    problem = plant(
        paged_problem(forest(), heads=6, kv_heads=3, head_dim=head_dim, value_dim=value_dim, kind=TokenMajorLayout)
    )
    output = attended(problem, plan_of(problem))
    assert output.shape == (len(problem.query), 6, value_dim)
    torch.testing.assert_close(output, dense_attention(problem, 0.2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [17, 20, 33, 64])
def test_more_query_heads_to_a_kv_head_than_a_narrow_tile_has_rows_take_wide_ones(groups: int):
    problem = paged_problem([(70, 1), (5, 5), (1, 1)], heads=groups, kv_heads=1, head_dim=16, kind=TokenMajorLayout)
    plan = plan_of(problem)
    assert not len(plan.narrow)
    torch.testing.assert_close(attended(problem, plan), dense_attention(problem, 0.2), rtol=1e-5, atol=1e-5)


def test_more_query_heads_to_a_kv_head_than_a_wide_tile_has_rows_are_refused():
    with pytest.raises(UnsupportedShapeError, match="65 query heads"):
        rows_of_tiles(65)


@pytest.mark.parametrize(
    ("window", "block_size"),
    [
        *((1, 16), (7, 4), (7, 64), (64, 64), (100, 16)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(7, 16), (64, 4), (100, 64)]),
    ],
)
def test_a_window_may_be_shorter_than_a_block_and_begin_inside_a_shared_one(window: int, block_size: int):
    problem = paged_problem(forest(2), heads=4, kv_heads=2, head_dim=32, block_size=block_size, kind=TokenMajorLayout)
    share_leading_blocks(problem, 2, 0, 128 // block_size)
    share_leading_blocks(problem, 3, 1, 64 // block_size)
    output = attended(problem, plan_of(problem, window=window), window=window)
    torch.testing.assert_close(output, dense_attention(problem, 0.2, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "block_size"),
    [
        pytest.param(window, block_size, marks=() if (i + j) % 2 else pytest.mark.slow)
        for i, window in enumerate([1, 7, 64, 100])
        for j, block_size in enumerate([4, 16, 64])
    ],
)
def test_blocks_behind_all_windows_may_be_gone(window: int, block_size: int):
    problem = paged_problem(forest(2), heads=4, kv_heads=2, head_dim=32, block_size=block_size, kind=TokenMajorLayout)
    for sequence, other, blocks in [(2, 0, 128), (3, 1, 128), (8, 2, 128)]:
        share_leading_blocks(problem, sequence, other, blocks // block_size)
    expected = dense_attention(problem, 0.2, window)
    give_up_passed_blocks(problem, window)
    assert (problem.batch.block_tables < 0).any()
    output = attended(problem, plan_of(problem, window=window), window=window)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("products_row_by_row")
def test_a_row_has_the_same_bits_alone_and_beside_its_siblings():
    problem = plant(paged_problem(forest(2), heads=4, kv_heads=2, head_dim=32, kind=TokenMajorLayout))
    shared, unshared = (plan_of(problem, costs=costs, fixed_tiles=True) for costs in (SMALL, LARGE))
    assert len(shared.wide) < len(unshared.wide)
    assert torch.equal(attended(problem, shared), attended(problem, unshared))


@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize("costs", [SMALL, LARGE], ids=["small", "large"])
def test_partial_results_have_the_same_sums_whichever_program_is_last(costs: Costs, request: pytest.FixtureRequest):
    """The program that ends last merges, be it of a narrow or of a wide item; what it reads is all written by then."""
    problem = plant(paged_problem(forest(3), heads=6, kv_heads=2, head_dim=24, kind=TokenMajorLayout))
    plan = plan_of(problem, costs=costs)
    assert np.diff(plan.merge_starts).max() > 1
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0, 9.0, -9.0])
    in_order = attended(problem, plan, sinks=sinks)
    request.getfixturevalue("any_order")
    for _ in range(4):
        assert torch.equal(attended(problem, plan, sinks=sinks), in_order)


def test_a_row_with_one_partial_result_is_written_beside_rows_with_several():
    """An item keeps the partial results of all of its rows if it does of one."""
    problem = paged_problem([(40, 1), (140, 1)], heads=2, kv_heads=1, head_dim=16, kind=TokenMajorLayout)
    share_leading_blocks(problem, 1, 0, 2)
    rows, positions = np.array([0, 1], np.int32), np.empty((0, FIELDS), np.int32)
    items = np.array([[0, 2, 0, 0, 32, 0], [0, 1, 0, 32, 2**30, 2], [1, 1, 1, 32, 2**30, 3]], np.int32)
    merges = np.array([0, 2, 1, 3], np.int32)
    plan = AttentionPlan(items, positions, rows, np.array([0, 2, 4], np.int32), merges, 4, Cut(64, True), 0.0)
    torch.testing.assert_close(attended(problem, plan), dense_attention(problem, 0.2), rtol=1e-5, atol=1e-5)
    whole = np.array([[0, 1, 0, 0, 2**30, 0], [1, 1, 1, 0, 2**30, 1]], np.int32)
    one_each = plan._replace(narrow=whole, merge_starts=np.arange(3, dtype=np.int32), merges=rows, partials=2)
    torch.testing.assert_close(attended(problem, one_each), dense_attention(problem, 0.2), rtol=1e-5, atol=1e-5)


# What the plan says, without running a kernel.


def reads_of(problem: PagedProblem, plan: AttentionPlan) -> dict[tuple[int, int], int]:
    """How often each (row, position) that the row may see is read for it."""
    positions = positions_of(problem).tolist()
    times: dict[tuple[int, int], int] = {}
    for (_, _, _, start, end, _), rows in rows_of(plan):
        for row in rows:
            for position in range(start, min(end, positions[row] + 1)):
                times[row, position] = times.get((row, position), 0) + 1
    return times


@pytest.mark.parametrize("chunk", [64, 128, 256, None])
@pytest.mark.parametrize("costs", [SMALL, LARGE], ids=["small", "large"])
def test_every_position_that_a_row_sees_is_read_for_it_once_from_its_own_blocks(chunk: int | None, costs: Costs):
    problem = plant(paged_problem(forest(), kind=TokenMajorLayout))
    plan = plan_of(problem, chunk=chunk, costs=costs)
    positions = positions_of(problem).tolist()
    times = reads_of(problem, plan)
    assert times == {(row, p): 1 for row, last in enumerate(positions) for p in range(last + 1)}
    tables, of_row = problem.batch.block_tables, problem.batch.row_sequences.tolist()
    for (_, _, table, start, end, _), rows in rows_of(plan):
        for row in rows:
            blocks = slice(start // 16, -(-min(end, positions[row] + 1) // 16))
            assert torch.equal(tables[table, blocks], tables[of_row[row], blocks])


def test_partial_results_are_merged_in_the_order_of_positions_and_each_once():
    problem = plant(paged_problem(forest(), kind=TokenMajorLayout))
    plan = plan_of(problem)
    place = {}
    for (_, _, _, start, _, partial), rows in rows_of(plan):
        for index, row in enumerate(rows if partial >= 0 else []):
            place[partial + index] = row, start
    assert sorted(place) == sorted(plan.merges.tolist()) == list(range(plan.partials))
    for row in range(len(plan.merge_starts) - 1):
        merged = [place[p] for p in plan.merges[plan.merge_starts[row] : plan.merge_starts[row + 1]].tolist()]
        assert merged == sorted(merged)
        assert {r for r, _ in merged} <= {row}


def test_what_siblings_share_is_read_once_where_that_pays_and_only_there():
    problem = paged_problem([(300, 1)] * 8, heads=8, kv_heads=2, kind=TokenMajorLayout)
    for sequence in range(1, 8):
        share_leading_blocks(problem, sequence, 0, 16)

    def positions_read(costs: Costs) -> int:
        plan = plan_of(problem, costs=costs)
        return sum(int((items[:, 4].clip(max=300) - items[:, 3]).sum()) for items in (plan.narrow, plan.wide))

    assert positions_read(SMALL) == 256 + 8 * (300 - 256)
    assert positions_read(LARGE) == 8 * 300


def test_chunks_are_small_where_few_rows_must_keep_a_device_busy_and_large_where_many_do():
    def longest(rows: int) -> int:
        problem = paged_problem([(2048, 1)] * rows, heads=2, kv_heads=2, head_dim=8, kind=TokenMajorLayout)
        plan = plan_of(problem, chunk=None, costs=Costs(processors=8))
        return int((plan.narrow[:, 4].clip(max=2048) - plan.narrow[:, 3]).max())

    assert longest(1) <= 256
    assert longest(16) == 2048


@pytest.mark.parametrize(
    ("groups", "children", "prompt", "own", "shares"),
    [
        (4, 16, 208, 200, False),  # us a layer on an H200, of a model of 1.5B: 13 read by each, 22 shared
        (1, 64, 450, 48, False),  # 13, 20 to 23
        (32, 16, 400, 100, True),  # 73, 57
        (1, 64, 4096, 64, True),  # 74, 32 in portions of 256 (42 in those of 128)
    ],
)
def test_blocks_are_read_together_where_a_card_was_faster_so(
    groups: int, children: int, prompt: int, own: int, shares: bool
):
    rows, blocks, common = groups * children, -(-(prompt + own) // 16), prompt // 16
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    tables[:, :common] = tables[::children, :common].repeat(children, axis=0)
    starts, contexts = np.arange(rows + 1, dtype=np.int32), np.full(rows, prompt + own, np.int32)
    plan = plan_attention(starts, contexts, tables, 16, 2, *rows_of_tiles(6), Costs(processors=132))
    assert bool(len(plan.wide)) == shares
    assert np.diff(plan.merge_starts).max() < 20


@pytest.mark.parametrize(("chunk", "holds"), [(None, 128), (64, 6)], ids=["any portions", "portions of 64"])
def test_a_plan_holds_while_the_same_sequences_decode_and_not_far_beyond_a_portion_or_a_copied_block(
    chunk: int | None, holds: int
):
    planner = Planner(16, 2, rows_of_tiles(2), SMALL, [None], chunk)
    contexts = np.array([250, 300, 40], np.int32)
    tables = np.arange(3 * 32, dtype=np.int32).reshape(3, 32)
    starts = np.arange(4, dtype=np.int32)
    plans = planner.plan(starts, contexts, [tables])
    for grown in range(holds + 1):
        assert planner.plan(starts, contexts + grown, [tables.copy()]) is plans
    contexts += holds + 1
    beyond = planner.plan(starts, contexts, [tables])
    assert beyond is not plans
    assert planner.plan(starts, contexts + 1, [tables]) is beyond
    copied = tables.copy()
    copied[2, 2] = 99
    other = planner.plan(starts, contexts + 1, [copied])
    assert other is not beyond
    assert planner.plan(starts[:3], contexts[:2] + 1, [copied[:2]]) is not other


def test_attention_by_a_plan_of_earlier_steps_equals_dense_attention():
    """The last portion of each sequence has no end, and what was shared still is."""

    def grown_by(tokens: int) -> PagedProblem:
        sequences = [(context + tokens, 1) for context in (250, 300, 141, 290)]
        problem = paged_problem(sequences, heads=2, kv_heads=1, kind=TokenMajorLayout)
        for sequence in (1, 3):
            share_leading_blocks(problem, sequence, 0, 10)
        return problem

    plan = plan_of(grown_by(0), chunk=None)
    assert np.diff(plan.merge_starts).max() > 1
    later = grown_by(100)
    torch.testing.assert_close(attended(later, plan), dense_attention(later, 0.2), rtol=1e-5, atol=1e-5)


def test_a_plan_of_other_rows_is_cut_as_the_last_one_while_there_are_about_as_many(monkeypatch: pytest.MonkeyPatch):
    """Choosing a cut takes up to eight plans; steps in which a row comes or goes take one."""
    given = []

    def recording(*arguments: Any) -> AttentionPlan:
        given.append(arguments[-1])
        return plan_attention(*arguments)

    monkeypatch.setattr("espalier.kernels.triton.plan.plan_attention", recording)
    planner = Planner(16, 2, rows_of_tiles(2), Costs(), [None], None)
    tables = np.arange(64 * 32, dtype=np.int32).reshape(64, 32)

    def cut_for(rows: int) -> Cut | None:
        planner.plan(np.arange(rows + 1, dtype=np.int32), np.full(rows, 300, np.int32), [tables[:rows]])
        return given[-1]

    assert cut_for(40) is None
    assert isinstance(cut_for(41), Cut)
    assert isinstance(cut_for(39), Cut)
    assert cut_for(60) is None, "far more rows may be better cut in another way"
    assert [cut_for(rows) is None for rows in (59, 60) * 20].count(True) == 1, "kept for some steps"


def test_a_plan_with_a_window_is_made_anew_each_step():
    planner = Planner(16, 2, rows_of_tiles(2), SMALL, [None, 64], None)
    arguments = np.arange(2, dtype=np.int32), np.array([250], np.int32), [np.arange(20, dtype=np.int32)[None]] * 2
    assert planner.plan(*arguments) is not planner.plan(*arguments)
