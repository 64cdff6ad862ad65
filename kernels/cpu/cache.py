"""Copying whole blocks on CPU: each byte is read and written once, without a buffer between."""

import numpy as np
import torch

from espalier.kernels.compilation.ahead import Compilation, compilation
from espalier.kernels.cpu import compiled
from espalier.kernels.layout import KVLayout


def copy_blocks_cpu(layout: KVLayout, kv_pool: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """`copy_blocks` on CPU; same arguments."""
    size = layout.slot_elements * layout.dtype.itemsize
    pairs = np.array((sources, destinations), dtype=np.int64)
    _copy(kv_pool.numpy(), pairs, layout.blocks_per_slab, layout.slab_bytes, 2 * layout.num_layers, size)


@compiled(nogil=True)
def _copy(flat: np.ndarray, pairs: np.ndarray, slots: int, slab_bytes: int, parts: int, size: int) -> None:
    """Copy `size` bytes of each of the `parts`, keys and values of the layers, in which a block has a slot."""
    for i in range(pairs.shape[1]):
        source = pairs[0, i] // slots * slab_bytes + pairs[0, i] % slots * size
        target = pairs[1, i] // slots * slab_bytes + pairs[1, i] % slots * size
        for part in range(parts):
            at = part * slots * size
            given, written = flat[source + at : source + at + size], flat[target + at : target + at + size]
            for byte in range(size):
                written[byte] = given[byte]


def copy_compilation() -> Compilation:
    """The compilation of `copy_blocks_cpu`."""
    return compilation(_copy, np.zeros(1, np.uint8), np.zeros((2, 1), np.int64), 0, 0, 0, 0)
