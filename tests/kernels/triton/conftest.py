"""Fixtures for kernels under Triton's interpreter."""

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter's products give a row the same bits at any place, as those of a GPU do.

    numpy's do not where its BLAS takes the path for AVX2, because rows at the end of a tile are added up differently.
    """

    def product(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        return (a[:, :, None].astype(dtype) * b[None].astype(dtype)).sum(1)

    monkeypatch.setattr(np, "matmul", product)
