"""A server with the bundled pair in a process of its own, and the tools that call it, each in its own environment.

`make test-tools` installs them into build/tools; `ESPALIER_TOOLS` names another folder of environments.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from espalier.experiments.lab.bench.service.server_process import ServerProcess, serving

TOOLS = Path(os.environ.get("ESPALIER_TOOLS", Path(__file__).parents[4] / "build/tools"))


@pytest.fixture
def tool() -> Callable[[str, str], Path]:
    """Finds a program of a tool's environment."""

    def find(environment: str, program: str) -> Path:
        path = TOOLS / environment / "bin" / program
        if not path.exists():
            pytest.skip(f"{path} is not there; `make test-tools` installs it")
        return path

    return find


@pytest.fixture(scope="session")
def served() -> Iterator[ServerProcess]:
    with serving("--http-port", "0", "--kv-memory", "512M", "--max-searches", "8") as process:
        yield process
