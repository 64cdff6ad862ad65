"""Decoding by transformers, as a user without a server does it: one call a token, on its own KV cache."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class TransformersLoop:
    """Decodes a fixed batch of sequences of equal length in float32, sampling at temperature 1."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()

    @torch.inference_mode()
    def decode_rate(self, prompts: torch.Tensor, new_tokens: int) -> float:
        """Tokens/s of all but the first of `new_tokens`, after `prompts`, int64 `[B, P]`."""
        out = self._model(prompts, use_cache=True, logits_to_keep=1)
        tokens = self._sample(out.logits)
        start = time.perf_counter()
        for _ in range(new_tokens - 1):
            out = self._model(tokens, past_key_values=out.past_key_values, use_cache=True)
            tokens = self._sample(out.logits)
        return len(prompts) * (new_tokens - 1) / (time.perf_counter() - start)

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(torch.softmax(logits[:, -1], dim=-1), 1)
