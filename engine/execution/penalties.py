"""Biases and penalties of a batch of logits."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from espalier.engine.work import Penalties
from espalier.kernels.backend import Backend

TokensBefore = Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]]
"""Gives the tokens before the draws from some rows, int64 `[R]`: int32 `[R, length]` and, int64 `[R]`, how many count.

Both are on the device of the logits.
"""


class PenaltyBatch:
    """The penalties of B rows of logits, on their device; made once while the rows' draws stay the same."""

    def __init__(
        self, penalties: Sequence[Penalties], rows: np.ndarray, device: torch.device, backend: Backend
    ) -> None:
        """Put them on `device`, where `backend` penalizes.

        Args:
            penalties: of each row.
            rows: int64 `[B]`, by which its tokens are asked for.
            device: of the logits.
            backend: its operations.
        """
        self._penalize_tokens = backend.penalize_tokens
        reading = [i for i, its in enumerate(penalties) if its.read_tokens]
        self._rows = rows[reading]
        columns = ("prompt_tokens", np.int64), *((n, np.float32) for n in ("repetition", "presence", "frequency"))
        values = [np.array([getattr(penalties[i], name) for i in reading], kind) for name, kind in columns]
        self._places, self._starts, *self._values = (
            backend.to_device(array, device) for array in (np.array(reading, np.int64), *values)
        )
        biased = [(i, *each) for i, its in enumerate(penalties) for each in its.bias]
        columns = zip(zip(*biased, strict=True), (np.int64, np.int64, np.float32), strict=False)
        self._bias = [backend.to_device(np.array(column, kind), device) for column, kind in columns]

    def apply(self, given: torch.Tensor, before: TokensBefore, out: torch.Tensor | None) -> torch.Tensor:
        """Penalize logits, float32 `[B, vocabulary]`, that stay as they are.

        Args:
            given: the logits.
            before: asked for the tokens of rows whose penalties read them.
            out: written to and returned; None for new memory.
        """
        if out is None:
            out = torch.empty_like(given, memory_format=torch.contiguous_format)
        out.copy_(given)
        if self._bias:
            rows, tokens, values = self._bias
            out[rows, tokens] += values
        if len(self._rows):
            tokens, ends = before(self._rows)
            self._penalize_tokens(out, self._places, tokens, self._starts, ends, *self._values)
        return out
