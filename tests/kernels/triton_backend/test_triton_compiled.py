"""Every kernel compiled in a process without the interpreter: what the compiler makes of it."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).parents[3] / "experiments" / "results" / "gpu-kernels.json"
MOST_SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
"""Bytes of shared memory that a program may ask for."""


@pytest.fixture(scope="module", params=[pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compiled")
    environment = os.environ | {"TRITON_INTERPRET": "0"}  # in Triton's own cache: half a minute where a kernel is new
    command = [sys.executable, "-m", "espalier.experiments.lab", "bench", "gpu-kernels"]
    command += ["--architecture", request.param, "--json", str(folder / "found.json")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return json.loads((folder / "found.json").read_text())["rows"]


def test_every_kernel_compiles_without_spills_within_shared_memory(compiled: list[dict[str, Any]]):
    assert len({row["architecture"] for row in compiled}) == 1
    for row in compiled:
        assert row["spilled bytes"] == 0, row
        assert row["shared bytes"] <= MOST_SHARED[row["architecture"]], row


def test_products_use_tensor_cores_and_what_moves_bytes_loads_sixteen_at_a_time(compiled: list[dict[str, Any]]):
    for row in compiled:
        if row["multiplies"]:
            assert row["tensor core instructions"] > 0, row
        if row["moves"]:
            assert row["loads of 128 bits"] > 0, row
    assert {row["kernel"] for row in compiled if row["multiplies"]} >= {"attend_items, 16 rows", "fixed_product"}


def test_every_kernel_of_the_folder_is_compiled(compiled: list[dict[str, Any]]):
    sources = Path(__file__).parents[3] / "kernels" / "triton"
    kernels = {
        line.removeprefix("def ").partition("(")[0]
        for path in sources.glob("*.py")
        for before, line in zip(path.read_text().splitlines(), path.read_text().splitlines()[1:], strict=False)
        if before == "@triton.jit" and not line.startswith("def _")
    }
    assert {row["kernel"].partition(",")[0] for row in compiled} == kernels


def test_the_committed_table_is_what_the_compiler_makes(compiled: list[dict[str, Any]]):
    record = json.loads(RECORD.read_text())
    rows = [row for row in record["rows"] if row["architecture"] == compiled[0]["architecture"]]
    named = [{name: row[name] for name in ("kernel", "model", "architecture")} for row in compiled]
    assert [{name: row[name] for name in named[0]} for row in rows] == named
    if record["machine"]["packages"]["triton"] == version("triton"):
        assert rows == compiled
