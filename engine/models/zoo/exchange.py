"""Products of a model of transformers, exchanged for the backend's: linear layers and experts.

A backend whose rows are independent of their batch gives a request the same bits in any company; torch's products do
not. Quantised weights come in the same way.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from espalier.engine.models.quantization import refined_outputs
from espalier.engine.models.zoo.experts import exchange_experts, is_experts
from espalier.kernels.backend import Backend
from espalier.kernels.linear import GroupedLinear, Linear

Prepared = Callable[[torch.Tensor, str], torch.Tensor]
Quantised = Callable[[torch.Tensor, str, int], torch.Tensor]
Groups = Sequence[tuple[str, ...]]
"""Names of linear layers that read the same tensor in a step, such as queries', keys' and values'."""


class ExchangedLinear(nn.Module):
    """A linear layer that multiplies by a backend's product, or by its share of one."""

    def __init__(self, product: "SharedProduct", index: int = 0) -> None:
        """Be the layer at `index` of those that share `product`."""
        super().__init__()
        self.product = product
        self._index = index
        self.in_features, self.out_features = product.linear.in_features, product.sizes[index]

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was given, for classes that read it; a quantised one is that of the whole product."""
        weight = self.product.linear.weight
        return weight.split(self.product.sizes)[self._index] if isinstance(weight, torch.Tensor) else weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, or None."""
        bias = self.product.linear.bias
        return None if bias is None else bias.split(self.product.sizes)[self._index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        return self.product(x, self._index)


class SharedProduct:
    """One product for layers that read the same tensor: computed for the first, and kept until the last has its part.

    Attributes:
        linear: the backend's product, with the layers' outputs one after another.
        sizes: how many outputs each of them has.
    """

    def __init__(self, linear: Linear, sizes: Sequence[int]) -> None:
        self.linear = linear
        self.sizes = list(sizes)
        self._kept: tuple[torch.Tensor | None, tuple[torch.Tensor, ...]] = None, ()

    def __call__(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The outputs of the layer at `index` for `x`, `[..., in]`."""
        given, parts = self._kept
        if given is not x:
            whole = self.linear(x.reshape(-1, self.linear.in_features)).view(*x.shape[:-1], self.linear.out_features)
            if len(self.sizes) == 1:
                return whole
            parts = tuple(whole.split_with_sizes(self.sizes, dim=-1))
        self._kept = (None, ()) if index == len(self.sizes) - 1 else (x, parts)
        return parts[index]


def layers_by_input(model: nn.Module, run: Callable[[], object]) -> Groups:
    """Linear layers of `model` that read the same tensor and no other while `run` computes a step.

    Routers are left out: they are not quantised as the others are.
    """
    calls: list[tuple[str, torch.Tensor]] = []  # tensors are kept, so that none takes another's place

    def note(name: str, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        calls.append((name, inputs[0]))

    hooks = [
        module.register_forward_pre_hook(partial(note, name))
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not _routes(name)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(name for name, _ in calls)
    groups: dict[int, list[str]] = {}
    for name, x in calls:
        if times[name] == 1:
            groups.setdefault(id(x), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def exchange(
    model: nn.Module,
    backend: Backend,
    prepared: Prepared,
    quantised: Quantised,
    groups: Groups = (),
    waiting: Container[str] = (),
) -> None:
    """Exchange every linear layer of `model` and its experts, in place, but those without memory for their weights.

    Args:
        model: a module of transformers.
        backend: has the products.
        prepared: gives a stored weight or bias, of a layer with this name, the dtype of the model.
        quantised: the same of a weight that is quantised where weights are, with how many of its last outputs are
            refined; a router's is not: its few outputs decide which experts a token goes to.
        groups: see `layers_by_input`; each is computed as one product.
        waiting: names of those that are not to be exchanged yet.
    """

    def kept(name: str, weight: torch.Tensor, bias: torch.Tensor | None, refined: int = 0) -> Linear:
        added, weight = None if bias is None else prepared(bias.detach(), name), weight.detach()
        given = prepared(weight, name) if _routes(name) else quantised(weight, name, refined)
        return backend.prepare_linear(given, added)

    def experts(name: str, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> GroupedLinear:
        pairs = zip(weights, biases, strict=True)
        return backend.group_linears([kept(name, weight.contiguous(), bias) for weight, bias in pairs])

    found = {
        name: (parent, module)
        for parent, name, module in _products_of(model)
        if name not in waiting and not hasattr(module, "espalier_experts")
        if not any(weight.is_meta for weight in module.parameters())
    }
    shared_names = {name for names in groups for name in names}
    alone = [(name,) for name in found if name not in shared_names]
    for names in (*(names for names in groups if found.keys() >= set(names)), *alone):
        parents, modules = zip(*(found[name] for name in names), strict=True)
        name = ", ".join(names)
        if is_experts(modules[0]):
            exchange_experts(modules[0], partial(experts, name))
            _mark_filled(modules[0])
            continue
        weights = [each.weight if type(each) is nn.Linear else each.weight.T.contiguous() for each in modules]
        sizes = [len(weight) for weight in weights]
        linear = kept(name, _joined(weights), _joined_biases(modules, weights), refined_outputs(sizes))
        shared = SharedProduct(linear, sizes)
        for index, (parent, each) in enumerate(zip(parents, names, strict=True)):
            setattr(parent, each.rpartition(".")[2], ExchangedLinear(shared, index))
            _mark_filled(parent)


def _mark_filled(module: Any) -> None:
    """Keep transformers, which fills what a checkpoint lacks, from filling weights that were exchanged."""
    if not any(True for _ in module.buffers(recurse=False)):
        module._is_hf_initialized = True


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([part.detach() for part in parts])


def _joined_biases(modules: Sequence[Any], weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if all(module.bias is None for module in modules):
        return None
    zeros = [weight.new_zeros(len(weight)) for weight in weights]
    pairs = zip(modules, zeros, strict=True)
    return _joined([zero if module.bias is None else module.bias for module, zero in pairs])


def product_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """Outputs and inputs of every product that `exchange` would exchange."""
    shapes: list[tuple[int, int]] = []
    for _, _, module in _products_of(model):
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3] if is_experts(module) else []
        matrices = [tuple(p.shape[1:]) for p in stacked for _ in range(len(p))]
        shapes += matrices if stacked else [tuple(module.weight.shape)]  # type: ignore[arg-type,list-item]
    return shapes


def _products_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every linear layer and module of experts: the module it belongs to, its full name, and itself."""
    from transformers.pytorch_utils import Conv1D

    for parent_name, parent in model.named_modules():
        for name, module in parent.named_children():
            if type(module) in (nn.Linear, Conv1D) or is_experts(module):
                yield parent, f"{parent_name}.{name}".removeprefix("."), module


def _routes(name: str) -> bool:
    return name.endswith((".gate", "router")) or ".router." in name
