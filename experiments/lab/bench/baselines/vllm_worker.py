"""The child process of `vllm_process`: runs vLLM behind JSON lines, in any interpreter that has vLLM.

That interpreter need not have Espalier, so the file is run by its path and imports only the standard library and vLLM.
The first line on standard input holds the settings, every further line a request; each gets one line in reply, with an
`error` on failure. vLLM's own output goes to standard error.

Setup of vLLM, for a fair comparison on CPU:
- The engine runs in this process. By default, vLLM on CPU uses three processes and reserves a core; on two cores, one
  process was at least 1.5 times as fast.
- It has one thread per core, bound to it, with Intel's OpenMP if vLLM's wheel includes it.
- By default float32, compiled by inductor if there is a C++ compiler.
- Prefix caching in blocks of 32 tokens: with the default of 128, a short prompt fills no block.
- Input and output are token ids, so that no time is spent in its tokenizer.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

_THREADS_SET = "ESPALIER_VLLM_THREADS_SET"


def main() -> None:
    """Serve requests until standard input ends."""
    _restart_with_threads()
    # Keep the original stdout for replies and redirect descriptor 1 to stderr, as vLLM also prints from C++.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if worker is None:
                worker = _Worker(request)
                reply: Any = worker.description
            else:
                reply = worker.answer(request)
        except Exception as error:  # of any kind; the parent raises it
            reply = {"error": f"{type(error).__name__}: {error}"}
        _send(replies, reply)


def _send(replies: TextIO, reply: Any) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _restart_with_threads() -> None:
    """Restart this program with the environment for threads, which libraries read when they are loaded."""
    if os.environ.pop(_THREADS_SET, None):
        return
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    os.environ |= {
        _THREADS_SET: "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(len(cores)),
        **(_intel_threads(library, cores) if library.is_file() else {"GOMP_CPU_AFFINITY": " ".join(map(str, cores))}),
    }
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _intel_threads(library: Path, cores: list[int]) -> dict[str, str]:
    """The variables that vLLM sets for the processes it starts."""
    return {
        "LD_PRELOAD": ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)])),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


class _Worker:
    """The generator and, if requested, the verifier, each in its own engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        sys.path += filter(None, [settings["search_and_learn"]])
        import vllm  # pyright: ignore[reportMissingImports]

        self._vllm = vllm
        compiled = shutil.which(os.environ.get("CXX", "g++")) is not None
        options = {
            "dtype": settings["dtype"],
            "seed": 0,
            "block_size": 32,
            "generation_config": "vllm",
            "enforce_eager": not compiled,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": settings["kv_memory_bytes"],
            "max_num_seqs": settings["max_sequences"],
            "max_num_batched_tokens": settings["max_batch_tokens"],
            "max_model_len": settings["max_length"],
        }
        self._generator = vllm.LLM(settings["generator"], **options) if settings["generator"] else None
        self._task = "classify" if settings["last_token"] else "token_classify"
        if settings["last_token"]:
            classes = json.loads((Path(settings["verifier"]) / "config.json").read_text())["architectures"]
            named = [name.replace("TokenClassification", "SequenceClassification") for name in classes]
            options["hf_overrides"] = {"architectures": named}
        self._verifier = vllm.LLM(settings["verifier"], runner="pooling", **options) if settings["verifier"] else None
        self._folders = settings["generator"], settings["verifier"]
        self._original: Any = None
        self.description = {"version": vllm.__version__, "compiled": compiled}

    def answer(self, request: dict[str, Any]) -> Any:
        """Answer `request["do"]`."""
        match request:
            case {"do": "decode", "rows": rows, "new_tokens": new_tokens}:
                return self._decode_seconds(rows, new_tokens)
            case {"do": "sample", "rows": rows, "stop_ids": stop_ids, "max_tokens": max_tokens}:
                return self._generate(rows, max_tokens=max_tokens, stop_token_ids=stop_ids)
            case {"do": "grow", "rows": rows, "new_tokens": new_tokens}:
                return self._grow(rows, new_tokens)
            case {"do": "classify", "rows": rows}:
                return [logits[-1].tolist() for logits in self._classify(rows)]
            case {"do": "score", "rows": rows}:
                return self._score(rows)
            case {"do": "search", "approach": approach, "problems": problems, "n": n, "beam_width": beam_width}:
                return self._original_code().search(approach, problems, n, beam_width)
            case _:
                raise ValueError(f"unknown request {request.get('do')!r}")

    def _decode_seconds(self, rows: list[list[int]], new_tokens: int) -> float:
        """Measure `new_tokens` - 1 decode steps in seconds: a run with all tokens minus a run with only the first.

        An untimed run comes first and fills the prefix cache with the prompts for both timed runs.
        """
        self._generate(rows, max_tokens=1, ignore_eos=True)
        start = time.perf_counter()
        self._generate(rows, max_tokens=1, ignore_eos=True)
        middle = time.perf_counter()
        grown = self._generate(rows, max_tokens=new_tokens, ignore_eos=True)
        end = time.perf_counter()
        if any(len(ids) != new_tokens for ids in grown):
            raise ValueError(f"vLLM stopped before {new_tokens} new tokens")
        return (end - middle) - (middle - start)

    def _grow(self, rows: list[list[int]], new_tokens: int) -> tuple[list[list[int]], int, float]:
        """Rows with `new_tokens` sampled tokens more, the tokens that were computed for them, and seconds."""
        start = time.perf_counter()
        outputs = self._outputs(rows, max_tokens=new_tokens, ignore_eos=True)
        seconds = time.perf_counter() - start
        grown = [row + list(output.outputs[0].token_ids) for row, output in zip(rows, outputs, strict=True)]
        computed = sum(map(len, grown)) - len(rows) - sum(output.num_cached_tokens or 0 for output in outputs)
        return grown, computed, seconds

    def _generate(self, rows: list[list[int]], **options: Any) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in self._outputs(rows, **options)]

    def _outputs(self, rows: list[list[int]], **options: Any) -> list[Any]:
        if self._generator is None:
            raise ValueError("started without a generator")
        sampling = self._vllm.SamplingParams(temperature=1.0, detokenize=False, **options)
        return self._generator.generate(_prompts(rows), sampling, use_tqdm=False)

    def _original_code(self) -> Any:
        if self._original is None:
            if self._verifier is None:
                raise ValueError("started without a verifier")
            from original_code import OriginalCode  # beside this file  # pyright: ignore[reportMissingImports]

            self._original = OriginalCode(self._generator, self._classify, self._folders)
        return self._original

    def _score(self, rows: list[list[int]]) -> tuple[list[float], int, float]:
        """The probability of label 1 at each row's last token, the tokens that were computed, and seconds."""
        start = time.perf_counter()
        outputs = self._pool(rows, use_activation=True)
        seconds = time.perf_counter() - start
        scores = [float(output.outputs.data.reshape(-1, 2)[-1, 1]) for output in outputs]
        computed = sum(map(len, rows)) - sum(output.num_cached_tokens or 0 for output in outputs)
        return scores, computed, seconds

    def _classify(self, rows: list[list[int]]) -> list[Any]:
        """The verifier's logits for each row, `[tokens, labels]`."""
        return [output.outputs.data for output in self._pool(rows, use_activation=False)]

    def _pool(self, rows: list[list[int]], use_activation: bool) -> list[Any]:
        if self._verifier is None:
            raise ValueError("started without a verifier")
        pooling = self._vllm.PoolingParams(use_activation=use_activation)
        return self._verifier.encode(_prompts(rows), pooling_params=pooling, pooling_task=self._task, use_tqdm=False)


def _prompts(rows: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": row} for row in rows]


if __name__ == "__main__":
    main()
