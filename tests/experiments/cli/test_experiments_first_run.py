"""The first command on a machine says that it compiles, and compiles all of it before the search begins."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "int8"])
def test_a_first_solve_announces_every_function_and_a_second_one_none(kind: str, tmp_path: Path):
    command = [sys.executable, "-m", "espalier.experiments.cli.main", "solve"]
    command += ["--generator-quantization", kind, "--verifier-quantization", kind]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)
    )
    announced = re.search(r"compiling CPU kernels, once for this machine: 0 of (\d+)\n", first.stderr)
    assert announced
    assert "compiled CPU kernels, once for this machine: " in first.stderr
    assert len([*tmp_path.rglob("*.nbc")]) == int(announced[1])  # the search itself compiled nothing
    assert "CPU kernels" not in second.stderr
    assert [line for line in first.stdout.splitlines() if not line.endswith(" s")] == [
        line for line in second.stdout.splitlines() if not line.endswith(" s")
    ]
