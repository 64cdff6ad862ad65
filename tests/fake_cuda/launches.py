"""Launches of Triton's kernels on the fake device."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton import language as tl
from triton.runtime.interpreter import InterpretedFunction

from fake_cuda.tensors import CudaTensor, DeviceAssertError

_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}
_MOST_PROGRAMS = 2**31 - 1, 65535, 65535


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        kernel: its name.
        grid: programs in each dimension.
        shapes: of its tensors, by argument.
        variant: what Triton compiles a kernel anew for: constants, types, and what it knows of numbers and addresses.
    """

    kernel: str
    grid: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    variant: tuple[tuple[str, Any], ...]


def describe(jitted: Any, grid: tuple[int, ...], args: Any, kwargs: Any) -> tuple[Launch, dict]:
    """A launch of what `triton.jit` gave, and its arguments by name.

    Raises:
        TypeError: for arguments that are not the kernel's.
        AssertionError: for a grid that no device takes, or a constant that Triton could not compile for.
    """
    kernel: Callable[..., Any] = jitted.fn
    options = {name: kwargs[name] for name in kwargs.keys() & _OPTIONS}
    given = jitted.kwargs if isinstance(jitted, InterpretedFunction) else vars(jitted)
    unspecialised = given["do_not_specialize"] or ()
    signature = inspect.signature(kernel)
    bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name not in _OPTIONS})
    name = kernel.__name__
    for programs, most in zip(grid, _MOST_PROGRAMS, strict=False):
        assert isinstance(programs, int), f"{name}: {grid!r} is no grid"
        assert 0 < programs <= most, f"{name}: {grid} programs"
    variant: list[tuple[str, Any]] = sorted(options.items())
    shapes = {}
    for argument, value in bound.arguments.items():
        constant = "constexpr" in str(signature.parameters[argument].annotation)
        if isinstance(value, torch.Tensor):
            assert not constant, f"{name}: {argument} is a constant and got a tensor"
            shapes[argument] = tuple(value.shape)
            variant.append((argument, (value.dtype, value.data_ptr() % 16 == 0)))
        elif constant:
            assert isinstance(value, int | float | bool | str | tl.dtype), f"{name}: {argument} is {value!r}"
            variant.append((argument, value))
        elif value is None:  # constant for the compiler
            variant.append((argument, None))
        elif isinstance(value, float):
            variant.append((argument, "float"))
        else:
            assert isinstance(value, int), f"{name}: {argument} is a {type(value).__name__}"
            assert -(2**63) <= value < 2**63
            kind = "int32" if -(2**31) <= value < 2**31 else "int64"
            known = () if argument in unspecialised else (value == 1, value % 16 == 0)
            variant.append((argument, (kind, *known)))
    return Launch(name, tuple(grid), shapes, tuple(variant)), dict(bound.arguments)


def require_on_device(launch: Launch, arguments: dict[str, Any], current: int) -> None:
    """Check that a kernel's tensors are on the device that it is launched on, which is the thread's current one."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, CudaTensor):
            raise AssertionError(f"{launch.kernel}: {name} is on the host")
        if isinstance(value, CudaTensor) and value.index != current:
            raise DeviceAssertError(f"{launch.kernel}: {name} is on cuda:{value.index}, launched on cuda:{current}")


def put_drawn(arguments: dict[str, Any]) -> None:
    """What `pointwise.replace_by_drawn` does."""
    ids, drawn = arguments["token_ids"].held, arguments["drawn"].held
    assert arguments["count"] == len(ids)
    waiting = ids < 0
    places = -1 - ids[waiting].long()
    if len(places) and int(places.max()) >= len(drawn):
        raise DeviceAssertError(f"place {int(places.max())} of {len(drawn)} drawn tokens")
    ids[waiting] = drawn[places].to(ids.dtype)
