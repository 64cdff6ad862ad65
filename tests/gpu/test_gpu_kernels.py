"""Kernels at real sizes beside the CPU's float32; imports nothing above `kernels`."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# (what tests share lies elsewhere, and arguments come as lists)

import numpy as np
import pytest
import torch
from on_gpu import DEVICE, error, moved
from paged_batch import dense_attention, paged_problem, share_leading_blocks

from espalier.kernels.layout import LayerKV
from espalier.kernels.triton.cache import TokenMajorLayout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(12, 2, 128), (28, 4, 128), (32, 8, 64), (32, 8, 80), (40, 2, 128), (64, 1, 64)]
)
@pytest.mark.parametrize("window", [None, 100])
def test_attention_at_real_sizes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None):
    from espalier.kernels.attention import Terms
    from espalier.kernels.triton.attention import DevicePlan, attend, rows_of_tiles
    from espalier.kernels.triton.plan import Costs, plan_attention

    sequences = [(1100, 1)] * 12 + [(700, 20), (65, 65), (1, 1), (900, 1)]
    problem = paged_problem(
        sequences, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kind=TokenMajorLayout, dtype=dtype
    )
    for sequence in range(1, 12):
        share_leading_blocks(problem, sequence, 0, 32 if sequence % 2 else 64)
    batch = problem.batch
    arrays = [tensor.numpy() for tensor in (batch.query_starts, batch.context_lengths, batch.block_tables)]
    positions = torch.cat([torch.arange(c - n, c) for c, n in sequences]).int()
    expected = dense_attention(problem, head_dim**-0.5, window)
    tables = torch.where(batch.block_tables == 2**31 - 1, 0, batch.block_tables).to(DEVICE)
    layer_kv = LayerKV(*(moved(x) for x in (problem.layer_kv.keys, problem.layer_kv.values)))
    for costs in (Costs(processors=1), Costs(processors=10**6)):
        plan = plan_attention(*arrays, 16, kv_heads, *rows_of_tiles(heads // kv_heads), costs, window)
        blocks = tables.shape[1]
        sizes = np.array([len(plan.narrow), blocks, len(plan.wide), blocks], np.int32)
        parts = (plan.narrow, plan.wide, sizes, plan.rows, plan.merge_starts, plan.merges)
        counters = torch.zeros(len(positions) * kv_heads, dtype=torch.int32, device=DEVICE)
        on_device = DevicePlan(
            *(torch.from_numpy(part).to(DEVICE) for part in parts), counters, partials=plan.partials, programs=64
        )
        query = problem.query.to(DEVICE)
        found = attend(query, layer_kv, on_device, positions.to(DEVICE), tables, Terms(head_dim**-0.5, window))
        assert error(found, expected) < {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]


@pytest.mark.parametrize("vocabulary", [700, 32_000, 151_936])
def test_filters_and_draws_over_large_vocabularies(vocabulary: int):
    from espalier.kernels.sampling import Filters
    from espalier.kernels.torch_backend import TorchBackend
    from espalier.kernels.triton.sampling import draw_tokens

    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(32, vocabulary, generator=generator)
    logits[::2] = logits[::2].bfloat16().float()
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.5]).repeat(8)
    draws = torch.rand(64, generator=generator, dtype=torch.float64)
    rows = torch.arange(32).repeat_interleave(2)
    limits = torch.tensor([0, 1, 40, 5000]).repeat_interleave(8), torch.tensor([1.0, 0.9]).repeat(16), torch.zeros(32)
    filters = Filters(torch.arange(32), *limits)
    for dtype in (torch.float32, torch.bfloat16):
        given = logits.to(dtype)
        drawn = given, given, temperatures, draws, rows
        ids, log_probabilities = draw_tokens(*(x.to(DEVICE) for x in drawn), Filters(*(x.to(DEVICE) for x in filters)))
        expected_ids, expected_log = TorchBackend().draw_filtered(given.float(), given.float(), *drawn[2:], filters)
        same = ids.cpu() == expected_ids
        assert same.sum() >= 62
        assert error(log_probabilities[same.to(DEVICE)], expected_log[same]) < 1e-5
