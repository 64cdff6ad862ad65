"""Sampling a whole batch at once, with randomness that depends on the node and never on the batch."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from espalier.engine.work import Sampling
from espalier.kernels.backend import Backend


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A random number in [0, 1) for each (key, position): SplitMix64 (Steele et al., 2014), counted by the position.

    Args:
        keys: uint64 `[B]`.
        positions: int `[B]`.

    Returns:
        float64 `[B]`.
    """
    x = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


class SamplingBatch:
    """The sampling parameters of B rows, on the device of their logits; made once while the rows stay the same."""

    def __init__(self, samplings: Sequence[Sampling], device: torch.device, backend: Backend) -> None:
        """Put the parameters on `device`, where `backend` draws by them."""

        def tensor(values: Iterable[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return backend.to_device(torch.tensor(list(values), dtype=dtype).numpy(), device)

        self._filter_logits, self._draw_tokens = backend.filter_logits, backend.draw_tokens
        self._to_device = backend.to_device
        self.keys = np.array([s.key for s in samplings], dtype=np.uint64)
        self.temperatures = tensor(s.temperature for s in samplings)
        filtered = [i for i, s in enumerate(samplings) if s.top_k > 0 or s.top_p < 1 or s.min_p > 0]
        some = [samplings[i] for i in filtered]
        self._filtered = tensor(filtered, torch.int64)
        self._filters = (
            tensor(s.temperature for s in some),
            tensor((s.top_k for s in some), torch.int64),
            tensor(s.top_p for s in some),
            tensor(s.min_p for s in some),
        )

    def candidates(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[B, vocabulary]`, float32, with a mask over what the filters of each row remove."""
        if not len(self._filtered):
            return logits
        if len(self._filtered) == len(logits):
            return self._filter_logits(logits, *self._filters)
        candidates = logits.clone()
        candidates[self._filtered] = self._filter_logits(logits[self._filtered], *self._filters)
        return candidates

    def draw(self, logits: torch.Tensor, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token per row; a row's draw depends on its own logits, parameters and position alone.

        Args:
            logits: `[B, vocabulary]`.
            positions: int `[B]`, of the tokens drawn.

        Returns:
            Token ids int64 `[B]`, and their log-probabilities under the untempered model float32 `[B]`.
        """
        logits = logits.float()
        draws = self._to_device(uniforms(self.keys, positions), logits.device)
        return self._draw_tokens(logits, self.candidates(logits), self.temperatures, draws)
