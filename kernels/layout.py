"""Where a token's key and value lie in the arena: pure address arithmetic, shared by every operation.

Inside a sector the layout is layer-major, so that one layer's reads of many blocks stay close together:

    arena   [sector 0][sector 1] ...                      equal runs of bytes
    sector  [layer][key|value][slot][token][kv head][head dim]   then unused bytes, less than one block
    block   (sector, slot), its id = sector * blocks_per_sector + slot
"""

from dataclasses import dataclass

import torch


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

    def layer_view(self, arena: torch.Tensor, layer: int) -> torch.Tensor:
        """View of one layer's keys and values.

        Args:
            arena: uint8 `[num_sectors * sector_bytes]`.
            layer: which decoder layer.

        Returns:
            `dtype` view `[num_sectors, 2, slot, token, kv_head, head_dim]`; index 0 of the second axis holds keys.
        """
        inner = (self.block_size, self.num_kv_heads, self.head_dim)
        slot_elements = self.block_size * self.num_kv_heads * self.head_dim
        slots = self.blocks_per_sector
        return self._view(
            arena, (2, slots, *inner), (slots * slot_elements, slot_elements), layer * 2 * slots * slot_elements
        )

    def block_view(self, arena: torch.Tensor) -> torch.Tensor:
        """View of every layer for whole-block copies: `[num_sectors, layer, 2, slot, token, kv_head, head_dim]`."""
        inner = (self.block_size, self.num_kv_heads, self.head_dim)
        slot_elements = self.block_size * self.num_kv_heads * self.head_dim
        slots = self.blocks_per_sector
        strides = (2 * slots * slot_elements, slots * slot_elements, slot_elements)
        return self._view(arena, (self.num_layers, 2, slots, *inner), strides, 0)

    def _view(
        self, arena: torch.Tensor, shape: tuple[int, ...], outer_strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        flat = arena.view(self.dtype)
        sectors = arena.numel() // self.sector_bytes
        token_stride, head_stride = self.num_kv_heads * self.head_dim, self.head_dim
        strides = (self.sector_bytes // self.dtype.itemsize, *outer_strides, token_stride, head_stride, 1)
        return flat.as_strided((sectors, *shape), strides, offset)
