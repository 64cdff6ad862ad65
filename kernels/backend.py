"""The seam between the engine and a kind of device: the operations that a backend offers, and the choice of one."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch

from espalier.kernels.layers import EmbeddingAndNorm, Layers, LayerShape, LayerWeights
from espalier.kernels.layout import KVLayout
from espalier.kernels.linear import Linear, QuantizedPacker
from espalier.kernels.torch_backend import TorchBackend


class Backend(Protocol):
    """Every operation of the engine that depends on the device. It holds no state of any engine or model.

    Whoever calls an operation in each step looks it up once and keeps it.

    Attributes:
        layout: how the blocks of a model lie in the KV pool, so that this backend's attention reads them fast.
        rows_are_independent: whether each row of a result has the same bits whatever other rows its batch holds, so
            that a request gives the same tokens alone and beside others.
    """

    layout: type[KVLayout]
    rows_are_independent: bool

    def prepare_layers(
        self, count: int, load: Callable[[int], LayerWeights], shape: LayerShape, outer: EmbeddingAndNorm
    ) -> Layers:
        """The layers of a decoder, ready to run; attention is theirs.

        Args:
            count: layers of the decoder, at least one.
            load: gives the weights of one layer, quantised or not; called once for each layer, in order.
            shape: what all layers have in common.
            outer: the weights around the layers, of the same device and dtype.

        Raises:
            UnsupportedShapeError: when the backend has no room for such layers.
        """
        ...

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A product with one weight, `[out, in]`, and a bias, `[out]`."""
        ...

    def quantized_packer(self) -> QuantizedPacker | None:
        """Packer of quantised weights for this backend's own product; None where the quantising library has one."""
        ...

    def copy_blocks(self, layout: KVLayout, kv_pool: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
        """See `kernels.cache.copy_blocks`."""
        ...

    def filter_logits(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        top_ks: torch.Tensor,
        top_ps: torch.Tensor,
        min_ps: torch.Tensor,
    ) -> torch.Tensor:
        """Float32 `[B, vocabulary]` to the same with a mask; see `kernels.sampling.filter_logits`."""
        ...

    def draw_tokens(
        self,
        logits: torch.Tensor,
        candidates: torch.Tensor,
        temperatures: torch.Tensor,
        draws: torch.Tensor,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 `[B, vocabulary]` to token ids and log-probabilities `[D]`; see `kernels.sampling.draw_tokens`."""
        ...

    def warm_up(self, layout: KVLayout, kv_pool: torch.Tensor, vocabulary: int) -> None:
        """Do once what would hold up the first copies of blocks and draws; nothing is stored in the KV pool yet.

        Args:
            layout: of the model's blocks.
            kv_pool: uint8 KV pool.
            vocabulary: tokens that are drawn from; 0 where none are.
        """
        ...

    def use_device(self, device: torch.device) -> None:
        """Make `device` the one that operations called on this thread run on; a thread begins with the first GPU."""
        ...

    def to_device(self, array: np.ndarray, device: torch.device) -> torch.Tensor:
        """A small array on the device; work that is queued there is not waited for."""
        ...

    def fetch(self, results: list[torch.Tensor]) -> Callable[[], list[np.ndarray]]:
        """Start to bring a step's results to the host; returns what waits for them. Wider elements come first."""
        ...

    def set_threads(self, count: int | None) -> None:
        """Run operations of this process on `count` CPU threads; None leaves the number as it is."""
        ...


def choose_backend(device: torch.device | str, dtype: torch.dtype, batch_invariant: bool = False) -> Backend:
    """The fastest backend for models of `dtype` on `device`; nothing else chooses between backends.

    Raises:
        ValueError: when rows are to be independent of their batch (`batch_invariant`), and no backend's are.
    """
    if torch.device(device).type == "cpu" and dtype == torch.float32:
        from espalier.kernels.cpu.backend import CpuBackend  # numba takes half a second to import

        return CpuBackend()
    if torch.device(device).type == "cuda" and find_spec("triton"):
        from espalier.kernels.triton.backend import TritonBackend  # triton comes with torch's builds for GPUs
        from espalier.kernels.triton.plan import Costs
        from espalier.kernels.triton.recording import GraphRecorder

        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return TritonBackend(Costs(processors), GraphRecorder(), batch_invariant=batch_invariant)
    if batch_invariant:
        raise ValueError(f"no backend for {dtype} on {device} computes a row alike in any batch")
    return TorchBackend()
