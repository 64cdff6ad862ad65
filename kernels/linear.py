"""Matrix products with a fixed weight whose rows do not depend on how many other rows there are.

Libraries choose a kernel, and with it an order of summation, by the number of rows: with MKL on one x86-64 server a row
had other bits in a batch of up to 15 than in a larger one, on another server in batches that are no multiple of four.
A request's tokens would then depend on its company. On CPU in float32 the product is our own, in a fixed order.
"""

import torch
import torch.nn.functional as F


class Linear:
    """`torch.nn.functional.linear` with one weight; on CPU in float32 each row is independent of its company."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Prepare `weight`, `[out, in]`, and `bias`, `[out]`; a copy in panels replaces the weight on CPU."""
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._compiled = weight.device.type == "cpu" and weight.dtype == torch.float32
        if self._compiled:
            from espalier.kernels.cpu.linear import pack  # numba takes half a second to import

            weight = pack(weight)
        self._weight = weight

    def keeps(self, weight: torch.Tensor) -> bool:
        """Whether this very tensor is what products read, and not a copy of it."""
        return self._weight is weight

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self._weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def weight(self) -> torch.Tensor:
        """The weight, `[out, in]`, put together again where it is kept in panels."""
        if not self._compiled:
            return self._weight
        from espalier.kernels.cpu.linear import unpack

        return unpack(self._weight, self.out_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`."""
        if not self._compiled:
            return F.linear(x, self._weight, self.bias)
        from espalier.kernels.cpu.linear import linear_cpu

        return linear_cpu(x, self._weight, self.out_features, self.bias)
