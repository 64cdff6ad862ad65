import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.kernels.layout import KVLayout

shapes = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 4),
        "num_kv_heads": st.integers(1, 3),
        "head_dim": st.sampled_from([2, 8]),
        "value_dim": st.sampled_from([0, 2, 6]),
        "block_size": st.integers(1, 5),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    }
)


def block_bytes(shape: dict) -> int:
    return KVLayout(**shape, slab_bytes=2**40).block_bytes


@given(shapes, st.integers(1, 4), st.integers(0, 7))
def test_no_two_elements_of_a_model_share_a_byte_and_all_lie_in_their_slab(shape: dict, slots: int, spare: int):
    layout = KVLayout(**shape, slab_bytes=(slots * block_bytes(shape) + 8 * spare + 7) // 8 * 8)
    slabs, size = 3, layout.dtype.itemsize
    kv_pool = torch.zeros(slabs * layout.slab_bytes, dtype=torch.uint8)
    for layer in range(layout.num_layers):
        view = layout.layer_view(kv_pool, layer)
        view.keys.add_(1)
        view.values.add_(1)
    written = kv_pool.view(layout.dtype).view(slabs, -1)
    used = layout.blocks_per_slab * layout.block_bytes // size
    assert (written[:, :used] == 1).all(), "an element was written by two layers, or by none"
    assert (written[:, used:] == 0).all(), "the unused end of a slab was written"


@given(shapes, st.integers(1, 4))
def test_layer_views_and_the_block_view_show_the_same_memory(shape: dict, slots: int):
    layout = KVLayout(**shape, slab_bytes=(slots * block_bytes(shape) + 7) // 8 * 8)
    elements = 2 * layout.slab_bytes // layout.dtype.itemsize
    kv_pool = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(layout.dtype).view(torch.uint8)
    views = layout.block_views(kv_pool)
    assert len(views) == (1 if layout.value_dim in (0, layout.head_dim) else 2)
    for layer in range(layout.num_layers):
        view = layout.layer_view(kv_pool, layer)
        keys = view.keys.permute(0, 1, 3, 4, 2).flatten(2)  # [slab, slot, kv_head * head_dim * token]
        values = view.values.transpose(2, 3).flatten(2)
        places = (
            [(views[0], layer), (views[-1], layer)] if len(views) > 1 else [(views[0], 2 * layer + i) for i in (0, 1)]
        )
        for found, (blocks, part) in zip((keys, values), places, strict=True):
            assert torch.equal(found, blocks[:, part])


def fill(layout: KVLayout, kv_pool: torch.Tensor, slab: int) -> None:
    for blocks in layout.block_views(kv_pool):
        blocks[slab].fill_(1)


@given(shapes, shapes, st.integers(0, 3))
def test_two_models_in_different_slabs_never_meet(one: dict, other: dict, spare: int):
    slab = (max(block_bytes(one), block_bytes(other)) + 8 * spare + 7) // 8 * 8
    first, second = KVLayout(**one, slab_bytes=slab), KVLayout(**other, slab_bytes=slab)
    kv_pool = torch.zeros(2 * slab, dtype=torch.uint8)
    fill(first, kv_pool, 0)
    fill(second, kv_pool, 1)
    again = torch.zeros(2 * slab, dtype=torch.uint8)
    fill(first, again, 0)
    assert torch.equal(kv_pool[:slab], again[:slab])
    assert not again[slab:].any()


def test_a_slabs_layout_is_layer_major():
    layout = KVLayout(2, 1, 2, 3, torch.float32, slab_bytes=4 * 96)
    view = layout.layer_view(torch.zeros(4 * 96, dtype=torch.uint8), 1)
    # one slot: 3 tokens of 2 elements; one kind: 4 slots; one layer: keys then values
    assert (view.keys.storage_offset(), view.values.storage_offset()) == (2 * 4 * 6, 3 * 4 * 6)
    assert view.keys.stride() == (96, 6, 1, 6, 3)
    assert view.values.stride() == (96, 6, 2, 6, 1)


def test_bytes_per_token_of_published_models():
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int) -> int:
        return KVLayout(layers, kv_heads, head_dim, 16, torch.bfloat16, 2**24).bytes_per_token

    assert bytes_per_token(28, 2, 128) == 28_672  # Qwen2.5-1.5B
    assert bytes_per_token(28, 4, 128) == 57_344  # Qwen2.5-Math-PRM-7B
    assert bytes_per_token(16, 8, 64) == 32_768  # Llama-3.2-1B
    assert bytes_per_token(32, 8, 128) == 131_072  # Llama-3.1-8B


def test_a_slab_wastes_what_no_whole_block_covers():
    layout = KVLayout(2, 1, 4, 4, torch.float32, slab_bytes=3 * 256 + 100)
    assert (layout.block_bytes, layout.blocks_per_slab, layout.wasted_bytes_per_slab) == (256, 3, 100)


def test_a_slab_smaller_than_a_block_is_refused():
    with pytest.raises(ValueError, match="cannot hold one block of 256 bytes"):
        KVLayout(2, 1, 4, 4, torch.float32, slab_bytes=255)
