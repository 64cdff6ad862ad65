"""The host's memory: what is free of it, and whether models fit before the first weight is read."""

from collections.abc import Mapping
from pathlib import Path

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.options import Quantization
from espalier.engine.models.quantization import layer_bytes, linear_bytes
from espalier.engine.models.zoo.description import TransformersConfig

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def free_memory(meminfo: Path = _MEMINFO, container: Path = _CONTAINER) -> int | None:
    """Bytes that this process can still take without swapping, or less where a container limits it.

    What the system keeps of files in memory counts as free. None where the system does not say.
    """
    if (free := _field(meminfo, "MemAvailable:")) is None:
        return None
    limit, used = _number(container / "memory.max"), _number(container / "memory.current")
    if limit is None or used is None:
        return 1024 * free
    return min(1024 * free, max(0, limit - used + (_field(container / "memory.stat", "inactive_file") or 0)))


def model_bytes(config: DecoderConfig, dtype: torch.dtype, quantization: Quantization, generates: bool) -> int:
    """Bytes of a model's weights once it is loaded on a CPU; those of its norms and biases are left out.

    Args:
        config: its shape.
        dtype: dtype of what is not quantised.
        quantization: of its layers, and of a generator's head.
        generates: whether it has a head over the vocabulary; in float32 a tied one is a copy, too.
    """
    if isinstance(config, TransformersConfig):
        return config.weight_bytes(dtype, quantization)

    layers = config.num_layers * layer_bytes(config, dtype.itemsize, quantization)
    embedding = config.vocab_size * config.hidden_size * dtype.itemsize
    if not generates or (config.tied and dtype != torch.float32):
        return embedding + layers
    return embedding + layers + linear_bytes(config.vocab_size, config.hidden_size, dtype.itemsize, quantization)


def require_host_memory(models: Mapping[str, int], free: int | None) -> None:
    """Refuse models that do not fit, before any memory is taken for them.

    Args:
        models: bytes of each, by the flag that names it.
        free: see `free_memory`.

    Raises:
        CheckpointError: they take more than is free; it gives the numbers.
    """
    if free is None or (needed := sum(models.values())) <= free:
        return
    each = " and ".join(f"{flag} {size / 2**30:.1f} GiB" for flag, size in models.items())
    raise CheckpointError(
        f"the weights take {needed / 2**30:.1f} GiB of memory ({each}), and {free / 2**30:.1f} GiB are free; use a "
        "smaller model, quantize it (--generator-quantization, --verifier-quantization), or free memory"
    )


def _field(file: Path, name: str) -> int | None:
    """The number after a name, in a file of one such pair a line."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(name)), None)
    except (OSError, ValueError, IndexError):
        return None


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
