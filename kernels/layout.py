"""Layout of keys and values in the KV pool, and what a step computes there: pure address arithmetic for all operations.

Inside a slab the layout is layer-major, so that one layer's reads of many blocks stay close together:

    KV pool   [slab 0][slab 1] ...         equal runs of bytes
    slab  [layer][keys|values][slot][...]  then unused bytes, less than one block
    keys    [kv head][head dim][token]       of one slot
    values  [kv head][token][head dim]       of one slot
    block   (slab, slot), its id = slab * blocks_per_slab + slot

The last dimension of each is the one that attention's inner loops run along: a query is multiplied with all keys of a
block at once, and an attention weight with all elements of a value.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from espalier.kernels.recurrent import StateRows


class KVShape(NamedTuple):
    """Shape of a token's keys and values in one layer, with its window; layers of one shape are a KV group.

    Attributes:
        kv_heads: key and value heads.
        key_dim: elements of a key head.
        value_dim: elements of a value head.
        window: how many positions a token sees, its own the last, or None for all before it.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def elements(self) -> int:
        """Elements of one token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


def kv_groups(layers: Iterable[KVShape]) -> dict[KVShape, list[int]]:
    """The layers of each KV group; groups stand in the order of their first layers."""
    groups: dict[KVShape, list[int]] = {}
    for index, shape in enumerate(layers):
        groups.setdefault(shape, []).append(index)
    return groups


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's keys and values: views `[slab, slot, token, kv_head, head_dim]`, whatever their order in memory.

    `group` is the KV group of the layer, whose block tables say where they lie.
    """

    keys: torch.Tensor
    values: torch.Tensor
    group: int = 0


class SlabLayout:
    """Blocks of one size in slabs, whose ends they may leave unused."""

    dtype: torch.dtype
    slab_bytes: int

    def __post_init__(self) -> None:
        if self.blocks_per_slab < 1:
            raise ValueError(f"a slab of {self.slab_bytes} bytes cannot hold one block of {self.block_bytes} bytes")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the KV of all layers of a group, or a sequence's state."""
        raise NotImplementedError

    @cached_property  # asked for at each step and for each block
    def blocks_per_slab(self) -> int:
        """Number of blocks that fit in one slab."""
        return self.slab_bytes // self.block_bytes

    @property
    def wasted_bytes_per_slab(self) -> int:
        """Bytes at a slab's end that no block covers."""
        return self.slab_bytes - self.blocks_per_slab * self.block_bytes

    def _view(
        self, kv_pool: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """Returns `[num_slabs, *shape]`, `offset` elements into every slab."""
        slabs = kv_pool.numel() // self.slab_bytes
        slab_stride = self.slab_bytes // self.dtype.itemsize
        return kv_pool.view(self.dtype).as_strided((slabs, *shape), (slab_stride, *strides), offset)


@dataclass(frozen=True)
class KVLayout(SlabLayout):
    """Layout of one KV group's blocks inside slabs.

    Attributes:
        num_layers: layers of the group.
        num_kv_heads: key/value heads per layer.
        head_dim: elements of a key head.
        block_size: tokens per block.
        dtype: element type of keys and values.
        slab_bytes: size of one slab of the KV pool.
        value_dim: elements of a value head; 0 if as many as of a key head.
        group: which of the model's KV groups it is.
    """

    keys_by_token: ClassVar[bool] = False
    """True if keys lie as values do, `[kv head][token][head dim]`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    slab_bytes: int
    value_dim: int = 0
    group: int = 0

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, all layers of the group."""
        shape = KVShape(self.num_kv_heads, self.head_dim, self.value_dim or self.head_dim, None)
        return self.num_layers * shape.elements * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """KV bytes of one block, all layers of the group."""
        return self.bytes_per_token * self.block_size

    @property
    def slot_elements(self) -> tuple[int, int]:
        """Elements of one block's keys, and of its values, in one layer."""
        of_heads = self.block_size * self.num_kv_heads
        return of_heads * self.head_dim, of_heads * (self.value_dim or self.head_dim)

    def layer_view(self, kv_pool: torch.Tensor, layer: int) -> LayerKV:
        """View of one layer's keys and values.

        Args:
            kv_pool: uint8 `[num_slabs * slab_bytes]`.
            layer: which layer of the group.
        """
        size, dim, wide, slots = self.block_size, self.head_dim, self.value_dim or self.head_dim, self.blocks_per_slab
        of_keys, of_values = self.slot_elements
        keys = layer * slots * (of_keys + of_values)
        shape, values = (slots, size, self.num_kv_heads), keys + slots * of_keys
        key_strides = (dim, size * dim, 1) if self.keys_by_token else (1, size * dim, size)
        return LayerKV(
            self._view(kv_pool, (*shape, dim), (of_keys, *key_strides), keys),
            self._view(kv_pool, (*shape, wide), (of_values, wide, size * wide, 1), values),
            self.group,
        )

    def block_views(self, kv_pool: torch.Tensor) -> list[torch.Tensor]:
        """Views of all layers for whole-block copies, `[num_slabs, part, slot, elements]` each.

        The parts are keys and values of every layer, or, where these differ in size, keys in one view and values in
        another.
        """
        slots, (of_keys, of_values) = self.blocks_per_slab, self.slot_elements
        if of_keys == of_values:
            return [self._view(kv_pool, (2 * self.num_layers, slots, of_keys), (slots * of_keys, of_keys, 1), 0)]
        of_layer = slots * (of_keys + of_values)
        return [
            self._view(kv_pool, (self.num_layers, slots, elements), (of_layer, elements, 1), first)
            for elements, first in ((of_keys, 0), (of_values, slots * of_keys))
        ]


StateShape = tuple[int, ...]
"""Shape of one part of a sequence's recurrent state, float32."""
_ALIGNED = 16
"""Elements of which each part of a state begins at a multiple: 64 bytes."""


@dataclass(frozen=True)
class StateLayout(SlabLayout):
    """Layout of recurrent states inside slabs: a block is the state of one sequence, all layers, float32.

        slab   [slot][slot] ...       then unused bytes, less than one block
        slot   [part][part] ...       each begins at a multiple of 64 bytes

    Attributes:
        shapes: of each part of a state.
        block_size: tokens per block of the model's KV groups; a state is cached where one ends.
        slab_bytes: size of one slab of the KV pool.
    """

    dtype: torch.dtype = field(default=torch.float32, init=False)
    bytes_per_token: ClassVar[int] = 0

    shapes: tuple[StateShape, ...]
    block_size: int
    slab_bytes: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Elements before each part of a state, and before its end."""
        ends = [0]
        for shape in self.shapes:
            ends.append(ends[-1] + -(-math.prod(shape) // _ALIGNED) * _ALIGNED)
        return tuple(ends)

    @property
    def block_bytes(self) -> int:
        """Bytes of one state."""
        return state_bytes(self.shapes)

    def starts(self, blocks: np.ndarray) -> np.ndarray:
        """Elements of the KV pool before each of `blocks`, int64."""
        slabs, slots = np.divmod(blocks.astype(np.int64), self.blocks_per_slab)
        return (slabs * self.slab_bytes + slots * self.block_bytes) // self.dtype.itemsize

    def block_views(self, kv_pool: torch.Tensor) -> list[torch.Tensor]:
        """View for copies of whole states, `[num_slabs, 1, slot, elements]`; see `KVLayout.block_views`."""
        slots, elements = self.blocks_per_slab, self.block_bytes // self.dtype.itemsize
        return [self._view(kv_pool, (1, slots, elements), (slots * elements, elements, 1), 0)]


def state_bytes(shapes: Iterable[StateShape]) -> int:
    """Bytes of a recurrent state with parts of these shapes; 0 for none."""
    return sum(-(-math.prod(shape) // _ALIGNED) * _ALIGNED for shape in shapes) * StateLayout.dtype.itemsize


Layout = KVLayout | StateLayout
"""Layout of blocks in slabs."""


def copy_blocks(layout: Layout, kv_pool: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """Copy whole blocks, all layers of a KV group, in one call; a block may not be both source and destination.

    Args:
        layout: that of the group, or of states.
        kv_pool: uint8 KV pool, written in place.
        sources: block ids to read.
        destinations: block ids to write, one for each source.
    """
    slots = layout.blocks_per_slab
    source = torch.tensor(sources, dtype=torch.int64, device=kv_pool.device)
    target = torch.tensor(destinations, dtype=torch.int64, device=kv_pool.device)
    for blocks in layout.block_views(kv_pool):
        blocks[target // slots, :, target % slots] = blocks[source // slots, :, source % slots]


def copy_blocks_on_host(layout: Layout, kv_pool: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """`copy_blocks` for a pool in the host's memory: each byte is read and written once, without a buffer between."""
    slots = layout.blocks_per_slab
    for blocks in (view.numpy() for view in layout.block_views(kv_pool)):
        for source, target in zip(sources, destinations, strict=True):
            blocks[target // slots, :, target % slots] = blocks[source // slots, :, source % slots]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The tokens of a step and the places of their context; in the host's memory until layers move it.

    S sequences contribute T new tokens in all, those of one sequence side by side. The tokens of sequence `s` have the
    last `query_starts[s + 1] - query_starts[s]` positions of its context, and each attends to itself and to the
    positions before it.

    Attributes:
        query_starts: int32 `[S + 1]`, offsets of each sequence's tokens in the batch.
        row_sequences: int32 `[T]`, the sequence of each token.
        context_lengths: int32 `[S]`, tokens of each sequence once this step's are written.
        block_tables: int32 `[S, max_blocks]`, block ids in order; -1 for blocks behind the windows of all
            layers and tokens. Entries past the context are not read.
        write_slabs: int64 `[W]`, the slab of the block that each of W written tokens goes to.
        write_slots: int64 `[W]`, the slot of that block in its slab.
        write_offsets: int64 `[W]`, the token's position inside that block.
        write_rows: int64 `[W]`, the batch row of each written token, or None when all T rows are written in order.
        others: the same step in the model's other KV groups; they differ in block tables, slabs and slots.
    """

    query_starts: torch.Tensor
    row_sequences: torch.Tensor
    context_lengths: torch.Tensor
    block_tables: torch.Tensor
    write_slabs: torch.Tensor
    write_slots: torch.Tensor
    write_offsets: torch.Tensor
    write_rows: torch.Tensor | None
    others: tuple["AttentionBatch", ...] = ()

    def of(self, group: int) -> "AttentionBatch":
        """The step in one of the model's KV groups."""
        return self.others[group - 1] if group else self

    def in_other_group(
        self, block_tables: torch.Tensor, write_slabs: torch.Tensor, write_slots: torch.Tensor
    ) -> "AttentionBatch":
        """The step in a KV group whose blocks lie elsewhere."""
        return replace(self, block_tables=block_tables, write_slabs=write_slabs, write_slots=write_slots, others=())

    def to(self, device: torch.device) -> "AttentionBatch":
        """The same on a device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "others"}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items() if tensor is not None}
        own = replace(self, **moved)
        places = ((it.block_tables, it.write_slabs, it.write_slots) for it in self.others)
        others = tuple(own.in_other_group(*(x.to(device, non_blocking=True) for x in each)) for each in places)
        return replace(own, others=others)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The recurrent states of a step's sequences; where they lie is in the host's memory until layers move it.

    Attributes:
        rows: the sequences that go on; their tokens come first. Addresses are those of whole states.
        read_again: int64, the states of the sequences behind them, of which the last token, computed before, is asked
            for once more: its hidden state is the last part of each.
    """

    rows: StateRows
    read_again: torch.Tensor

    @property
    def places(self) -> tuple[torch.Tensor, ...]:
        """All that says where they lie: spans, sources and targets of the rows, states that are read again."""
        return self.rows.spans, self.rows.sources, self.rows.targets, self.read_again

    def placed(
        self, spans: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, again: torch.Tensor
    ) -> "StateBatch":
        """The same states with their places on a device."""
        return StateBatch(StateRows(self.rows.memory, spans, sources, targets), again)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step: T tokens and where they lie; in the host's memory, but for `drawn`.

    Attributes:
        token_ids: int64 `[T]`; -1 - i stands for the i-th of `drawn`.
        positions: int64 `[T]`.
        attention: where the tokens and their context lie.
        drawn: int64, on the device: tokens that the step before drew and that the host has not seen yet; None if no
            token stands for one.
        states: None for a decoder that has none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    drawn: torch.Tensor | None = None
    states: StateBatch | None = None

    def known_token_ids(self, device: torch.device) -> torch.Tensor:
        """The token ids on a device, with those just drawn filled in."""
        ids = self.token_ids.to(device)
        return ids if self.drawn is None else torch.where(ids < 0, self.drawn[(-1 - ids).clamp_min(0)], ids)
