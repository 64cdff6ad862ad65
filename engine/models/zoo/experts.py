"""Mixtures of experts as transformers stores them, computed expert by expert with the backend's products."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from espalier.kernels.linear import GroupedLinear

NAME = "espalier"
"""The name that the function is registered by."""
ROWS = 4
"""A batch is filled up to a multiple of so many rows for torch's operations; so its rows for all experts are, too.

A product sums rows in another order where they are few or a remainder, and a function of single elements treats the
last few of all rows together otherwise than those before; neither is so with multiples of 4 rows of 8 elements.
"""
Products = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], GroupedLinear]
"""Makes the products of all experts of their weights, `[out, in]` each, and biases."""


def exchange_experts(module: Any, products: Products) -> None:
    """Exchange the stacked weights of a module of experts, which are let go of, for the backend's products.

    Args:
        module: made by transformers' `use_experts_implementation`.
        products: makes them.
    """
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    module.espalier_experts = [_exchanged(module, name, products) for name in names]


def _exchanged(module: Any, name: str, products: Products) -> GroupedLinear:
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    setattr(module, name, None)
    return products(weights.transpose(1, 2) if module.is_transposed else weights, biases)


def experts_function(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function for experts that is registered with transformers.

    Args:
        module: the experts, exchanged; others give zeros, for a decoder whose shapes alone are asked for.
        hidden: `[T, hidden]`.
        top_k_index: `[T, k]`, the experts of each token; an index beyond them means none.
        top_k_weights: `[T, k]`.

    Returns:
        `[T, hidden]`.
    """
    if (products := getattr(module, "espalier_experts", None)) is None:
        return torch.zeros_like(hidden)
    up, down = products
    tokens, k = top_k_index.shape
    experts, order = top_k_index.reshape(-1).sort(stable=True)  # [T * k]
    ends = torch.searchsorted(experts, torch.arange(1, len(up) + 1, device=experts.device, dtype=experts.dtype))
    inner = up(hidden[order // k], ends)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # of all experts at once
    output = down(inner, ends)
    if module.has_post_expert_norm:
        output = module.post_expert_norm(output)
    weighted = torch.empty_like(output)
    weighted[order] = output * top_k_weights.reshape(-1)[order, None].to(output.dtype)
    return weighted.view(tokens, k, -1).sum(dim=1)


def is_experts(module: nn.Module) -> bool:
    """True for modules whose experts are looked up by the name in their configuration."""
    return hasattr(module, "has_post_expert_norm") and hasattr(module, "is_transposed")
