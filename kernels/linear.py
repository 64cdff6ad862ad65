"""Matrix products with a fixed weight: the torch reference."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Rest = tuple[torch.Tensor, torch.Tensor]
"""Rounding errors of a weight's last outputs, rounded in turn: int8 values `[few, in]`, float32 scales `[few, 1]`."""
QuantizedPacker = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Rest | None], torch.Tensor]
"""Makes a weight that `torch.nn.functional.linear` takes out of quantised values, int8 `[out, in]`, their scales,
float32 `[out, groups]`, their zeros, int8 `[out, groups]`, the bits of a value, 8 or 4, and, where products of bytes
are to add it, what rounding took."""


class Kept(NamedTuple):
    """Weights as a backend has prepared them: tensors, and all else that is needed to use them again.

    Attributes:
        tensors: on the host, by name.
        facts: numbers, texts and lists of them, as JSON holds them.
    """

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]


class Linear:
    """`torch.nn.functional.linear` with one weight and bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Prepare products with `weight`, `[out, in]`, and `bias`, `[out]`."""
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._weight = weight

    def keeps(self, weight: torch.Tensor) -> bool:
        """True if products read this very tensor, and not a copy of it."""
        return self._weight is weight

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self._weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was given, `[out, in]`."""
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`."""
        return F.linear(x, self._weight, self.bias)


class GroupedLinear:
    """Products of one shape, each with rows of its own: the experts of a layer."""

    def __init__(self, products: Sequence[Linear]) -> None:
        self._products = products
        self.out_features = products[0].out_features

    def __len__(self) -> int:
        return len(self._products)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and biases."""
        return sum(product.nbytes for product in self._products)

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`.

        Args:
            x: the rows of the first product, then those of the second, and so on.
            ends: int64 `[products]`, where the rows of each end; rows beyond the last give zeros.
        """
        output = x.new_zeros(len(x), self.out_features)
        for (start, end), product in zip(pairwise([0, *ends.tolist()]), self._products, strict=True):
            if end > start:
                output[start:end] = product(x[start:end])
        return output
