"""Records the origin of samples: the command, the versions, and the models' locations."""

import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from espalier.engine.models.hub import HubSettings, locate
from espalier.search.run.executor import Executor
from espalier.search.run.load import RuntimeSettings

_PACKAGES = ("espalier", "torch", "transformers", "numba")


def describe_command(benchmark: str, runtime: RuntimeSettings, executor: Executor) -> dict[str, Any]:
    """Describe a command for a run's `config.json`, with what does not affect samples; see `RunFolder`."""
    names = {"generator": runtime.generator, "verifier": runtime.verifier, "reference": runtime.verifier_reference}
    # Loading has downloaded the models, so no network access is needed.
    hub = HubSettings(offline=True, cache_dir=runtime.cache_dir)
    models = {
        role: {"name": name, "folder": str(locate(name, runtime.load_format, hub).resolve())}
        for role, name in names.items()
        if name
    }
    return {
        "command": shlex.join(["espalier", *sys.argv[1:]]),
        "folder": str(Path.cwd()),
        "benchmark": benchmark if benchmark == "demo" else str(Path(benchmark).resolve()),
        "models": models,
        "kv_memory_bytes": executor.kv_memory_bytes,
        "in_flight": runtime.max_running,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
    }
