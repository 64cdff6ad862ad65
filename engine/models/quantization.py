"""Quantised weights, int8 and int4, made layer by layer while a model loads.

A backend with a product of its own reads them by it, so that a request's bits still do not depend on the rest of its
batch (on CPU); weights are rounded as torchao rounds them, int4 by torchao itself. Others use torchao's weights and
products, which promise no such thing: int4 by torch's kernel for it on a GPU, int8 by converting a layer's weight for
each product, which saves memory and not time. On a GPU that is refused.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.options import Quantization
from espalier.kernels.backend import Backend
from espalier.kernels.linear import QuantizedPacker

GROUP = 64
"""Inputs that share a scale and a zero in int4; where it does not divide them, the largest power of two that does."""

_ELEMENTS = 2**16
"""Values that are rounded at a time: so few that they stay in a core's cache."""
_LEAST_SCALE = torch.finfo(torch.float32).eps

Quantizer = Callable[[torch.Tensor, int], torch.Tensor]
"""A weight `[out, in]`, and how many of its last outputs are worth two bytes a weight in int8, to a quantised one that
`torch.nn.functional.linear` takes."""


def make_quantizer(
    quantization: Quantization, backend: Backend, dtype: torch.dtype, device: torch.device | str
) -> Quantizer:
    """A function that quantises each weight of a decoder for `backend`, or leaves it as it is.

    Raises:
        CheckpointError: when torchao is missing, or there is no fast product for this dtype and device.
    """
    assert quantization is not Quantization.AUTO, "chosen at opening, by `decoder.chosen_quantization`"
    if quantization is Quantization.NONE:
        return lambda weight, _: weight
    packer = backend.quantized_packer()
    kind = torch.device(device).type
    if packer and quantization is Quantization.INT8:
        return partial(_pack_int8, packer, {})
    if quantization is Quantization.INT8 and kind == "cuda":
        raise CheckpointError(
            f"int8 weights have no product of their own on {device}: each would be copied to {_name(dtype)} for every "
            "product, which takes longer than such weights would, and memory that nothing plans. Quantise to int4 "
            "or not at all (--generator-quantization, --verifier-quantization), or use --device cpu"
        )
    with quiet_imports():
        try:
            import torchao.quantization  # noqa: F401
        except ImportError as error:
            install = "pip install 'espalier-search[quantization]'"
            raise CheckpointError(f"{quantization} weights need torchao: {install}") from error
    if packer:
        return partial(_pack_int4, packer)
    if quantization is Quantization.INT8:
        from torchao.quantization import Int8WeightOnlyConfig

        return partial(_quantize, Int8WeightOnlyConfig(set_inductor_config=False))
    if kind != "cuda" or dtype != torch.bfloat16:
        needed = "--dtype bfloat16 on a GPU or float32 on a CPU"
        raise CheckpointError(f"int4 weights need {needed}; this is {_name(dtype)} on {kind}")
    from torchao.quantization import Int4WeightOnlyConfig
    from torchao.quantization.quantize_.workflows import Int4PackingFormat

    packing = Int4PackingFormat.TILE_PACKED_TO_4D
    config = Int4WeightOnlyConfig(GROUP, set_inductor_config=False, int4_packing_format=packing)
    return partial(_quantize, config)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refined_outputs(outputs: Sequence[int]) -> int:
    """Number of last outputs that are worth two bytes a weight, of products of the same inputs, such as q, k and v.

    Those of a last product that makes less than half as many as the largest one: values that three or more heads ask
    for. Rounding costs most there for the size: a text's first token draws most attention and has values near zero,
    which a few huge inputs with small weights add up to.

    Args:
        outputs: of each product.
    """
    return outputs[-1] if 2 * outputs[-1] < max(outputs) else 0


def linear_bytes(rows: int, columns: int, itemsize: int, quantization: Quantization) -> int:
    """Bytes of one weight `[rows, columns]`, without the rows that fill up its last panel on a CPU.

    A dtype of 16 bits means a GPU, whose int4 pads columns to a multiple of 1024.

    Args:
        rows: outputs.
        columns: inputs.
        itemsize: bytes of an element of the unquantised weight.
        quantization: how the weight is kept.
    """
    match quantization:
        case Quantization.INT8:
            return rows * (columns + 4 + 1)
        case Quantization.INT4 if itemsize == 2:
            padded = -(-columns // 1024) * 1024
            return rows * (padded // 2 + padded // GROUP * (2 + 2))
        case Quantization.INT4:
            return rows * (columns // 2 + columns // math.gcd(columns, GROUP) * (4 + 1))
    return rows * columns * itemsize


def refining_bytes(outputs: Sequence[int], columns: int, itemsize: int, quantization: Quantization) -> int:
    """Bytes of the second bytes that a CPU keeps of products of the same inputs; see `refined_outputs`.

    Args:
        outputs: of each product.
        columns: inputs.
        itemsize: see `linear_bytes`.
        quantization: see `linear_bytes`.
    """
    if quantization is not Quantization.INT8 or itemsize == 2:
        return 0
    return linear_bytes(refined_outputs(outputs), columns, itemsize, quantization)


def layer_bytes(config: DecoderConfig, itemsize: int, quantization: Quantization) -> int:
    """Bytes of the products of one layer of a decoder that native code runs; see `linear_bytes`."""
    heads = [count * config.head_dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    products = sum(linear_bytes(*shape, itemsize, quantization) for shape in config.layer_products)
    return products + refining_bytes(heads, config.hidden_size, itemsize, quantization)


def stored_bytes(weight: Any) -> int:
    """Bytes of a weight, quantised or not; 0 for None."""
    if weight is None:
        return 0
    # `nbytes` of torchao's tensors is that of the weight before.
    if flatten := getattr(weight, "__tensor_flatten__", None):
        return sum(stored_bytes(getattr(weight, name)) for name in flatten()[0])
    return weight.nbytes


def _pack_int8(
    packer: QuantizedPacker, rooms: dict[torch.Size, torch.Tensor], weight: torch.Tensor, refined: int
) -> torch.Tensor:
    values, scales = _rounded(weight, rooms)
    rest = None
    if refined:
        last = slice(len(weight) - refined, None)
        rest = _rounded(weight[last] - values[last] * scales[last], {})
    return packer(values, scales, torch.zeros_like(scales), 8, rest)


def _rounded(weight: torch.Tensor, rooms: dict[torch.Size, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in bytes, which stay until one of its shape is rounded, with one scale for each output, `[out, 1]`."""
    new = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    values = rooms.setdefault(weight.shape, new)  # memory that was used before takes a tenth of the time of new
    scales = weight.new_empty(len(weight), 1)
    count = max(1, _ELEMENTS // weight.shape[1])
    room = weight.new_empty(min(count, len(weight)), weight.shape[1])
    for rows, into, scale in zip(*(each.split(count) for each in (weight, values, scales)), strict=True):
        part = room[: len(rows)]
        scale.copy_(torch.abs(rows, out=part).amax(1, keepdim=True) / 127.5).clamp_(min=_LEAST_SCALE)
        into.copy_(torch.mul(rows, 1 / scale, out=part).round_().clamp_(-128, 127))
    return values, scales


def _pack_int4(packer: QuantizedPacker, weight: torch.Tensor, _: int) -> torch.Tensor:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup
    from torchao.quantization.quant_primitives import MappingType

    granularity = PerGroup(math.gcd(weight.shape[1], GROUP))
    config = IntxWeightOnlyConfig(torch.int4, granularity, MappingType.ASYMMETRIC)  # pyright: ignore[reportAttributeAccessIssue]
    scaled: Any = _quantize(config, weight, 0)
    return packer(scaled.qdata, scaled.scale, scaled.zero_point, 4, None)


def _quantize(config: Any, weight: torch.Tensor, _: int) -> torch.Tensor:
    """Quantise one weight by way of a module, which is what torchao takes."""
    from torchao.quantization import quantize_

    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(linear, config)
    return linear.weight.data


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Silence torchao's warnings about extensions that do not fit this torch; none of them is used."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
