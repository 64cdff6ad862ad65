"""Packed blocks of GGUF tensors: compiled code gives the values of llama.cpp's package, to the bit."""

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from espalier.kernels.cpu.gguf_blocks import expand

COMPILED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
BY_THE_PACKAGE = ("BF16", "Q2_K", "IQ4_NL")
HALVES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "BF16": (), "Q2_K": (80, 82)}
"""Where numbers in float16 begin; else at 0 and 2."""


def random_blocks(kind: GGMLQuantizationType, count: int) -> np.ndarray:
    """Blocks of any bytes, but for numbers in float16, which are finite."""
    generator = np.random.default_rng(count)
    blocks = generator.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in HALVES.get(kind.name, (0, 2)):
        blocks[:, at : at + 2] = generator.normal(size=(count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", COMPILED + BY_THE_PACKAGE)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 5), (2, 257)])
def test_values_are_those_of_the_package(name: str, rows: int, blocks: int):
    kind = GGMLQuantizationType[name]
    packed = random_blocks(kind, rows * blocks).reshape(rows, -1)
    shape = rows, blocks * GGML_QUANT_SIZES[kind][0]
    assert np.array_equal(expand(packed, kind, shape), dequantize(packed, kind), equal_nan=name == "BF16")


def test_a_tensor_of_three_dimensions_keeps_its_shape():
    kind = GGMLQuantizationType.Q4_K
    packed = random_blocks(kind, 12).reshape(2, 3, -1)
    found = expand(packed, kind, (2, 3, 512))
    assert np.array_equal(found.reshape(6, 512), dequantize(packed.reshape(6, -1), kind))


def test_a_kind_that_nobody_expands_is_an_error():
    with pytest.raises(NotImplementedError):
        expand(np.zeros((1, 4), np.uint8), GGMLQuantizationType.I32, (1, 1))
