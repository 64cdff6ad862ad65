"""The backend in plain torch: the reference of every operation, for any device and dtype."""

from collections.abc import Callable

import numpy as np
import torch

from espalier.kernels.attention import Attend, GatheredAttention
from espalier.kernels.batch import AttentionBatch
from espalier.kernels.cache import copy_blocks
from espalier.kernels.layers import EmbeddingAndNorm, Layers, LayerShape, LayerWeights, TorchLayers
from espalier.kernels.layout import KVLayout, LayerKV
from espalier.kernels.linear import Linear
from espalier.kernels.sampling import draw_tokens, filter_logits


class TorchBackend:
    """See `backend.Backend`. A subclass that is faster at some operations inherits the others."""

    layout: type[KVLayout] = KVLayout
    rows_are_independent = False

    def prepare_layers(
        self, count: int, load: Callable[[int], LayerWeights], shape: LayerShape, outer: EmbeddingAndNorm
    ) -> Layers:
        """See `Backend`."""
        return TorchLayers(count, load, shape, outer, self.prepare_attention)

    def prepare_attention(self, layer_kv: LayerKV, batch: AttentionBatch, num_heads: int) -> Attend:
        """Attention of one step, for all of its layers; see `kernels.attention.PrepareAttention`."""
        return GatheredAttention(layer_kv, batch, num_heads)

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """See `Backend`."""
        return Linear(weight, bias)

    def quantized_packer(self) -> None:
        """See `Backend`."""

    def warm_up(self, layout: KVLayout, kv_pool: torch.Tensor, vocabulary: int) -> None:
        """See `Backend`; nothing would."""

    def use_device(self, device: torch.device) -> None:
        """See `Backend`; torch's operations run where their tensors are, whatever the thread's device."""

    def to_device(self, array: np.ndarray, device: torch.device) -> torch.Tensor:
        """See `Backend`; on a GPU it waits."""
        return torch.from_numpy(array).to(device)

    def fetch(self, results: list[torch.Tensor]) -> Callable[[], list[np.ndarray]]:
        """See `Backend`."""
        return lambda: [tensor.cpu().numpy() for tensor in results]

    copy_blocks = staticmethod(copy_blocks)
    filter_logits = staticmethod(filter_logits)
    draw_tokens = staticmethod(draw_tokens)

    def set_threads(self, count: int | None) -> None:
        """See `Backend`."""
        if count:
            torch.set_num_threads(count)
