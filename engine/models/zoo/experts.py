"""Mixtures of experts as transformers stores them, computed expert by expert with the backend's products."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from espalier.kernels.linear import Linear

NAME = "espalier"
"""The name that the function is registered by."""
ROWS = 4
"""A batch is filled up to a multiple of so many rows for torch's operations; so its rows for all experts are, too.

A product sums rows in another order where they are few or a remainder, and a function of single elements treats the
last few of all rows together otherwise than those before; neither is so with multiples of 4 rows of 8 elements.
"""
Product = Callable[[torch.Tensor, torch.Tensor | None], Linear]


def exchange_experts(module: Any, product: Product) -> None:
    """Exchange the stacked weights of a module of experts for one product each.

    Args:
        module: made by transformers' `use_experts_implementation`.
        product: the backend's product with a weight `[out, in]` and a bias.
    """
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    stacked = [_products(module, name, product) for name in names]
    module.espalier_experts = list(zip(*stacked, strict=True))


def _products(module: Any, name: str, product: Product) -> list[Linear]:
    """One product for each expert, in the place of the stacked weights, which are let go of."""
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    setattr(module, name, None)
    products = []
    for weight, bias in zip(weights, biases, strict=True):
        products.append(product(weight.T.contiguous() if module.is_transposed else weight, bias))
    return products


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
    tokens, k = top_k_index.shape
    order = top_k_index.reshape(-1).argsort(stable=True)  # [T * k], sorted by expert
    ends = torch.bincount(top_k_index.reshape(-1), minlength=len(products))[: len(products)].cumsum(0).tolist()
    rows = hidden[order // k]
    bounds = zip(pairwise([0, *ends]), products, strict=True)
    shares = [(slice(start, end), pair) for (start, end), pair in bounds if end > start]
    inner, output = rows.new_zeros(len(rows), products[0][0].out_features), torch.zeros_like(rows)
    for share, (up, _) in shares:
        inner[share] = up(rows[share])
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # of all experts at once
    for share, (_, down) in shares:
        output[share] = down(inner[share])
    if module.has_post_expert_norm:
        output = module.post_expert_norm(output)
    weighted = torch.empty_like(output)
    weighted[order] = output * top_k_weights.reshape(-1)[order, None].to(output.dtype)
    return weighted.view(tokens, k, -1).sum(dim=1)


def is_experts(module: nn.Module) -> bool:
    """True for modules whose experts are looked up by the name in their configuration."""
    return hasattr(module, "has_post_expert_norm") and hasattr(module, "is_transposed")
