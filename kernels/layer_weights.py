"""The weights of a decoder, as a backend is given them."""

from dataclasses import dataclass

import torch


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
class OuterWeights:
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
