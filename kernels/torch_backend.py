"""The contract of a backend, in plain torch: the reference of every operation, for any device and dtype."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from espalier.kernels.attention import (
    Call,
    CallSteps,
    GatheredAttention,
    PrepareAttention,
    TorchStepCalls,
    write_kv,
)
from espalier.kernels.layers import DecoderSpec, EmbeddingAndNorm, Layers, LayerWeights, TorchLayers, rms_norm
from espalier.kernels.layout import KVLayout, copy_blocks
from espalier.kernels.linear import GroupedLinear, Kept, Linear, QuantizedPacker
from espalier.kernels.recurrent import causal_convolution, gated_recurrence, selective_scan, state_space_scan
from espalier.kernels.rotary import rotate_halves
from espalier.kernels.sampling import Filters, draw_tokens, filter_logits, mask_tokens, penalize_tokens


class TorchBackend:
    """Every operation of the engine that depends on the device. It holds no state of any engine or model.

    A subclass that is faster at some operations inherits the others. Whoever calls an operation in each step looks it
    up once and keeps it.

    Attributes:
        layout: how the blocks of a model lie in the KV pool, so that this backend's attention reads them fast.
        rows_are_independent: whether each row of a result has the same bits whatever other rows its batch holds, so
            that a request gives the same tokens alone and beside others.
        prepare_attention: attention of one step, for all of its layers; see `kernels.attention.PrepareAttention`.
        write_kv: see `kernels.attention.write_kv`.
        copy_blocks: see `kernels.layout.copy_blocks`.
        penalize_tokens: see `kernels.sampling.penalize_tokens`.
        mask_tokens: see `kernels.sampling.mask_tokens`.
        filter_logits: see `kernels.sampling.filter_logits`.
        draw_tokens: see `kernels.sampling.draw_tokens`.
        reads_any_logits: whether operations on logits read them in any dtype; else they are given float32.
        keeps_int8: whether weights in int8 can be kept for a later process; see `layers_of_kept`.
        causal_convolution: see `kernels.recurrent`, as of the three others there.
        fuses_pointwise: whether `rms_norm` and `rotate_halves` take less time than other code's operations, one by one.
        rms_norm: see `kernels.layers.rms_norm`.
        rotate_halves: see `kernels.rotary.rotate_halves`.
    """

    layout: type[KVLayout] = KVLayout
    rows_are_independent = False
    reads_any_logits = False
    keeps_int8 = False
    fuses_pointwise = False
    prepare_attention: PrepareAttention = GatheredAttention
    write_kv = staticmethod(write_kv)
    rms_norm = staticmethod(rms_norm)
    rotate_halves = staticmethod(rotate_halves)
    causal_convolution = staticmethod(causal_convolution)
    gated_recurrence = staticmethod(gated_recurrence)
    selective_scan = staticmethod(selective_scan)
    state_space_scan = state_space_scan
    copy_blocks = staticmethod(copy_blocks)
    penalize_tokens = staticmethod(penalize_tokens)
    mask_tokens = staticmethod(mask_tokens)
    filter_logits = staticmethod(filter_logits)
    draw_tokens = staticmethod(draw_tokens)

    def prepare_layers(
        self, count: int, load: Callable[[int], LayerWeights], spec: DecoderSpec, outer: EmbeddingAndNorm
    ) -> Layers:
        """The layers of a decoder, ready to run; attention is theirs.

        Args:
            count: layers of the decoder, at least one.
            load: gives the weights of one layer, quantised or not; called once for each layer, in order.
            spec: of the decoder.
            outer: the weights around the layers, of the same device and dtype.

        Raises:
            UnsupportedShapeError: when the backend has no room for such layers.
        """
        return TorchLayers(count, load, spec, outer, self.prepare_attention)

    def layers_of_kept(self, kept: Kept, count: int, spec: DecoderSpec, outer: EmbeddingAndNorm) -> Layers:
        """The layers whose `kept` is given, of the same kind of backend; see `prepare_layers`."""
        raise NotImplementedError

    def keep_weight(self, weight: torch.Tensor) -> Kept | None:
        """A quantised weight, for `weight_of_kept`; None where quantising it anew takes no longer."""
        del weight

    def weight_of_kept(self, kept: Kept) -> torch.Tensor:
        """The weight that `keep_weight` was given, of the same kind of backend."""
        raise NotImplementedError

    def prepare_calls(self, calls: Sequence[Call], dtype: torch.dtype, device: torch.device) -> CallSteps:
        """Steps of a decoder whose layers are not the engine's.

        Args:
            calls: what every step of it asks for.
            dtype: of queries, keys and values.
            device: where queries, keys and values lie.

        Raises:
            UnsupportedShapeError: when the backend has no room for a call's heads.
        """
        del calls, dtype
        return CallSteps(partial(TorchStepCalls, self.prepare_attention, self.write_kv, device))

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A product with one weight, `[out, in]`, and a bias, `[out]`."""
        return Linear(weight, bias)

    def group_linears(self, products: Sequence[Linear]) -> GroupedLinear:
        """Products of one shape, each for rows of its own."""
        return GroupedLinear(products)

    def quantized_packer(self) -> QuantizedPacker | None:
        """Packer of quantised weights for this backend's own product; None where the quantising library has one."""

    def draw_filtered(
        self,
        logits: torch.Tensor,
        candidates: torch.Tensor,
        temperatures: torch.Tensor,
        draws: torch.Tensor,
        rows: torch.Tensor,
        filters: Filters,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`draw_tokens` from what `filters` leave of the candidates."""
        limits = temperatures, *filters[1:]
        if len(filters.rows) == len(candidates):
            left = self.filter_logits(candidates, *limits)
        else:
            left = candidates.clone()
            left[filters.rows] = self.filter_logits(candidates[filters.rows], *(each[filters.rows] for each in limits))
        return self.draw_tokens(logits, left, temperatures, draws, rows)

    def warm_up(self, layout: KVLayout, kv_pool: torch.Tensor, vocabulary: int) -> None:
        """Do once what would hold up the first copies of blocks and draws: nothing, unless a subclass says otherwise.

        Args:
            layout: of the model's blocks.
            kv_pool: uint8 KV pool; nothing is stored in it yet.
            vocabulary: tokens that are drawn from; 0 where none are.
        """

    def use_device(self, device: torch.device) -> None:
        """Make `device` the one that operations called on this thread run on; a thread begins with the first GPU.

        torch's own operations run where their tensors are, whatever the thread's device.
        """

    @staticmethod
    def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
        """A small array on the device; subclasses for GPUs do not wait for work that is queued there."""
        return torch.from_numpy(array).to(device)

    @staticmethod
    def fetch(results: list[torch.Tensor]) -> Callable[[], list[np.ndarray]]:
        """Start to bring a step's results to the host; returns what waits for them. Wider elements come first."""
        return lambda: [tensor.cpu().numpy() for tensor in results]

    def set_threads(self, count: int | None) -> None:
        """Run operations of this process on `count` CPU threads; None leaves the number as it is."""
        if count:
            torch.set_num_threads(count)
