"""Fixtures for kernels under Triton's interpreter."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
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
