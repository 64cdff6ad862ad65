"""What the layers of a decoder hold of its weights, for tests that compare them."""

from typing import Any

import torch

from espalier.kernels.cpu.decoder import CpuLayers
from espalier.kernels.cpu.layer_weights import StackedWeights
from espalier.kernels.cpu.products.int8_linear import Int8Weight
from espalier.kernels.layers import Layers, LayerWeights, TorchLayers


def weights_of(layers: Layers, index: int) -> Any:
    """The weights of one layer, as they were given or as they are packed."""
    if isinstance(layers, TorchLayers):
        return layers._layers[index]
    assert isinstance(layers, CpuLayers)
    packed = layers.stacked.packed
    return StackedWeights(*(_layer(whole, index) for whole in packed))


def _layer(whole: Any, index: int) -> Any:
    if not isinstance(whole, Int8Weight):
        return whole[index]
    return Int8Weight(whole.shape, whole.values[index], whole.scales[index], whole.refined)


def tensors_of(weights: StackedWeights | LayerWeights) -> list[torch.Tensor]:
    """All tensors of one layer's weights."""
    names = weights._fields if isinstance(weights, StackedWeights) else weights.__slots__
    return [value for name in names if isinstance(value := getattr(weights, name), torch.Tensor)]
