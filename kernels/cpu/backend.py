"""The backend for float32 on CPU, compiled by numba."""

from collections.abc import Callable
from typing import cast

import torch

from espalier.kernels.compilation.ahead import Compilation, compile_ahead
from espalier.kernels.cpu import HAS_VNNI
from espalier.kernels.cpu.attention.paged import CpuAttention
from espalier.kernels.cpu.attention.spans import spans_compilation
from espalier.kernels.cpu.decoder import CpuLayers
from espalier.kernels.cpu.layer_weights import run_in_one_call
from espalier.kernels.cpu.products.int8_linear import Int8Weight, int8_of_kept, kept_int8, pack_int8
from espalier.kernels.cpu.products.linear import CpuLinear
from espalier.kernels.cpu.products.quantized_linear import PackedWeight, pack_quantized
from espalier.kernels.cpu.recurrent import causal_convolution_cpu, gated_recurrence_cpu
from espalier.kernels.cpu.sampling import (
    draw_tokens_cpu,
    filter_logits_cpu,
    mask_tokens_cpu,
    penalize_tokens_cpu,
    sampling_compilations,
)
from espalier.kernels.cpu.threads import set_threads, usable_cores
from espalier.kernels.layers import DecoderSpec, EmbeddingAndNorm, Layers, LayerWeights, TorchLayers
from espalier.kernels.layout import copy_blocks_on_host
from espalier.kernels.linear import Kept, Linear, QuantizedPacker, Rest
from espalier.kernels.torch_backend import TorchBackend


class CpuBackend(TorchBackend):
    """See `TorchBackend`. Layers run in one compiled call; those in int4 run operation by operation."""

    rows_are_independent = True
    keeps_int8 = HAS_VNNI
    prepare_attention = CpuAttention
    copy_blocks = staticmethod(copy_blocks_on_host)
    penalize_tokens = staticmethod(penalize_tokens_cpu)
    mask_tokens = staticmethod(mask_tokens_cpu)
    filter_logits = staticmethod(filter_logits_cpu)
    draw_tokens = staticmethod(draw_tokens_cpu)
    causal_convolution = staticmethod(causal_convolution_cpu)
    gated_recurrence = staticmethod(gated_recurrence_cpu)

    def prepare_layers(
        self, count: int, load: Callable[[int], LayerWeights], spec: DecoderSpec, outer: EmbeddingAndNorm
    ) -> Layers:
        """See `Backend`."""
        first = load(0)

        def rest(index: int) -> LayerWeights:
            return load(index) if index else first

        if run_in_one_call(first):
            return _compiled(CpuLayers(count, rest, spec, outer))
        return TorchLayers(count, rest, spec, outer, self.prepare_attention)

    def layers_of_kept(self, kept: Kept, count: int, spec: DecoderSpec, outer: EmbeddingAndNorm) -> Layers:
        """See `Backend`."""
        return _compiled(CpuLayers(count, kept, spec, outer))

    def keep_weight(self, weight: torch.Tensor) -> Kept | None:
        """See `Backend`."""
        return kept_int8(weight, "weight") if isinstance(weight, Int8Weight) else None

    def weight_of_kept(self, kept: Kept) -> torch.Tensor:
        """See `Backend`."""
        return cast(torch.Tensor, int8_of_kept(*kept, "weight"))

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """See `Backend`; a copy of the weight in another order takes the place of the given one."""
        if isinstance(weight, PackedWeight):
            return Linear(weight, bias)
        return CpuLinear(weight, bias)

    def quantized_packer(self) -> QuantizedPacker:
        """See `Backend`."""
        return _pack

    def set_threads(self, count: int | None) -> None:
        """See `Backend`; torch is left one thread.

        Whatever is worth several threads is compiled and shares them by itself. Idle threads of torch's own pool would
        spin beside it: measured on 2 cores, best-of-16 ran 1.7 times as fast without them.
        """
        if count:
            set_threads(count)
        torch.set_num_threads(1)


def _pack(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, rest: Rest | None
) -> torch.Tensor:
    """Pack for products of bytes where the processor has them and there is one scale an output, and no zeros."""
    if bits == 8 and HAS_VNNI:
        return pack_int8(values, scales, rest)
    return pack_quantized(values, scales, zeros, bits)


def _compiled(layers: CpuLayers) -> CpuLayers:
    compile_ahead(compilations(layers), usable_cores())
    return layers


def compilations(layers: CpuLayers) -> list[Compilation]:
    """Compilations before the first step of a model with these layers, the longest first."""
    others = [spans_compilation(), *sampling_compilations(), *layers.head_compilations()]
    return [layers.compilation(), *others]
