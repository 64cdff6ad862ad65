"""A decoder over paged KV, from token ids to final hidden states: its specification, contract and torch reference.

A layer is normalisation, q, k and v in one product, their heads' own norms where there are such (Qwen3), rotary
embedding, attention, and the gated MLP (Llama's order). Gemma normalises what attention and MLP give, too, before it is
added to the residual stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
import torch.nn.functional as F

from espalier.kernels.attention import Attend, PrepareAttention, Terms, write_kv
from espalier.kernels.layout import AttentionBatch, LayerKV, StepBatch
from espalier.kernels.linear import Kept
from espalier.kernels.rotary import Rotary, apply_rotary, attention_factor, inverse_frequencies, rotary_table


class Activation(StrEnum):
    """The function that gates an MLP, by the name that checkpoints give it."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The specification of a decoder, from which a backend builds it; norms and biases are there or not in its weights.

    Attributes:
        windows: for each layer, how many positions a token sees, its own the last, or None for all before it; empty
            when no layer has a window.
        rotaries: the kinds of rotary positions that layers have.
        rotary_of: for each layer, which of `rotaries` it has; empty when all have the first.
        activation: of the MLP's gate.
        query_scale: factor on attention's logits; None for `head_dim ** -0.5`.
        embedding_scale: factor on embeddings as they enter the first layer.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    windows: tuple[int | None, ...] = ()
    rotaries: tuple[Rotary, ...] = (Rotary(),)
    rotary_of: tuple[int, ...] = ()
    activation: Activation = Activation.SILU
    query_scale: float | None = None
    embedding_scale: float = 1.0

    def window(self, layer: int) -> int | None:
        """The window of one layer."""
        return self.windows[layer] if self.windows else None

    def rotary(self, layer: int) -> int:
        """Index into `rotaries` of one layer's rotary positions."""
        return self.rotary_of[layer] if self.rotary_of else 0

    @property
    def scale(self) -> float:
        """Factor on attention's logits."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def frequencies(self, device: torch.device | str = "cpu") -> list[tuple[torch.Tensor, float]]:
        """Inverse frequencies, float32 `[pairs that turn]`, and the attention factor, of each of `rotaries`."""
        return [
            (
                inverse_frequencies(rotary.dims or self.head_dim, rotary.theta, rotary.scaling).to(device),
                attention_factor(rotary.scaling),
            )
            for rotary in self.rotaries
        ]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; q, k, v and gate, up are fused so that each is one product.

    Shapes: `qkv [(heads + 2 * kv_heads) * head_dim, hidden]` and its bias, `out [hidden, heads * head_dim]`,
    `gate_up [2 * intermediate, hidden]`, `down [hidden, intermediate]`, norms `[hidden]`, `out_bias [hidden]`.

    Attributes:
        query_norm: `[head_dim]`, the factors of RMSNorm over each query head before its rotation; None without.
        key_norm: the same for key heads.
        attention_post_norm: `[hidden]`, factors of a norm over attention's result before it is added to the residual
            stream; None without.
        mlp_post_norm: the same for the MLP's.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    out_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    attention_post_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingAndNorm:
    """The weights around a decoder's layers.

    Attributes:
        embedding: `[vocabulary, hidden]`.
        norm: `[hidden]`, the factors of RMSNorm after the last layer.
    """

    embedding: torch.Tensor
    norm: torch.Tensor


RECORDED_WITHOUT = "decode steps are recorded already, without these states: tap layers before an engine is made"
"""The fault of a tap that comes too late."""


class UnsupportedShapeError(ValueError):
    """Layers of a shape that a backend's operations have no room for."""


class Layers(Protocol):
    """All layers of one decoder, with their weights in the order that a backend reads fastest.

    Attributes:
        outer: the weights around the layers, as they were given.
        taps: numbers of layers, ascending; the states that enter these are given beside the last; see `tap`.
        raw_tap: the layer whose entering states are given as they are, behind those of `taps`; see `tap_raw`.
    """

    outer: EmbeddingAndNorm
    taps: tuple[int, ...] = ()
    raw_tap: int | None = None

    def tap(self, layers: Sequence[int]) -> None:
        """Have `forward` give the states that enter these layers, too, normalised like the last ones.

        Args:
            layers: from 1 to the last layer's number; those before stay.

        Raises:
            UnsupportedShapeError: there is no such layer, or its states are not given.
        """
        self.taps = tuple(sorted({*self.taps, *(self._checked(layer, first=1) for layer in layers)}))
        self._on_taps()

    def tap_raw(self, layer: int) -> None:
        """Have `forward` give the states that enter one layer as that layer gets them, from which it can be computed.

        Args:
            layer: from 0 to the last layer's number; it takes the place of one before.

        Raises:
            UnsupportedShapeError: there is no such layer, or its states are not given.
        """
        self.raw_tap = self._checked(layer, first=0)
        self._on_taps()

    def states_of(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows that `forward` gave, by where they are from: after the last layer, `taps`, and `raw_tap`."""
        return states.chunk(1 + len(self.taps) + (self.raw_tap is not None), dim=1)

    def last_states(self, states: torch.Tensor) -> torch.Tensor:
        """Those after the last layer, of rows that `forward` gave."""
        return self.states_of(states)[0].contiguous()

    def _checked(self, layer: int, first: int) -> int:
        if not first <= layer < len(self):
            raise UnsupportedShapeError(f"there is no layer {layer} of {first} to {len(self) - 1}")
        return layer

    def _on_taps(self) -> None:
        """Forget what was prepared for other taps."""

    def __len__(self) -> int: ...

    def kept(self) -> Kept | None:
        """All weights of the layers, for `Backend.layers_of_kept`; None where that would save no time."""

    def warm_up(self, layer_kvs: Sequence[LayerKV], decodes: bool, states: torch.Tensor | None = None) -> None:
        """Do once, before the first step over this KV pool, what would hold up the first steps: nothing, usually.

        Args:
            layer_kvs: one `KVLayout.layer_view` per layer.
            decodes: whether many steps are of one token to a sequence.
            states: float32, the KV pool, of a decoder that keeps recurrent states there; None for others.
        """

    def release(self, layer_kvs: Sequence[LayerKV], states: torch.Tensor | None = None) -> None:
        """Let go of what `warm_up` made for this KV pool."""

    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """Take a step's tokens through every layer, writing their keys and values.

        Args:
            step: the tokens.
            layer_kvs: one `KVLayout.layer_view` per layer, all of one KV pool.

        Returns:
            Hidden states after the last norm, `[T, hidden]`; behind them in each row, those of `taps` and `raw_tap`.

        Raises:
            IndexError: for a token id outside of the vocabulary.
        """
        ...


class TorchLayers(Layers):
    """`Layers` in plain torch, operation by operation, for any device and dtype."""

    def __init__(
        self,
        count: int,
        load: Callable[[int], LayerWeights],
        spec: DecoderSpec,
        outer: EmbeddingAndNorm,
        prepare_attention: PrepareAttention,
    ) -> None:
        """Keep `count` layers, which `load` gives one by one."""
        self.outer = outer
        self._layers = [load(index) for index in range(count)]
        self._spec = spec
        self._frequencies = spec.frequencies(outer.embedding.device)
        self._prepare_attention = prepare_attention

    def __len__(self) -> int:
        return len(self._layers)

    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """See `Layers`."""
        s, outer = self._spec, self.outer
        device = outer.embedding.device
        token_ids, positions = step.known_token_ids(device), step.positions.to(device)
        batch = step.attention.to(device)
        tables = [rotary_table(inverse, positions, factor) for inverse, factor in self._frequencies]
        hidden = embedded(token_ids, outer.embedding, s.embedding_scale)  # [T, hidden]
        attend: dict[int, Attend] = {}  # by KV group
        tapped: list[torch.Tensor] = []
        raw: list[torch.Tensor] = []
        for index, (layer, layer_kv) in enumerate(zip(self._layers, layer_kvs, strict=True)):
            if index in self.taps:
                tapped.append(rms_norm(hidden, outer.norm, s.norm_eps))
            if index == self.raw_tap:
                raw.append(hidden)
            group, its = layer_kv.group, batch.of(layer_kv.group)
            if group not in attend:
                attend[group] = self._prepare_attention(layer_kv, its, s.num_heads)
            normed = rms_norm(hidden, layer.attention_norm, s.norm_eps)
            added = self._attention(index, normed, tables[s.rotary(index)], layer_kv, its, attend[group])
            if layer.attention_post_norm is not None:
                added = rms_norm(added, layer.attention_post_norm, s.norm_eps)
            hidden = hidden + added
            gate, up = F.linear(rms_norm(hidden, layer.mlp_norm, s.norm_eps), layer.gate_up).chunk(2, dim=-1)
            added = F.linear(activated(gate, s.activation) * up, layer.down)  # [T, hidden], of [T, inner]
            if layer.mlp_post_norm is not None:
                added = rms_norm(added, layer.mlp_post_norm, s.norm_eps)
            hidden = hidden + added
        last = rms_norm(hidden, outer.norm, s.norm_eps)
        return torch.cat([last, *tapped, *raw], dim=1) if tapped or raw else last

    def _attention(
        self,
        index: int,
        normed: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        layer_kv: LayerKV,
        batch: AttentionBatch,
        attend: Attend,
    ) -> torch.Tensor:
        s, layer = self._spec, self._layers[index]
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, s.head_dim)
        # [T, heads, head_dim], and [T, kv_heads, head_dim] twice
        query, key, value = qkv.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, s.norm_eps)
            key = rms_norm(key, layer.key_norm, s.norm_eps)
        write_kv(layer_kv, apply_rotary(key, *rotary), value, batch)
        mixed = attend(apply_rotary(query, *rotary), layer_kv, Terms(s.scale, s.window(index)))  # [T, heads, head_dim]
        return F.linear(mixed.flatten(1), layer.out, layer.out_bias)  # [T, hidden]


def embedded(token_ids: torch.Tensor, embedding: torch.Tensor, scale: float) -> torch.Tensor:
    """Embeddings of tokens, `[T, hidden]`, times `scale`, which is rounded to their dtype as transformers rounds it."""
    rows = F.embedding(token_ids, embedding)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, in the dtype of `x`; factors in float32 are applied before it is rounded."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of an MLP's gate."""
    return F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")
