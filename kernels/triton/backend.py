"""The backend for GPUs: Triton's kernels, with matrix products by torch."""

from collections.abc import Callable, Sequence

import torch

from espalier.kernels.attention import Call, CallSteps
from espalier.kernels.layers import DecoderSpec, EmbeddingAndNorm, Layers, LayerWeights
from espalier.kernels.layout import KVLayout
from espalier.kernels.linear import GroupedLinear, Linear
from espalier.kernels.sampling import Filters
from espalier.kernels.torch_backend import TorchBackend
from espalier.kernels.triton.cache import TokenMajorLayout, copy_blocks
from espalier.kernels.triton.calls import CallPlanner
from espalier.kernels.triton.layers import TritonLayers
from espalier.kernels.triton.linear import StackedLinear
from espalier.kernels.triton.plan import Costs
from espalier.kernels.triton.pointwise import rms_norm, take_drawn
from espalier.kernels.triton.recording import Recorder
from espalier.kernels.triton.recurrent import causal_convolution, gated_recurrence, selective_scan
from espalier.kernels.triton.rotation import rotate_halves
from espalier.kernels.triton.row_linear import RowLinear
from espalier.kernels.triton.sampling import draw_tokens
from espalier.kernels.triton.steps import fetch, to_device

_FIXED_CHUNK = 256


class TritonBackend(TorchBackend):
    """See `backend.Backend`.

    Attributes:
        rows_are_independent: whether products are Triton's own too, and portions of attention are of one size: slower,
            but a row has the same bits in any batch.
    """

    layout: type[KVLayout] = TokenMajorLayout
    reads_any_logits = True

    def __init__(
        self, costs: Costs | None = None, recorder: Recorder | None = None, *, batch_invariant: bool = False
    ) -> None:
        """Plan attention by `costs` of the device; `recorder` records decode steps, which are replayed then."""
        self._costs = costs or Costs()
        self._recorder = recorder
        self.rows_are_independent = batch_invariant
        # cuBLAS may split few rows' long sums, and would add the parts in half precision.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def prepare_layers(
        self, count: int, load: Callable[[int], LayerWeights], spec: DecoderSpec, outer: EmbeddingAndNorm
    ) -> Layers:
        """See `Backend`."""
        chunk = _FIXED_CHUNK if self.rows_are_independent else None
        return TritonLayers(count, load, spec, outer, self.prepare_linear, self._costs, chunk, self._recorder)

    def prepare_calls(self, calls: Sequence[Call], dtype: torch.dtype, device: torch.device) -> CallSteps:
        """See `Backend`."""
        chunk = _FIXED_CHUNK if self.rows_are_independent else None
        return CallPlanner(calls, self._costs, chunk, dtype, device, self._recorder)

    def group_linears(self, products: Sequence[Linear]) -> GroupedLinear:
        """See `Backend`."""
        if any(hasattr(product.weight, "__tensor_flatten__") for product in products):
            return GroupedLinear(products)  # quantised, by the library's products
        return StackedLinear(products, fixed=self.rows_are_independent)

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """See `Backend`."""
        return RowLinear(weight, bias) if self.rows_are_independent else Linear(weight, bias)

    copy_blocks = staticmethod(copy_blocks)
    draw_tokens = staticmethod(draw_tokens)
    causal_convolution = staticmethod(causal_convolution)
    gated_recurrence = staticmethod(gated_recurrence)
    selective_scan = staticmethod(selective_scan)
    fuses_pointwise = True
    rms_norm = staticmethod(rms_norm)
    rotate_halves = staticmethod(rotate_halves)
    to_device = staticmethod(to_device)
    fetch = staticmethod(fetch)

    def draw_filtered(
        self,
        logits: torch.Tensor,
        candidates: torch.Tensor,
        temperatures: torch.Tensor,
        draws: torch.Tensor,
        rows: torch.Tensor,
        filters: Filters,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend`."""
        return draw_tokens(logits, candidates, temperatures, draws, rows, filters)

    def warm_up(self, layout: KVLayout, kv_pool: torch.Tensor, vocabulary: int) -> None:
        """See `Backend`: Triton compiles a kernel when it is first launched.

        It compiles it anew for numbers that are 1 or multiples of 16, and for addresses that are none.
        """
        for count in (1, 2):
            copy_blocks(layout, kv_pool, [0] * count, [0] * count)
        if not vocabulary:
            return
        zeros, first = torch.zeros(1, device=kv_pool.device), torch.zeros(1, dtype=torch.int64, device=kv_pool.device)
        logits, filters = torch.zeros((1, vocabulary), device=kv_pool.device), Filters(first, first, zeros + 1, zeros)
        for dtype in (layout.dtype, torch.float32):  # with penalties, candidates are float32
            for its in (None, filters):
                draw_tokens(logits.to(layout.dtype), logits.to(dtype), zeros, zeros.double(), first, its)
        for count in (1, 16, 17):
            take_drawn(torch.zeros(count, dtype=torch.int32, device=kv_pool.device), first)

    def use_device(self, device: torch.device) -> None:
        """See `Backend`: Triton launches on the thread's device, wherever tensors are."""
        if device.index is not None:
            torch.cuda.set_device(device)
