"""Products of a model of transformers, exchanged for the backend's: linear layers and experts.

A backend whose rows are independent of their batch gives a request the same bits in any company; torch's products do
not. Quantised weights come in the same way.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from espalier.engine.models.zoo.experts import exchange_experts, is_experts
from espalier.kernels.linear import Linear

PrepareLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
Prepared = Callable[[torch.Tensor, str], torch.Tensor]


class ExchangedLinear(nn.Module):
    """A linear layer that multiplies by a backend's product."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was given, for classes that read it."""
        return self.linear.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, or None."""
        return self.linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def exchange(model: nn.Module, product: PrepareLinear, prepared: Prepared, quantised: Prepared) -> int:
    """Exchange every linear layer of `model` and its experts, in place.

    Args:
        model: a module of transformers.
        product: the backend's product with one weight and bias.
        prepared: gives a stored weight or bias, of a layer with this name, the dtype of the model.
        quantised: the same of a weight that is quantised where weights are; a router's is not: its few outputs decide
            which experts a token goes to.

    Returns:
        Bytes of the exchanged weights.
    """
    size = 0

    def kept(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        added = None if bias is None else prepared(bias.detach(), name)
        return product((prepared if _routes(name) else quantised)(weight.detach(), name), added)

    for parent, name, module in list(_products_of(model)):
        if is_experts(module):
            size += exchange_experts(module, partial(kept, name))
            continue
        linear: Any = module
        weight = linear.weight if type(module) is nn.Linear else linear.weight.T.contiguous()
        exchanged = ExchangedLinear(kept(name, weight, linear.bias))
        size += exchanged.linear.nbytes
        setattr(parent, name.rpartition(".")[2], exchanged)
    return size


def product_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """Outputs and inputs of every product that `exchange` would exchange."""
    shapes: list[tuple[int, int]] = []
    for _, _, module in _products_of(model):
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3] if is_experts(module) else []
        matrices = [tuple(p.shape[1:]) for p in stacked for _ in range(len(p))]
        shapes += matrices if stacked else [tuple(module.weight.shape)]  # type: ignore[arg-type]
    return shapes


def _products_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every linear layer and module of experts: the module it belongs to, its full name, and itself."""
    from transformers.pytorch_utils import Conv1D

    for parent_name, parent in model.named_modules():
        for name, module in parent.named_children():
            if type(module) in (nn.Linear, Conv1D) or is_experts(module):
                yield parent, f"{parent_name}.{name}", module


def _routes(name: str) -> bool:
    return name.endswith((".gate", "router")) or ".router." in name
