"""A decoder over paged KV, from token ids to final hidden states: the contract and the torch reference.

A layer is normalisation, q, k and v in one product, their heads' own norms where there are such (Qwen3), rotary
embedding, attention, and the gated MLP (Llama's order).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from espalier.kernels.attention import Attend, PrepareAttention
from espalier.kernels.batch import AttentionBatch, StepBatch
from espalier.kernels.cache import write_kv
from espalier.kernels.layout import LayerKV
from espalier.kernels.rotary import apply_rotary, rotary_table


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a decoder's layers.

    Attributes:
        windows: for each layer, how many positions a token sees, its own the last, or None for all before it; empty
            when no layer has a window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        """The window of one layer."""
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; q, k, v and gate, up are fused so that each is one product.

    Shapes: `qkv [(heads + 2 * kv_heads) * head_dim, hidden]` and its bias, `out [hidden, heads * head_dim]`,
    `gate_up [2 * intermediate, hidden]`, `down [hidden, intermediate]`, norms `[hidden]`, `out_bias [hidden]`.

    Attributes:
        query_norm: `[head_dim]`, the factors of RMSNorm over each query head before its rotation; None without.
        key_norm: the same for key heads.
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


@dataclass(frozen=True, slots=True)
class EmbeddingAndNorm:
    """The weights around a decoder's layers.

    Attributes:
        embedding: `[vocabulary, hidden]`.
        norm: `[hidden]`, the factors of RMSNorm after the last layer.
        inverse_frequencies: of the rotary embedding, float32 `[head_dim / 2]`; see `kernels.rotary`.
        attention_factor: factor on the rotary embedding's cosines and sines.
    """

    embedding: torch.Tensor
    norm: torch.Tensor
    inverse_frequencies: torch.Tensor
    attention_factor: float = 1.0


class UnsupportedShapeError(ValueError):
    """Layers of a shape that a backend's operations have no room for."""


class Layers(Protocol):
    """All layers of one decoder, with their weights in the order that a backend reads fastest.

    Attributes:
        outer: the weights around the layers, as they were given.
    """

    outer: EmbeddingAndNorm

    def __len__(self) -> int: ...

    def weights(self, index: int) -> LayerWeights:
        """One layer's weights as they were given."""
        ...

    def warm_up(self, layer_kvs: Sequence[LayerKV], decodes: bool) -> None:
        """Do once, before the first step over this KV pool, what would hold up the first steps: nothing, usually.

        Args:
            layer_kvs: one `KVLayout.layer_view` per layer.
            decodes: whether many steps are of one token to a sequence.
        """

    def release(self, layer_kvs: Sequence[LayerKV]) -> None:
        """Let go of what `warm_up` made for this KV pool."""

    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """Take a step's tokens through every layer, writing their keys and values.

        Args:
            step: the tokens.
            layer_kvs: one `KVLayout.layer_view` per layer, all of one KV pool.

        Returns:
            Hidden states after the last norm, `[T, hidden]`.

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
        shape: LayerShape,
        outer: EmbeddingAndNorm,
        prepare_attention: PrepareAttention,
    ) -> None:
        """Keep `count` layers, which `load` gives one by one."""
        self.outer = outer
        self._layers = [load(index) for index in range(count)]
        self._shape = shape
        self._prepare_attention = prepare_attention

    def __len__(self) -> int:
        return len(self._layers)

    def weights(self, index: int) -> LayerWeights:
        """See `Layers`."""
        return self._layers[index]

    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """See `Layers`."""
        eps, outer = self._shape.norm_eps, self.outer
        device = outer.embedding.device
        token_ids, positions = step.known_token_ids(device), step.positions.to(device)
        batch = step.attention.to(device)
        cos, sin = rotary_table(outer.inverse_frequencies, positions, outer.attention_factor)
        hidden = F.embedding(token_ids, outer.embedding)  # [T, hidden]
        attend: dict[int, Attend] = {}  # by KV group
        for index, (layer, layer_kv) in enumerate(zip(self._layers, layer_kvs, strict=True)):
            group, its = layer_kv.group, batch.of(layer_kv.group)
            if group not in attend:
                attend[group] = self._prepare_attention(layer_kv, its, self._shape.num_heads)
            normed = F.rms_norm(hidden, layer.attention_norm.shape, layer.attention_norm, eps)
            hidden = hidden + self._attention(index, normed, cos, sin, layer_kv, its, attend[group])
            normed = F.rms_norm(hidden, layer.mlp_norm.shape, layer.mlp_norm, eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)  # [T, inner]
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(hidden, outer.norm.shape, outer.norm, eps)

    def _attention(
        self,
        index: int,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_kv: LayerKV,
        batch: AttentionBatch,
        attend: Attend,
    ) -> torch.Tensor:
        s, layer = self._shape, self._layers[index]
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, s.head_dim)
        # [T, heads, head_dim], and [T, kv_heads, head_dim] twice
        query, key, value = qkv.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = F.rms_norm(query, layer.query_norm.shape, layer.query_norm, s.norm_eps)
            key = F.rms_norm(key, layer.key_norm.shape, layer.key_norm, s.norm_eps)
        write_kv(layer_kv, apply_rotary(key, cos, sin), value, batch)
        query = apply_rotary(query, cos, sin)
        mixed = attend(query, layer_kv, s.head_dim**-0.5, s.window(index))  # [T, heads, head_dim]
        return F.linear(mixed.flatten(1), layer.out, layer.out_bias)  # [T, hidden]
