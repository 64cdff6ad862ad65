"""Products of a model of transformers, exchanged for the backend's: linear layers, and mixtures of experts.

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
from espalier.kernels.backend import Backend
from espalier.kernels.linear import Linear

Ready = Callable[[torch.Tensor, str, int | None], torch.Tensor]
"""Gives a stored weight or bias, of a layer with this name, as the model is to have it.

The number says how many of its last outputs are refined where weights are quantised. It is None for what never is:
biases, and a router's weight, whose few outputs decide which experts a token goes to.
"""
Groups = Sequence[tuple[str, ...]]
"""Names of linear layers that read the same tensor in a step, such as queries', keys' and values'."""
ROWS = 4
"""A batch is filled up to a multiple of so many rows for torch's operations; so its rows for all experts are, too.

A product sums rows in another order where they are few or a remainder, and a function of single elements treats the
last few of all rows together otherwise than those before; neither is so with multiples of 4 rows of 8 elements.
"""


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
    model: nn.Module, backend: Backend, ready: Ready, groups: Groups = (), waiting: Container[str] = ()
) -> None:
    """Exchange every linear layer of `model` and its experts, in place, but those without memory for their weights.

    Args:
        model: a module of transformers.
        backend: has the products.
        ready: see `Ready`.
        groups: see `layers_by_input`; each is computed as one product.
        waiting: names of those that are not to be exchanged yet.
    """

    def product(name: str, weight: torch.Tensor, bias: torch.Tensor | None, refined: int = 0) -> Linear:
        added = None if bias is None else ready(bias.detach(), name, None)
        return backend.prepare_linear(ready(weight.detach(), name, None if _routes(name) else refined), added)

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
        name, module = ", ".join(names), modules[0]
        if is_experts(module):
            module.espalier_experts = [
                backend.group_linears([product(name, *each) for each in _taken(module, stack)])
                for stack in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
            ]
            _mark_filled(module)
            continue
        weights = [each.weight if type(each) is nn.Linear else each.weight.T.contiguous() for each in modules]
        biases, sizes = [each.bias for each in modules], [len(weight) for weight in weights]
        bias = None
        if any(each is not None for each in biases):
            pairs = zip(weights, biases, strict=True)
            bias = torch.cat([weight.new_zeros(len(weight)) if each is None else each for weight, each in pairs])
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        shared = SharedProduct(product(name, weight, bias, refined_outputs(sizes)), sizes)
        for index, (parent, each) in enumerate(zip(parents, names, strict=True)):
            setattr(parent, each.rpartition(".")[2], ExchangedLinear(shared, index))
            _mark_filled(parent)


def _taken(module: Any, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """The weight, `[out, in]`, and bias of each expert, out of a stack of them that the module lets go of."""
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    setattr(module, name, None)
    for weight, bias in zip(weights.transpose(1, 2) if module.is_transposed else weights, biases, strict=True):
        yield weight.contiguous(), bias


def _mark_filled(module: Any) -> None:
    """Keep transformers, which fills what a checkpoint lacks, from filling weights that were exchanged."""
    if not any(True for _ in module.buffers(recurse=False)):
        module._is_hf_initialized = True


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
