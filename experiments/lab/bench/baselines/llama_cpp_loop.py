"""Decoding by llama.cpp, through its Python package: one call a token for all sequences, each with a sampler."""

import time
from pathlib import Path
from typing import Any

import torch


class LlamaCppLoop:
    """Decodes a fixed batch of sequences of equal length from a GGUF file as it is, sampling at temperature 1."""

    def __init__(self, path: Path, threads: int) -> None:
        """Load the weights of `path`.

        Raises:
            ImportError: without the package llama-cpp-python.
        """
        from llama_cpp import llama_cpp  # pyright: ignore[reportMissingImports]

        self._cpp: Any = llama_cpp
        self._threads = threads
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(quiet, None)
        self._kept = quiet
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())

    def decode_rate(self, prompts: torch.Tensor, new_tokens: int) -> float:
        """Tokens/s of all but the first of `new_tokens`, after `prompts`, int64 `[B, P]`."""
        cpp, (count, length) = self._cpp, prompts.shape
        params = cpp.llama_context_default_params()
        params.n_ctx = count * (length + new_tokens)
        params.n_batch = params.n_ubatch = count * length
        params.n_seq_max = count
        params.n_threads = params.n_threads_batch = self._threads
        context = cpp.llama_init_from_model(self._model, params)
        samplers = [cpp.llama_sampler_init_dist(seed) for seed in range(count)]
        batch = cpp.llama_batch_init(count * length, 0, 1)
        try:
            ends = self._decode(context, batch, [list(enumerate(row)) for row in prompts.tolist()])
            tokens = [cpp.llama_sampler_sample(each, context, end) for each, end in zip(samplers, ends, strict=True)]
            start = time.perf_counter()
            for n in range(new_tokens - 1):
                ends = self._decode(context, batch, [[(length + n, token)] for token in tokens])
                tokens = [
                    cpp.llama_sampler_sample(each, context, end) for each, end in zip(samplers, ends, strict=True)
                ]
            return count * (new_tokens - 1) / (time.perf_counter() - start)
        finally:
            cpp.llama_batch_free(batch)
            for sampler in samplers:
                cpp.llama_sampler_free(sampler)
            cpp.llama_free(context)

    def _decode(self, context: Any, batch: Any, given: list[list[tuple[int, int]]]) -> list[int]:
        """Compute positions and tokens of each sequence; the place in the batch of the last one of each."""
        at, ends = 0, []
        for sequence, row in enumerate(given):
            for position, token in row:
                batch.token[at], batch.pos[at] = token, position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = position == row[-1][0]
                at += 1
            ends.append(at - 1)
        batch.n_tokens = at
        if failed := self._cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        return ends
