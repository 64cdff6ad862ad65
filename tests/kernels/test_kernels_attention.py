import dataclasses
from typing import Any

import pytest
import torch
from paged_batch import (
    PagedProblem,
    dense_attention,
    give_up_passed_blocks,
    paged_attention_reference,
    paged_problem,
    share_leading_blocks,
)

from espalier.kernels import attention
from espalier.kernels.attention import GatheredAttention, Terms
from espalier.kernels.cpu.attention import paged as cpu_attention
from espalier.kernels.cpu.attention import spans
from espalier.kernels.cpu.attention.paged import CpuAttention
from espalier.kernels.layout import AttentionBatch, LayerKV

ODD_BATCHES = {
    "one token": [(1, 1)],
    "decode at block boundaries": [(15, 1), (16, 1), (17, 1), (31, 1), (32, 1), (33, 1)],
    "prefill at block boundaries": [(15, 15), (16, 16), (17, 17)],
    "prefill and decode": [(40, 40), (7, 1), (65, 1), (3, 3)],
    "chunks in the middle of prompts": [(29, 9), (50, 17), (16, 1)],
}


def paged_attention_cpu(
    query: torch.Tensor, layer_kv: LayerKV, batch: AttentionBatch, scale: float, window: int | None = None
) -> torch.Tensor:
    return CpuAttention(layer_kv, batch, query.shape[1])(query, layer_kv, Terms(scale, window))


def paged_attention_gathered(
    query: torch.Tensor, layer_kv: LayerKV, batch: AttentionBatch, scale: float, window: int | None = None
) -> torch.Tensor:
    return GatheredAttention(layer_kv, batch, query.shape[1])(query, layer_kv, Terms(scale, window))


def attend_one_row(problem: PagedProblem, row: int, window: int | None = None) -> torch.Tensor:
    """The CPU path's output of one token whose batch holds nothing else."""
    s = int(problem.batch.row_sequences[row])
    end = int(problem.batch.query_starts[s + 1])
    alone = dataclasses.replace(
        problem.batch,
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        row_sequences=torch.zeros(1, dtype=torch.int32),
        context_lengths=problem.batch.context_lengths[s : s + 1] - (end - 1 - row),
        block_tables=problem.batch.block_tables[s : s + 1],
    )
    return paged_attention_cpu(problem.query[row : row + 1], problem.layer_kv, alone, 0.2, window)[0]


@pytest.mark.parametrize("sequences", ODD_BATCHES.values(), ids=ODD_BATCHES.keys())
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_cpu_attention_equals_dense_attention(sequences: list[tuple[int, int]], groups: int):
    problem = paged_problem(sequences, heads=4, kv_heads=4 // groups)
    output = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2)
    torch.testing.assert_close(output, dense_attention(problem, 0.2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sequences", ODD_BATCHES.values(), ids=ODD_BATCHES.keys())
@pytest.mark.parametrize("attend", [paged_attention_reference, paged_attention_gathered])
def test_attention_in_torch_equals_dense_attention(attend, sequences: list[tuple[int, int]]):
    problem = paged_problem(sequences)
    output = attend(problem.query, problem.layer_kv, problem.batch, 0.2)
    torch.testing.assert_close(output, dense_attention(problem, 0.2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most", [1, 64 * 90, 4 * 40 * 4, 2**26])
@pytest.mark.parametrize("window", [None, 20])
def test_sequences_gathered_in_parts_of_any_size_attend_alike(most: int, window, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "_MAX_GATHERED", most)
    problem = family()
    output = paged_attention_gathered(problem.query, problem.layer_kv, problem.batch, 0.2, window)
    torch.testing.assert_close(output, dense_attention(problem, 0.2, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [8, 32, 64, 80])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_cpu_attention_equals_the_reference_at_any_head_and_block_size(head_dim: int, block_size: int):
    problem = paged_problem([(23, 23), (31, 1), (12, 5)], head_dim=head_dim, block_size=block_size)
    scale = head_dim**-0.5
    output = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, scale)
    expected = paged_attention_reference(problem.query, problem.layer_kv, problem.batch, scale)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_cpu_attention_holds_its_tolerance_for_flat_and_for_peaked_weights(size: float):
    problem = paged_problem([(70, 70)])
    problem.query *= size
    output = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2)
    torch.testing.assert_close(output, dense_attention(problem, 0.2), rtol=1e-5, atol=1e-5)


def test_a_token_attends_to_nothing_after_itself():
    problem = paged_problem([(20, 20)])
    before = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2)
    last_block = int(problem.batch.block_tables[0, 1])
    slots = problem.layout.blocks_per_slab
    for paged in (problem.layer_kv.keys, problem.layer_kv.values):
        paged[last_block // slots, last_block % slots, 3] = 1e15  # position 19
    after = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2)
    assert torch.equal(before[:19], after[:19])
    assert (after[19] != before[19]).all()


def test_a_row_has_the_same_bits_alone_and_in_company():
    problem = paged_problem([(37, 20), (5, 1), (64, 3), (16, 16)])
    together = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2)
    for row in range(len(together)):
        assert torch.equal(together[row], attend_one_row(problem, row)), f"row {row}"


def test_attention_in_torch_takes_other_dtypes():
    problem = paged_problem([(9, 4)])
    output = paged_attention_reference(problem.query, problem.layer_kv, problem.batch, 0.2)
    halved = LayerKV(problem.layer_kv.keys.bfloat16(), problem.layer_kv.values.bfloat16())
    halves = paged_attention_gathered(problem.query.bfloat16(), halved, problem.batch, 0.2)
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(halves.float(), output, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("kind", [CpuAttention, GatheredAttention])
def test_attention_that_was_prepared_serves_any_keys_values_and_window(kind: type):
    problem = family()
    attend = kind(problem.layer_kv, problem.batch, problem.query.shape[1])
    for window in (None, 20, None, 7):
        problem.layer_kv.keys.mul_(-0.9)
        problem.layer_kv.values.mul_(-0.9)
        output = attend(problem.query, problem.layer_kv, Terms(0.2, window))
        expected = paged_attention_reference(problem.query, problem.layer_kv, problem.batch, 0.2, window)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def family() -> PagedProblem:
    """Siblings that part after 1 to 5 blocks, some in pairs, one of another family, one amid its prompt."""
    problem = paged_problem([(90, 1), (81, 1), (96, 1), (83, 1), (20, 1), (40, 9), (95, 1), (82, 2)])
    for sequence, other, blocks in [(1, 0, 5), (2, 0, 3), (3, 2, 5), (6, 0, 1), (7, 6, 5)]:
        share_leading_blocks(problem, sequence, other, blocks)
    return problem


@pytest.mark.parametrize("chunk", [16, 48, 256])
@pytest.mark.parametrize("most_tokens", [1, 3, 8, 64])
def test_what_siblings_share_is_right_in_items_and_chunks_of_any_size(
    most_tokens: int, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu_attention, "TOKENS_PER_ITEM", most_tokens)
    monkeypatch.setattr(spans, "_CHUNK", chunk)
    problem = family()
    output = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2)
    torch.testing.assert_close(output, dense_attention(problem, 0.2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 16, 50])
@pytest.mark.parametrize("chunk", [32, 256])
def test_a_row_has_the_same_bits_alone_and_among_siblings(
    chunk: int, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spans, "_CHUNK", chunk)
    problem = family()
    together = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2, window)
    for row in range(len(together)):
        assert torch.equal(together[row], attend_one_row(problem, row, window)), f"row {row}"


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 64, 95, 96, 200])
@pytest.mark.parametrize("chunk", [16, 48, 256])
def test_a_token_sees_its_window_and_no_more(chunk: int, window: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "_CHUNK", chunk)
    problem = family()
    expected = dense_attention(problem, 0.2, window)
    for attend in (paged_attention_cpu, paged_attention_reference, paged_attention_gathered):
        output = attend(problem.query, problem.layer_kv, problem.batch, 0.2, window)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sequences", ODD_BATCHES.values(), ids=ODD_BATCHES.keys())
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 8), (12, 20), (32, 4)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_values_may_have_another_width_than_keys(
    sequences: list[tuple[int, int]], head_dim: int, value_dim: int, kv_heads: int
):
    problem = paged_problem(sequences, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    expected = dense_attention(problem, 0.2)
    assert expected.shape[-1] == value_dim
    for attend in (paged_attention_cpu, paged_attention_gathered):
        output = attend(problem.query, problem.layer_kv, problem.batch, 0.2)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 16, 33, 60])
@pytest.mark.parametrize("chunk", [16, 48, 256])
def test_blocks_behind_all_windows_may_be_gone(chunk: int, window: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "_CHUNK", chunk)
    problem = family()
    expected = dense_attention(problem, 0.2, window)
    whole = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2, window)
    give_up_passed_blocks(problem, window)
    assert (problem.batch.block_tables < 0).any()
    assert torch.equal(paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2, window), whole)
    output = paged_attention_gathered(problem.query, problem.layer_kv, problem.batch, 0.2, window)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for row in range(len(whole)):
        assert torch.equal(whole[row], attend_one_row(problem, row, window)), f"row {row}"


def test_chunks_that_every_token_has_passed_are_not_read():
    problem = paged_problem([(700, 1), (640, 3)])
    expected = dense_attention(problem, 0.2, 100)
    slots = problem.layout.blocks_per_slab
    for sequence in range(2):
        for block in problem.batch.block_tables[sequence, :16].tolist():
            problem.layer_kv.values[block // slots, block % slots] = float("nan")
    output = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2, 100)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_tokens_that_share_nothing_are_in_work_items_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "num_threads", lambda: 1)
    problem = family()
    found = spans.find_spans(problem.batch, 64, spans.geometry_of(problem.layer_kv, 4, 128))
    assert found.firsts.tolist() == [0, 4, 5, 14, 17], "siblings, a stranger, a prompt, other siblings"


@pytest.mark.parametrize("window", [None, 20])
def test_tokens_alone_read_all_kv_heads_of_a_block_together_where_they_are_many(
    window: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spans, "num_threads", lambda: 1)
    problem = paged_problem([(37, 1), (5, 1), (64, 2), (300, 1), (40, 9)])
    geometry = spans.geometry_of(problem.layer_kv, 4, 128)
    items = spans.find_spans(problem.batch, 64, geometry).items
    alone, eight_of_a_prompt, its_last = [[part, 0, 2] for part in range(4)], [[4, 0, 1], [4, 1, 1]], [[5, 0, 2]]
    assert items.tolist() == alone + eight_of_a_prompt + its_last
    together = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2, window)
    expected = paged_attention_reference(problem.query, problem.layer_kv, problem.batch, 0.2, window)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(spans, "_ITEMS_PER_THREAD", 100)
    apart = paged_attention_cpu(problem.query, problem.layer_kv, problem.batch, 0.2, window)
    assert torch.equal(together, apart)


def test_what_siblings_still_share_is_read_once_when_earlier_blocks_are_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "num_threads", lambda: 1)
    monkeypatch.setattr(spans, "_ITEMS_PER_THREAD", 1)
    problem = paged_problem([(90, 1)] * 4)
    share_leading_blocks(problem, 1, 0, 5)
    share_leading_blocks(problem, 3, 2, 5)
    give_up_passed_blocks(problem, window=40)
    found = spans.find_spans(problem.batch, 8, spans.geometry_of(problem.layer_kv, 4, 128))
    assert found.firsts.tolist() == [0, 2, 4], "each two siblings together, apart from the others"
    of_two = [[0, 2, 3, 2, 16], [0, 1, 5, 1, 10], [1, 1, 5, 1, 10]]
    assert found.spans.tolist() == of_two * 2


def test_siblings_read_a_shared_block_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "num_threads", lambda: 1)
    monkeypatch.setattr(spans, "_ITEMS_PER_THREAD", 1)
    problem = paged_problem([(90, 1)] * 8)
    for sequence in range(1, 8):
        share_leading_blocks(problem, sequence, 0, 5)
    geometry = spans.geometry_of(problem.layer_kv, 4, 128)
    found = spans.find_spans(problem.batch, 8, geometry)
    assert found.spans.tolist() == [[0, 8, 0, 5, 16], *([row, 1, 5, 1, 10] for row in range(8))]


@pytest.mark.parametrize("sequences", ODD_BATCHES.values(), ids=ODD_BATCHES.keys())
@pytest.mark.parametrize("kind", [CpuAttention, GatheredAttention])
@pytest.mark.parametrize("window", [None, 5])
def test_soft_caps_and_sinks_equal_those_of_dense_attention(kind, sequences: list[tuple[int, int]], window: int | None):
    problem = paged_problem(sequences, heads=4, kv_heads=2)
    sinks = torch.tensor([-1.0, 0.5, 3.0, 90.0])
    attend = kind(problem.layer_kv, problem.batch, 4)
    options: dict[str, Any]
    for options in ({"softcap": 1.5}, {"sinks": sinks}, {"softcap": 1.5, "sinks": sinks}):
        output = attend(problem.query, problem.layer_kv, Terms(0.2, window, **options))
        expected = dense_attention(problem, 0.2, window, **options)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
