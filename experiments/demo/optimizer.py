"""Muon for matrices, AdamW for everything else, and the learning-rate schedule.

`torch.optim.Muon` orthogonalises in bfloat16, which CPUs without bfloat16 units run several times slower than float32,
and one matrix at a time. This one works in the parameters' own dtype and on all matrices of a shape at once.
Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Returns matrices with the same singular vectors and singular values near one.

    Args:
        matrices: [count, rows, columns].
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; for two-dimensional parameters only."""

    def __init__(
        self, params: Iterable[nn.Parameter] | list[dict[str, Any]], lr: float, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for shape, parameters in shapes.items():
                directions = torch.stack([self._direction(p, group["momentum"]) for p in parameters])
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonalise(directions), strict=True):
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """Advances the momentum buffer and returns Nesterov's direction."""
        assert parameter.grad is not None
        buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        buffer.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)


def make_optimizers(
    model: nn.Module, trunk_lr: float, trunk_output_lr: float, new_lr: float, other_lr: float, trunk: int
) -> list[Any]:
    """Returns Muon over the layers' matrices and AdamW over embeddings, norms, biases and heads.

    Args:
        model: A Qwen2 model with its decoder under `model`.
        trunk_lr: Muon's rate for what reads the stream in the first `trunk` layers.
        trunk_output_lr: Muon's rate for what writes to it there.
        new_lr: Muon's rate for the layers above.
        other_lr: AdamW's rate.
        trunk: Number of layers that `trunk_lr` governs.
    """
    groups: dict[str, list[nn.Parameter]] = {"trunk": [], "trunk output": [], "new": [], "other": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = name.split(".")
        if parameter.ndim == 2 and "layers" in parts:
            index = int(parts[parts.index("layers") + 1])
            writes = parts[-2] in ("o_proj", "down_proj")
            groups["new" if index >= trunk else "trunk output" if writes else "trunk"].append(parameter)
        else:
            groups["other"].append(parameter)
    rates = (("trunk", trunk_lr), ("trunk output", trunk_output_lr), ("new", new_lr))
    matrices = [{"params": groups[name], "lr": rate} for name, rate in rates if groups[name]]
    optimizers = [
        Muon(matrices, lr=trunk_lr),
        torch.optim.AdamW(groups["other"], lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def schedule(step: int, steps: int, warmup: int, decay_share: float) -> float:
    """Returns the factor on the peak rate: linear warm-up, constant, then linear decay to nearly zero."""
    left = (steps - step) / max(1, round(steps * decay_share))
    return min(1.0, (step + 1) / max(1, warmup), max(left, 0.002))


def set_rate(optimizers: list[Any], factor: float) -> None:
    """Sets every group's rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
