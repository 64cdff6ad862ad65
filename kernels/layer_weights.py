"""The weights of a decoder's layers, as every path is given them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the layers of a decoder have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; q, k, v and gate, up are fused so that each is one product.

    Shapes: `qkv [(heads + 2 * kv_heads) * head_dim, hidden]` and its bias, `out [hidden, heads * head_dim]`,
    `gate_up [2 * intermediate, hidden]`, `down [hidden, intermediate]`, norms `[hidden]`.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
