"""Attention of decoders whose layers are not the engine's: one call after another, each over KV of its own shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from espalier.kernels.attention import Attend, PrepareAttention, Terms
from espalier.kernels.batch import AttentionBatch, StepBatch
from espalier.kernels.layout import LayerKV


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention, which every step makes.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        key_dim: elements of a head of queries and keys.
        value_dim: elements of a head of values.
        window: how many positions a token sees, its own the last, or None for all before it.
        slot: which of the KV layers it reads.
        writes: whether its keys and values are new; else an earlier call of the step has written them.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    slot: int
    writes: bool


class StepCalls(Protocol):
    """The calls of one step, on the device.

    Attributes:
        token_ids: `[T]`, those just drawn filled in.
        positions: `[T]`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor

    def write(self, layer_kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the step's keys `[T, kv_heads, key_dim]` and values `[T, kv_heads, value_dim]` to their blocks."""

    def attend(self, call: Call, query: torch.Tensor, layer_kv: LayerKV, terms: Terms) -> torch.Tensor:
        """Attention of a call, `[T, heads, value_dim]`, with terms of its window; see `kernels.attention.Attend`."""
        ...


PrepareStep = Callable[[StepBatch, Sequence[LayerKV]], StepCalls]
"""Prepares a step, given what it computes and the KV of all layers."""


class TorchStepCalls:
    """`StepCalls` by a backend's attention, which reads each batch on the device."""

    def __init__(
        self,
        prepare_attention: PrepareAttention,
        write_kv: Callable[[LayerKV, torch.Tensor, torch.Tensor, AttentionBatch], None],
        device: torch.device,
        step: StepBatch,
        _: Sequence[LayerKV],
    ) -> None:
        self.token_ids, self.positions = step.known_token_ids(device), step.positions.to(device)
        self._batch = step.attention.to(device)
        self._prepare_attention = prepare_attention
        self._write_kv = write_kv
        self._attend: dict[tuple[int, int], Attend] = {}  # by KV group and query heads

    def write(self, layer_kv: LayerKV, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `StepCalls`."""
        self._write_kv(layer_kv, key, value, self._batch.of(layer_kv.group))

    def attend(self, call: Call, query: torch.Tensor, layer_kv: LayerKV, terms: Terms) -> torch.Tensor:
        """See `StepCalls`."""
        alike = (layer_kv.group, call.heads)
        if (attend := self._attend.get(alike)) is None:
            batch = self._batch.of(layer_kv.group)
            attend = self._attend[alike] = self._prepare_attention(layer_kv, batch, call.heads)
        return attend(query, layer_kv, terms)
