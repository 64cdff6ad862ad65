"""Layout of keys and values in the KV pool: pure address arithmetic, shared by every operation.

Inside a slab the layout is layer-major, so that one layer's reads of many blocks stay close together:

    KV pool   [slab 0][slab 1] ...         equal runs of bytes
    slab  [layer][keys|values][slot][...]  then unused bytes, less than one block
    keys    [kv head][head dim][token]       of one slot
    values  [kv head][token][head dim]       of one slot
    block   (slab, slot), its id = slab * blocks_per_slab + slot

The last dimension of each is the one that attention's inner loops run along: a query is multiplied with all keys of a
block at once, and an attention weight with all elements of a value.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's keys and values: views `[slab, slot, token, kv_head, head_dim]`, whatever their order in memory."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of one model's KV blocks inside slabs.

    Attributes:
        num_layers: decoder layers.
        num_kv_heads: key/value heads per layer.
        head_dim: elements per head.
        block_size: tokens per block.
        dtype: element type of keys and values.
        slab_bytes: size of one slab of the KV pool.
    """

    keys_by_token: ClassVar[bool] = False
    """True if keys lie as values do, `[kv head][token][head dim]`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    slab_bytes: int

    def __post_init__(self) -> None:
        if self.blocks_per_slab < 1:
            raise ValueError(f"a slab of {self.slab_bytes} bytes cannot hold one block of {self.block_bytes} bytes")

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """KV bytes of one block, all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def blocks_per_slab(self) -> int:
        """Number of blocks that fit in one slab."""
        return self.slab_bytes // self.block_bytes

    @property
    def wasted_bytes_per_slab(self) -> int:
        """Bytes at a slab's end that no block covers."""
        return self.slab_bytes - self.blocks_per_slab * self.block_bytes

    @property
    def slot_elements(self) -> int:
        """Elements of one block's keys, or values, in one layer."""
        return self.block_size * self.num_kv_heads * self.head_dim

    def layer_view(self, kv_pool: torch.Tensor, layer: int) -> LayerKV:
        """View of one layer's keys and values.

        Args:
            kv_pool: uint8 `[num_slabs * slab_bytes]`.
            layer: which decoder layer.
        """
        size, dim, slots = self.block_size, self.head_dim, self.blocks_per_slab
        keys = layer * 2 * slots * self.slot_elements
        shape, head_stride = (slots, size, self.num_kv_heads, dim), size * dim
        key_strides = (dim, head_stride, 1) if self.keys_by_token else (1, head_stride, size)
        return LayerKV(
            self._view(kv_pool, shape, (self.slot_elements, *key_strides), keys),
            self._view(kv_pool, shape, (self.slot_elements, dim, head_stride, 1), keys + slots * self.slot_elements),
        )

    def block_view(self, kv_pool: torch.Tensor) -> torch.Tensor:
        """View of every layer for whole-block copies: `[num_slabs, layer, 2, slot, slot_elements]`."""
        slots, elements = self.blocks_per_slab, self.slot_elements
        strides = (2 * slots * elements, slots * elements, elements, 1)
        return self._view(kv_pool, (self.num_layers, 2, slots, elements), strides, 0)

    def _view(
        self, kv_pool: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """Returns `[num_slabs, *shape]`, `offset` elements into every slab."""
        slabs = kv_pool.numel() // self.slab_bytes
        slab_stride = self.slab_bytes // self.dtype.itemsize
        return kv_pool.view(self.dtype).as_strided((slabs, *shape), (slab_stride, *strides), offset)
