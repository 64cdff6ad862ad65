"""Every other kernel under Triton's interpreter, against the reference in torch."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from paged_batch import paged_problem

from espalier.kernels import attention as torch_attention
from espalier.kernels import layout as torch_layout
from espalier.kernels.layers import Activation, rms_norm
from espalier.kernels.layout import KVLayout
from espalier.kernels.linear import GroupedLinear, Linear
from espalier.kernels.rotary import apply_rotary, inverse_frequencies, rotary_table
from espalier.kernels.triton.cache import TokenMajorLayout, copy_blocks, norm_rotate_write, write_heads
from espalier.kernels.triton.linear import StackedLinear
from espalier.kernels.triton.pointwise import add_norm, gated
from espalier.kernels.triton.steps import fetch, places_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3}[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("size", [1, 40, 256])
def test_norm_of_the_residual_stream_equals_torchs(size: int, dtype: torch.dtype):
    hidden, added, weight = (
        rand(3, size, dtype=dtype),
        rand(3, size, dtype=dtype, seed=1),
        rand(size, dtype=dtype, seed=2),
    )
    total = hidden + added
    close(add_norm(hidden.clone(), None, weight, 1e-6), F.rms_norm(hidden, (size,), weight, 1e-6))
    close(add_norm(hidden, added, weight, 1e-6), F.rms_norm(total, (size,), weight, 1e-6))
    assert torch.equal(hidden, total)
    factors = rand(size, seed=3)  # in float32, whatever the dtype of what it is applied to
    total = hidden + rms_norm(added, factors, 1e-6)
    close(add_norm(hidden, added, factors, 1e-6, factors), rms_norm(total, factors, 1e-6))
    close(hidden, total)


@DTYPES
@pytest.mark.parametrize("inner", [1, 50, 1100])
def test_the_gated_product_equals_torchs(inner: int, dtype: torch.dtype):
    gate_up = 4 * rand(3, 2 * inner, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    close(gated(gate_up), F.silu(gate) * up)
    close(gated(gate_up, Activation.GELU_TANH), F.gelu(gate, approximate="tanh") * up)


@DTYPES
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 80), (3, 3, 8), (7, 1, 128)])
def test_queries_are_rotated_and_keys_and_values_written(
    heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
):
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "kind": TokenMajorLayout, "dtype": dtype}
    problem = paged_problem([(40, 5), (17, 1), (3, 3)], **sizes)
    positions = torch.tensor([*range(35, 40), 16, 0, 1, 2])
    sequences = problem.batch.row_sequences.tolist()
    blocks = torch.stack(
        [problem.batch.block_tables[s, p // 16] for s, p in zip(sequences, positions, strict=True)]
    ).long()
    written = torch.tensor([0, 1, 3, 4, 5, 6, 7, 8])  # row 2 is only computed again
    slots = problem.layout.blocks_per_slab
    batch = dataclasses.replace(
        problem.batch,
        write_slabs=blocks[written] // slots,
        write_slots=blocks[written] % slots,
        write_offsets=positions[written] % 16,
        write_rows=written,
    )
    qkv = rand(9, heads + 2 * kv_heads, head_dim, dtype=dtype)
    norms = (rand(head_dim, dtype=dtype, seed=3), rand(head_dim, dtype=dtype, seed=4)) if normed else None
    cos, sin = rotary_table(inverse_frequencies(head_dim, 1e4, None), positions, 1.1)
    expected_kv = dataclasses.replace(
        problem.layer_kv, keys=problem.layer_kv.keys.clone(), values=problem.layer_kv.values.clone()
    )
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if norms:
        query, key = (F.rms_norm(x, (head_dim,), w, 1e-6) for x, w in zip((query, key), norms, strict=True))
    torch_attention.write_kv(expected_kv, apply_rotary(key, cos, sin), value, batch)

    places = torch.from_numpy(places_of(batch, problem.layer_kv, 9))
    found = norm_rotate_write(qkv, cos, sin, norms, 1e-6, places, problem.layer_kv)
    close(found, apply_rotary(query, cos, sin))
    for one, other in ((problem.layer_kv.keys, expected_kv.keys), (problem.layer_kv.values, expected_kv.values)):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=2e-3, atol=2e-3)
    assert torch.equal(problem.layer_kv.values.nan_to_num(), expected_kv.values.nan_to_num())


@pytest.mark.parametrize("kind", [KVLayout, TokenMajorLayout])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_dim", [0, 3])
def test_whole_blocks_are_copied_and_nothing_else_is_touched(kind: type[KVLayout], dtype: torch.dtype, value_dim: int):
    layout = kind(3, 2, 4, 5, dtype, slab_bytes=3 * 3 * 2 * 2 * 4 * 5 * dtype.itemsize + 64, value_dim=value_dim)
    pool = torch.randint(
        0, 255, (4 * layout.slab_bytes,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    expected = pool.clone()
    torch_layout.copy_blocks(layout, expected, [0, 7, 11], [10, 2, 1])
    copy_blocks(layout, pool, [0, 7, 11], [10, 2, 1])
    assert torch.equal(pool, expected)
    copy_blocks(layout, pool, [], [])
    assert torch.equal(pool, expected)


def test_results_come_back_in_one_copy_bit_for_bit():
    results = [
        torch.tensor([5, 2**40, -1]),
        torch.tensor([-0.5, float("nan"), 1e-30]),
        torch.rand(2, 3),
        torch.rand(4, 2)[:, 1:],
        torch.empty(0, 1),
    ]
    for one, other in zip(fetch(results)(), results, strict=True):
        assert one.dtype == other.numpy().dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.numpy().tobytes()
    assert [array.size for array in fetch([torch.empty(0), torch.empty(0)])()] == [0, 0]


@DTYPES
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("counts", [(0, 3, 0, 70, 1), (1, 0, 0, 0, 0), (200, 0, 17, 16, 64)], ids=str)
def test_products_of_experts_equal_torchs_and_rows_beyond_them_are_zero(
    counts: tuple[int, ...], biased: bool, dtype: torch.dtype
):
    products = [
        Linear(rand(50, 70, dtype=dtype, seed=e), rand(50, dtype=dtype, seed=9 + e) if biased else None)
        for e in range(len(counts))
    ]
    ends = torch.tensor(counts).cumsum(0)
    x = rand(sum(counts) + 2, 70, dtype=dtype, seed=20)
    found, expected = StackedLinear(products, fixed=False)(x, ends), GroupedLinear(products)(x, ends)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 if dtype == torch.float32 else 3e-2)
    assert not found[-2:].any()


@pytest.mark.usefixtures("products_row_by_row")
def test_with_fixed_tiles_a_row_of_an_expert_has_the_same_bits_in_any_company():
    product = StackedLinear([Linear(rand(50, 70, seed=e), rand(50, seed=9 + e)) for e in range(3)], fixed=True)
    x = rand(90, 70, seed=20)
    alone = product(x[40:41], torch.tensor([0, 1, 1]))
    assert torch.equal(product(x, torch.tensor([31, 80, 90]))[40:41], alone)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (24, 12), (8, 20)])
def test_written_keys_and_values_equal_torchs(head_dim: int, value_dim: int):
    problem = paged_problem(
        [(9, 9)], heads=3, kv_heads=3, head_dim=head_dim, value_dim=value_dim, block_size=4, kind=TokenMajorLayout
    )
    blocks = problem.batch.block_tables[0, torch.arange(9) // 4].long()
    slots = problem.layout.blocks_per_slab
    write = {"write_slabs": blocks // slots, "write_slots": blocks % slots, "write_offsets": torch.arange(9) % 4}
    batch = dataclasses.replace(problem.batch, **write, write_rows=torch.arange(9)[1:])
    batch = dataclasses.replace(batch, **{name: places[1:] for name, places in write.items()})
    key, value = rand(3, 11, head_dim).transpose(0, 1), rand(3, 11, value_dim, seed=1).transpose(0, 1)  # two fill up
    before = [states.clone() for states in (problem.layer_kv.keys, problem.layer_kv.values)]
    expected = dataclasses.replace(problem.layer_kv, keys=before[0], values=before[1])
    torch_attention.write_kv(expected, key[:9], value[:9], batch)
    write_heads(key, value, torch.from_numpy(places_of(batch, problem.layer_kv, 9)), problem.layer_kv)
    for found, wanted in ((problem.layer_kv.keys, expected.keys), (problem.layer_kv.values, expected.values)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
