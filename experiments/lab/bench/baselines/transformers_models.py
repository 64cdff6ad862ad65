"""Generator and verifier on transformers, for `search_and_learn`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer


class TransformersModels:
    """Both models, in float32 on CPU by default; a call pads its rows into a batch and keeps no KV cache afterwards."""

    def __init__(
        self,
        generator: Path,
        verifier: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        random: bool = False,
    ) -> None:
        """Load a causal language model and a token classifier; `random` reads no weights and takes any."""

        def load(kind: Any, folder: Path) -> Any:
            if not random:
                return kind.from_pretrained(str(folder), dtype=dtype).to(device).eval()
            with torch.device(device):
                return kind.from_config(AutoConfig.from_pretrained(str(folder)), dtype=dtype).eval()

        self._generator: Any = load(AutoModelForCausalLM, generator)
        self._verifier: Any = load(AutoModelForTokenClassification, verifier)
        self._pad_id: int = AutoTokenizer.from_pretrained(str(generator)).pad_token_id
        self._device = device

    @torch.inference_mode()
    def sample(self, rows: list[list[int]], stop_ids: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Sample one continuation per row at temperature 1, up to and including the first of `stop_ids`."""
        inputs = self._padded(rows, left=True)
        output = self._generator.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=max_tokens,
            eos_token_id=list(stop_ids),
            pad_token_id=self._pad_id,
        )
        return [_until(row, set(stop_ids)) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]

    @torch.inference_mode()
    def classify(self, rows: list[list[int]]) -> list[list[float]]:
        """Return the verifier's logits after the last token of each row; it computes the whole row."""
        logits = self._verifier(**self._padded(rows, left=False)).logits
        return [values[len(row) - 1].tolist() for row, values in zip(rows, logits, strict=True)]

    def _padded(self, rows: list[list[int]], left: bool) -> dict[str, torch.Tensor]:
        width = max(map(len, rows))
        fill = [[self._pad_id] * (width - len(row)) for row in rows]
        ids = [f + r if left else r + f for f, r in zip(fill, rows, strict=True)]
        mask = [
            [0] * len(f) + [1] * len(r) if left else [1] * len(r) + [0] * len(f)
            for f, r in zip(fill, rows, strict=True)
        ]
        tensors = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}


def _until(token_ids: list[int], stops: set[int]) -> list[int]:
    """The ids up to and including the first stop id."""
    for i, token_id in enumerate(token_ids):
        if token_id in stops:
            return token_ids[: i + 1]
    return token_ids
