"""Gives each worker on this machine a device of its own: a GPU, or a share of the cores."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from espalier.engine.errors import EspalierError
from espalier.search.run.settings import RuntimeSettings, default_cpu_kv_memory

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """Placement of one worker: what it loads, and what its environment has besides that of its executor."""

    runtime: RuntimeSettings
    environment: Mapping[str, str] = field(default_factory=dict)


def places_of(runtime: RuntimeSettings, workers: int) -> list[Place]:
    """Return the places of workers on this machine.

    Raises:
        EspalierError: there are more workers than GPUs, or than cores on a CPU.
    """
    from espalier.kernels.cpu.threads import usable_cores

    gpus = [] if runtime.device.startswith("cpu") else visible_gpus()
    return assign(runtime, workers, usable_cores(), gpus)


def visible_gpus() -> list[str]:
    """Return the GPUs that torch sees, each by its name for CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    names = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    return names[:count] or [str(index) for index in range(count)]


def assign(runtime: RuntimeSettings, workers: int, cores: int, gpus: Sequence[str]) -> list[Place]:
    """Return the places of workers on a machine with so many cores, and these GPUs; without any, on its CPU.

    Raises:
        EspalierError: there are more workers than GPUs, or than cores on a CPU.
    """
    on_gpus = bool(gpus) or runtime.device.startswith("cuda")
    kind, devices = ("GPU", len(gpus)) if on_gpus else ("core", cores)
    if workers > devices:
        raise EspalierError(
            f"--workers {workers}: each needs a {kind} of its own, and there {'is' if devices == 1 else 'are'} "
            f"{devices}; lower --workers{', or choose --device cpu' if on_gpus else ''}"
        )
    if on_gpus:
        return [Place(replace(runtime, device="cuda"), {_VISIBLE: name}) for name in gpus[:workers]]
    memory = default_cpu_kv_memory(workers) if runtime.kv_memory is None else runtime.kv_memory
    threads = runtime.threads or cores // workers
    return [Place(replace(runtime, device="cpu", threads=threads, kv_memory=memory))] * workers
