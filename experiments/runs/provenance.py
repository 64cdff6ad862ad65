"""Records what made samples: the command, the versions, the models' locations, the hardware, and the git commit."""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from espalier import __version__
from espalier.search.run.executor import Executor
from espalier.search.run.settings import RuntimeSettings

_PACKAGES = ("torch", "transformers", "numba")
_GIT_SECONDS = 10.0
_CPU_INFO = Path("/proc/cpuinfo")
_SOURCE = Path(__file__).resolve()
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def describe_command(
    benchmark: str, runtime: RuntimeSettings, executor: Executor, field_map: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Describe a command for a run's `config.json`, with what does not affect samples; see `RunFolder`.

    Its hardware is that of this machine, or a list with that of each worker, where workers run the searches. The
    benchmark and its field map are those that a report finds the problems' texts by.
    """
    is_path = benchmark != "demo" and Path(benchmark).exists()
    git, versions = git_state(), {name: version(name) for name in _PACKAGES}
    return {
        "command": shlex.join(["espalier", *sys.argv[1:]]),
        "folder": str(Path.cwd()),
        "benchmark": str(Path(benchmark).resolve()) if is_path else benchmark,
        **({"field_map": dict(field_map)} if field_map else {}),
        "models": describe_models(runtime),
        "kv_memory_bytes": executor.kv_memory_bytes,
        "in_flight": runtime.max_running,
        "versions": {"python": platform.python_version(), "espalier": __version__, **versions},
        "hardware": getattr(executor, "hardware", None) or hardware(),
        **({"git": git} if git else {}),
    }


def describe_models(runtime: RuntimeSettings) -> dict[str, dict[str, str]]:
    """Name, folder and quantization of each model by role; none of a verifier without weights of its own."""
    from espalier.engine.models.hub import HubSettings, locate_with_adapter
    from espalier.search.run.load import with_quantizations

    # Loading has downloaded the models, so no network access is needed.
    hub = HubSettings(offline=True, cache_dir=runtime.cache_dir)
    found: dict[str, dict[str, str]] = {}
    for role, (name, quantization) in with_quantizations(replace(runtime, offline=True)).checkpoints.items():
        folders = [str(each.resolve()) for each in locate_with_adapter(name, runtime.load_format, hub) if each]
        found[role] = {"name": name, "folder": "+".join(folders), "quantization": str(quantization)}
    return found


def hardware() -> dict[str, Any]:
    """The processor, the cores and bytes of memory that this process may use, and the GPUs that it sees."""
    from espalier.kernels.cpu.threads import num_threads, usable_cores

    return {
        "processor": processor_name(),
        "vector_units": vector_units(),
        "cores": usable_cores(),
        "threads": num_threads(),
        "memory_bytes": memory_bytes(),
        "gpus": gpus(),
    }


def processor_name() -> str:
    """The processor's model, or its architecture where the system does not say."""
    info = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.is_file() else ""
    named = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def vector_units() -> list[str]:
    """The processor's vector and matrix units, of those that Espalier uses; no AMX if it is switched off."""
    import llvmlite.binding

    from espalier.kernels.cpu import HAS_AMX, HAS_VNNI

    features = llvmlite.binding.get_host_cpu_features()
    has = {"AVX2": features.get("avx2"), "AVX-512": features.get("avx512f"), "VNNI": HAS_VNNI, "AMX": HAS_AMX}
    return [name for name, there in has.items() if there]


def memory_bytes() -> int | None:
    """The machine's memory, or less where a container limits it; None where the system does not say."""
    installed = None
    with suppress(AttributeError, OSError, ValueError):  # no such figure, no such file, or "max"
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(installed, int(_MEMORY_LIMIT.read_text(encoding="ascii")))
    return installed


def gpus() -> list[dict[str, Any]]:
    """Name, bytes of memory and compute capability of each GPU that torch sees, in its order."""
    import torch

    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {"name": gpu.name, "memory_bytes": gpu.total_memory, "compute_capability": f"{gpu.major}.{gpu.minor}"}
        for gpu in found
    ]


def git_state(source: Path = _SOURCE) -> dict[str, Any] | None:
    """The commit that `source` is of, and whether any tracked file differs from it; None if git does not track it.

    So an installation inside somebody's repository does not give that repository's commit for Espalier's.
    """

    def git(*arguments: str) -> str:
        # Without the lock that `status` takes to refresh the index: somebody may be committing.
        command = ["git", "--no-optional-locks", "-C", str(source.parent), *arguments]
        ran = subprocess.run(command, capture_output=True, check=True, timeout=_GIT_SECONDS)
        return ran.stdout.decode(errors="replace").strip()

    try:
        git("ls-files", "--error-unmatch", "--", source.name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
