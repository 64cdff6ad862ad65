"""The demo pair: a small generator, a small verifier and a benchmark, with the recipe that makes them.

The task is a *running quantity*: one operation a sentence, one equation a step. A small generator reads it well and
slips in the arithmetic, which is the kind of error that sampling and a verifier can repair. See `problems` for the
task, `lab.recipe` for the making of the pair, and `training.json` for how the bundled one came about.

Importing this package imports no third-party code.
"""

from pathlib import Path

__all__ = ["benchmark_path", "generator_path", "planted_errors_path", "thinking_generator_path", "verifier_path"]

_HERE = Path(__file__).resolve().parent


def generator_path() -> Path:
    """Returns the checkpoint directory of the generator (`Qwen2ForCausalLM`)."""
    return _HERE / "generator"


def verifier_path() -> Path:
    """Returns the checkpoint directory of the verifier (`Qwen2ForTokenClassification`, two labels)."""
    return _HERE / "verifier"


def thinking_generator_path() -> Path:
    """Returns the checkpoint directory of the generator that thinks before it answers (`Qwen2ForCausalLM`)."""
    return _HERE / "thinking_generator"


def benchmark_path() -> Path:
    """Returns the benchmark: JSON lines in MATH-500's record format."""
    return _HERE / "benchmark.jsonl"


def planted_errors_path() -> Path:
    """Returns the folder of solutions with planted errors: a file a subset, in ProcessBench's record format."""
    return _HERE / "planted_errors"
