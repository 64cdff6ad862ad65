"""Where a token's key and value lie in the arena: pure address arithmetic, shared by every operation.

Inside a sector the layout is layer-major, so that one layer's reads of many blocks stay close together:

    arena   [sector 0][sector 1] ...         equal runs of bytes
    sector  [layer][keys|values][slot][...]  then unused bytes, less than one block
    keys    [kv head][head dim][token]       of one slot
    values  [kv head][token][head dim]       of one slot
    block   (sector, slot), its id = sector * blocks_per_sector + slot

Both kinds end in what attention's inner loops run along: a query meets all keys of a block at once, and a weight all of
a value's elements.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's keys and values, views `[sector, slot, token, kv_head, head_dim]` whatever their order in memory."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one model's KV blocks lie inside sectors.

    Attributes:
        num_layers: decoder layers.
        num_kv_heads: key/value heads per layer.
        head_dim: elements per head.
        block_size: tokens per block.
        dtype: element type of keys and values.
        sector_bytes: size of one sector of the arena.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    sector_bytes: int

    def __post_init__(self) -> None:
        if self.blocks_per_sector < 1:
            raise ValueError(f"a sector of {self.sector_bytes} bytes cannot hold one block of {self.block_bytes} bytes")

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """KV bytes of one block, all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def blocks_per_sector(self) -> int:
        """Slots in one sector."""
        return self.sector_bytes // self.block_bytes

    @property
    def wasted_bytes_per_sector(self) -> int:
        """Bytes at a sector's end that no block covers."""
        return self.sector_bytes - self.blocks_per_sector * self.block_bytes

    @property
    def slot_elements(self) -> int:
        """Elements of one block's keys, or values, in one layer."""
        return self.block_size * self.num_kv_heads * self.head_dim

    def layer_view(self, arena: torch.Tensor, layer: int) -> LayerKV:
        """View of one layer's keys and values.

        Args:
            arena: uint8 `[num_sectors * sector_bytes]`.
            layer: which decoder layer.
        """
        size, dim, slots = self.block_size, self.head_dim, self.blocks_per_sector
        keys = layer * 2 * slots * self.slot_elements
        shape, head_stride = (slots, size, self.num_kv_heads, dim), size * dim
        return LayerKV(
            self._view(arena, shape, (self.slot_elements, 1, head_stride, size), keys),
            self._view(arena, shape, (self.slot_elements, dim, head_stride, 1), keys + slots * self.slot_elements),
        )

    def block_view(self, arena: torch.Tensor) -> torch.Tensor:
        """View of every layer for whole-block copies: `[num_sectors, layer, 2, slot, slot_elements]`."""
        slots, elements = self.blocks_per_sector, self.slot_elements
        strides = (2 * slots * elements, slots * elements, elements, 1)
        return self._view(arena, (self.num_layers, 2, slots, elements), strides, 0)

    def _view(self, arena: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
        """Returns `[num_sectors, *shape]`, `offset` elements into every sector."""
        sectors = arena.numel() // self.sector_bytes
        sector_stride = self.sector_bytes // self.dtype.itemsize
        return arena.view(self.dtype).as_strided((sectors, *shape), (sector_stride, *strides), offset)
