"""Norms and rotations of transformers' modules, exchanged for a backend's: one launch instead of five or six.

No list of classes says what a module computes: each class of norm and each function for rotary positions is tried on
random numbers in float32, and exchanged only if it gives what the engine's operation gives.
"""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from espalier.engine.models.zoo.calls import with_globals
from espalier.kernels.backend import Backend
from espalier.kernels.torch_backend import TorchBackend

_ROTATION = "apply_rotary_pos_emb"
"""The function for rotary positions, by the name that transformers' attention calls it by."""
_TOLERANCE = 1e-5
"""Largest difference of a trial's results, which are about 1."""


def exchange_pointwise(model: nn.Module, backend: Backend) -> None:
    """Exchange the norms and rotations of `model`, in place, if the backend's take less time."""
    if not backend.fuses_pointwise:
        return
    added: dict[type, int | None] = {}
    rotates: dict[Callable[..., Any], bool] = {}
    for module in model.modules():
        kind, forward = type(module), cast(Any, type(module).forward)
        if (eps := _eps(module)) is not None:
            if kind not in added:
                added[kind] = _added_to_factors(module, eps)
            if (plus := added[kind]) is not None:
                module.forward = _Norm(module.forward, backend.rms_norm, module, plus, eps)
        own = getattr(forward, "__globals__", {}).get(_ROTATION)
        if own is None or hasattr(forward, "__wrapped__") or _ROTATION not in forward.__code__.co_names:
            continue
        if own not in rotates:
            rotates[own] = _rotates_halves(own)
        if rotates[own]:
            rotation = _Rotation(own, backend.rotate_halves)
            module.forward = MethodType(with_globals(forward, {_ROTATION: rotation}), module)


class _Norm:
    """A norm in the place of its class's forward pass."""

    def __init__(self, own: Callable[..., Any], norm: Callable[..., Any], module: Any, added: int, eps: float) -> None:
        self._own, self._norm, self._module, self._eps = own, norm, module, eps
        self._factors = module.weight.detach() if not added else module.weight.detach().float() + added

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._module.weight.dtype:  # the class decides of which dtype the result is
            return self._own(x)
        return self._norm(x, self._factors, self._eps)


class _Rotation:
    """A function for rotary positions that leaves calls of an unusual form to transformers' own."""

    def __init__(self, own: Callable[..., Any], rotation: Callable[..., torch.Tensor]) -> None:
        self._own, self._rotation = own, rotation

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = {x.shape[-1] for x in (q, k, cos, sin)}
        if more or named or len(shapes) > 1 or cos.dim() != 3 or len({len(q), len(k), len(cos), 1}) > 1:
            return self._own(q, k, cos, sin, *more, **named)
        return self._rotation(q[0], cos[0], sin[0])[None], self._rotation(k[0], cos[0], sin[0])[None]


def _eps(module: Any) -> float | None:
    """The first number of a module that has nothing else but factors, `weight`; None for other modules."""
    if [name for name, _ in (*module.named_parameters(), *module.named_buffers())] != ["weight"]:
        return None
    return next((value for value in vars(module).values() if isinstance(value, float)), None)


def _added_to_factors(module: Any, eps: float) -> int | None:
    """The number added to a norm's weight before it multiplies, 0 or 1; None for a module that is no RMSNorm."""
    if module.weight.dim() != 1 or len(inspect.signature(module.forward).parameters) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn((2, 4, len(module.weight)), generator=generator), torch.linspace(-1, 2, len(module.weight))
    x[0] *= eps**0.5  # so that a mistaken eps would show
    try:
        found = torch.func.functional_call(module, {"weight": weight}, (x,))
    except Exception:  # whatever modelling code raises
        return None
    return next((added for added in (0, 1) if _close(found, TorchBackend.rms_norm(x, weight + added, eps))), None)


def _rotates_halves(function: Callable[..., Any]) -> bool:
    """True if a function turns queries and keys as the engine does, with any two tables."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn((1, *size, 3, 8), generator=generator) for size in ((4,), (2,), (), ()))
    try:
        found = function(q, k, cos, sin)
    except Exception:  # whatever modelling code raises
        return False
    expected = (TorchBackend.rotate_halves(x[0], cos[0], sin[0])[None] for x in (q, k))
    return isinstance(found, tuple) and len(found) == 2 and all(map(_close, found, expected))


def _close(found: Any, expected: torch.Tensor) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() < _TOLERANCE * expected.abs().max())
