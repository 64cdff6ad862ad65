"""Packed values of GGUF tensors, expanded: the commonest kinds by compiled code, all others by the `gguf` package.

The package goes over each value a dozen times, which takes ten seconds for a model of 1.5 billion. Compiled code gives
the same values. Layouts: `ggml-common.h` of github.com/ggml-org/ggml.
"""

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from espalier.kernels.cpu import compiled
from espalier.kernels.cpu.threads import parallel_run, phase_items

_Kind = GGMLQuantizationType
_FOUR_BITS = {_Kind.Q4_0: 8, _Kind.Q4_1: 0, _Kind.Q5_0: 16, _Kind.Q5_1: 0}
"""Kinds with blocks of 32 values, and what stands for zero; those of 0 have a least value instead."""
_BLOCKS = 256
"""Blocks that a thread takes at a time."""
_BYTES = 2**20
"""Packed bytes that the package is given at a time: it holds several copies of them."""
_SECONDS = 5e-10
"""Seconds to expand one value, within a factor of two or so."""


def expand(
    packed: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...], room: np.ndarray | None = None
) -> np.ndarray:
    """Values of a tensor in float32.

    Args:
        packed: uint8, `[..., bytes of a row]`.
        kind: how values are packed.
        shape: of the values.
        room: where to put them, contiguous, with as many elements: memory that was used before is faster than new.

    Raises:
        NotImplementedError: neither this code nor the package knows the kind.
    """
    values = np.empty(shape, np.float32) if room is None else room.reshape(shape)
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks, out = packed.reshape(-1, num_bytes), values.reshape(-1, size)
    seconds = values.size * _SECONDS

    def numbers(at: int) -> np.ndarray:
        """The float16 number that each block has at a byte."""
        return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)[:, 0].astype(np.float32)

    if kind in _FOUR_BITS:
        zero, five = _FOUR_BITS[kind], kind in (_Kind.Q5_0, _Kind.Q5_1)
        least = np.zeros(len(blocks), np.float32) if zero else numbers(2)
        parallel_run(_four_bits, 1, blocks, numbers(0), least, zero, five, out, seconds=seconds)
    elif kind in (_Kind.Q4_K, _Kind.Q5_K):
        parallel_run(_k_blocks, 1, blocks, numbers(0), numbers(2), kind is _Kind.Q5_K, out, seconds=seconds)
    elif kind is _Kind.Q8_0:
        parallel_run(_eight_bits, 1, blocks, numbers(0), out, seconds=seconds)
    elif kind is _Kind.Q6_K:
        parallel_run(_six_bits, 1, blocks, numbers(208), out, seconds=seconds)
    else:
        rows, count = packed.reshape(-1, packed.shape[-1]), max(1, _BYTES // packed.shape[-1])
        for start in range(0, len(rows), count):
            part = dequantize(rows[start : start + count], kind)
            values.reshape(len(rows), -1)[start : start + count] = part
    return values


@compiled(nogil=True)
def _four_bits(
    counters: int, blocks: np.ndarray, scales: np.ndarray, least: np.ndarray, zero: int, five: bool, out: np.ndarray
) -> None:
    """Expand blocks of 32 values: [scale, least value, fifth bits where there are `five`, four bits of each].

    There is no least value where something stands for `zero`.
    """
    high_at = 2 if zero else 4
    for item in phase_items(counters, 0, (len(blocks) + _BLOCKS - 1) // _BLOCKS):
        for i in range(item * _BLOCKS, min(len(blocks), (item + 1) * _BLOCKS)):
            values, low, fifth = out[i], blocks[i, high_at + 4 * five :], np.uint32(0)
            if five:
                for byte in range(4):
                    fifth |= np.uint32(blocks[i, high_at + byte]) << np.uint32(8 * byte)
            for j in range(16):
                one = np.int32(low[j] & 15) + np.int32(fifth >> np.uint32(j) & np.uint32(1)) * np.int32(16)
                other = np.int32(low[j] >> 4) + np.int32(fifth >> np.uint32(16 + j) & np.uint32(1)) * np.int32(16)
                values[j] = scales[i] * np.float32(one - np.int32(zero)) + least[i]
                values[16 + j] = scales[i] * np.float32(other - np.int32(zero)) + least[i]


@compiled(nogil=True)
def _k_blocks(
    counters: int, blocks: np.ndarray, scales: np.ndarray, steps: np.ndarray, five: bool, out: np.ndarray
) -> None:
    """Expand blocks of 8 x 32 values: [scale, step of least values, both of each 32 in 6 bits, fifth bits, four bits].

    The 12 bytes of 6 bits are [4 scales, 4 least values, the other 4 of both], whose upper bits are the first eight's.
    """
    nothing = np.zeros(32, np.uint8)
    for item in phase_items(counters, 0, (len(blocks) + _BLOCKS - 1) // _BLOCKS):
        for i in range(item * _BLOCKS, min(len(blocks), (item + 1) * _BLOCKS)):
            six, low = blocks[i, 4:16], blocks[i, 48 if five else 16 :]
            fifth = blocks[i, 16:48] if five else nothing
            for part in range(8):
                if part < 4:
                    factor, least = six[part] & 63, six[part + 4] & 63
                else:
                    factor = six[part + 4] & 15 | six[part - 4] >> 2 & 48
                    least = six[part + 4] >> 4 | six[part] >> 2 & 48
                scale, start = scales[i] * np.float32(factor), steps[i] * np.float32(least)
                four, shift = low[part // 2 * 32 : part // 2 * 32 + 32], np.uint8(part % 2 * 4)
                values = out[i, part * 32 : part * 32 + 32]
                for j in range(32):
                    value = np.int32(four[j] >> shift & 15) + np.int32(fifth[j] >> part & 1) * np.int32(16)
                    values[j] = scale * np.float32(value) - start


@compiled(nogil=True)
def _six_bits(counters: int, blocks: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Expand blocks of 16 x 16 values: [128 bytes of lower four bits, 64 of upper two, 16 factors, scale]."""
    for item in phase_items(counters, 0, (len(blocks) + _BLOCKS - 1) // _BLOCKS):
        for i in range(item * _BLOCKS, min(len(blocks), (item + 1) * _BLOCKS)):
            for part in range(16):
                row, half = part // 2, part % 2 * 16  # rows of 32: those of lower bits come in twos, of upper in fours
                at = row // 4 * 64 + row % 2 * 32 + half
                low, low_shift = blocks[i, at : at + 16], np.uint8(row % 4 // 2 * 4)
                at = 128 + row // 4 * 32 + half
                high, high_shift = blocks[i, at : at + 16], np.uint8(row % 4 * 2)
                scale = scales[i] * np.float32(np.int8(blocks[i, 192 + part]))
                values = out[i, part * 16 : part * 16 + 16]
                for j in range(16):
                    value = np.int32(low[j] >> low_shift & 15) + np.int32(high[j] >> high_shift & 3) * np.int32(16)
                    values[j] = scale * np.float32(value - np.int32(32))


@compiled(nogil=True)
def _eight_bits(counters: int, blocks: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Expand blocks of 32 values: [scale, signed bytes]."""
    for item in phase_items(counters, 0, (len(blocks) + _BLOCKS - 1) // _BLOCKS):
        for i in range(item * _BLOCKS, min(len(blocks), (item + 1) * _BLOCKS)):
            signed, values = blocks[i, 2:], out[i]
            for j in range(32):
                values[j] = scales[i] * np.float32(np.int8(signed[j]))
