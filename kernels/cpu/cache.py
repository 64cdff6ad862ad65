"""Copying whole blocks on CPU: each byte is read and written once, without a buffer between."""

import numpy as np
import torch

from espalier.kernels.compilation.ahead import Compilation, compilation
from espalier.kernels.cpu import compiled
from espalier.kernels.layout import Layout


def copy_blocks_cpu(layout: Layout, kv_pool: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """`copy_blocks` on CPU; same arguments."""
    pairs, item = np.array((sources, destinations), dtype=np.int64), layout.dtype.itemsize
    for blocks in layout.block_views(kv_pool):
        _, parts, slots, elements = blocks.shape
        first, stride = int(blocks.storage_offset()) * item, blocks.stride(1) * item
        _copy(kv_pool.numpy(), pairs, slots, layout.slab_bytes, first, parts, stride, elements * item)


@compiled(nogil=True)
def _copy(
    flat: np.ndarray, pairs: np.ndarray, slots: int, slab_bytes: int, first: int, parts: int, stride: int, size: int
) -> None:
    """Copy `size` bytes of each of the `parts`, keys and values of the layers, in which a block has a slot.

    The `first` part begins so many bytes into a slab, and the others `stride` bytes after one another.
    """
    for i in range(pairs.shape[1]):
        source = pairs[0, i] // slots * slab_bytes + first + pairs[0, i] % slots * size
        target = pairs[1, i] // slots * slab_bytes + first + pairs[1, i] % slots * size
        for part in range(parts):
            at = part * stride
            given, written = flat[source + at : source + at + size], flat[target + at : target + at + size]
            for byte in range(size):
                written[byte] = given[byte]


def copy_compilation() -> Compilation:
    """The compilation of `copy_blocks_cpu`."""
    return compilation(_copy, np.zeros(1, np.uint8), np.zeros((2, 1), np.int64), 0, 0, 0, 0, 0, 0)
