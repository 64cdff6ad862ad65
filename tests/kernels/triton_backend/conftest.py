"""Fixtures for kernels under Triton's interpreter."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def language_is_patched_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter patches the whole language again for each call inside a kernel, which is most of its time."""
    patch_language, whole = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    monkeypatch.setattr(interpreter, "_patch_lang", lambda _: patch_language(whole))
    monkeypatch.setattr(
        interpreter.InterpretedFunction, "__call__", lambda self, *args, **named: self.rewrite()(*args, **named)
    )


@pytest.fixture
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter's products give a row the same bits at any place, as those of a GPU do.

    numpy's do not where its BLAS takes the path for AVX2, because rows at the end of a tile are added up differently.
    """

    def product(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        return (a[:, :, None].astype(dtype) * b[None].astype(dtype)).sum(1)

    monkeypatch.setattr(np, "matmul", product)


@pytest.fixture
def any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the programs of a launch run in another order each time, as a GPU may, and unwritten memory hold NaN.

    So a kernel fails that leans on the order, or reads what no program has written.
    """
    numbers = np.random.default_rng(0)
    builder = interpreter.InterpreterBuilder
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx
    order = np.zeros(1, int)
    grid: tuple[int, ...] = ()

    def shuffle(self: Any, *dims: int) -> None:
        nonlocal order, grid
        grid = dims
        order = numbers.permutation(int(np.prod(dims)))
        set_dim(self, *dims)

    def shuffled(self: Any, *index: int) -> None:
        set_index(self, *map(int, np.unravel_index(order[np.ravel_multi_index(index, grid)], grid)))

    def unwritten(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **named: Any) -> torch.Tensor:
            found = make(*args, **named)
            return found.fill_(float("nan")) if found.is_floating_point() else found

        return made

    monkeypatch.setattr(builder, "set_grid_dim", shuffle)
    monkeypatch.setattr(builder, "set_grid_idx", shuffled)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, unwritten(getattr(owner, name)))
