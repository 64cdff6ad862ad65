"""Every kernel compiled in a process without the interpreter: what the compiler makes of it."""

import ast
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).parents[3] / "experiments" / "results" / "gpu-kernels.json"
MOST_SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
"""KiB of shared memory that a program may ask for."""


SPILLED = {
    ("sm_90", "multiply_rows, 64, normed and gated, float32"): 64,
    ("sm_100", "attend_items, 16 rows, heads of 256"): 8,
    ("sm_120", "attend_items, 64 rows, caps and sinks"): 40,
}
"""Bytes of local memory of the few kernels that need any."""
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in MOST_SHARED if name != "sm_90"]


@pytest.fixture(scope="module", params=["sm_90", *OTHERS])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compiled")
    environment = os.environ | {"TRITON_INTERPRET": "0"}  # in Triton's own cache: half a minute where a kernel is new
    command = [sys.executable, "-m", "espalier.experiments.lab", "bench", "gpu-kernels"]
    command += ["--architecture", request.param, "--json", str(folder / "found.json")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return json.loads((folder / "found.json").read_text())["rows"]


def test_kernels_hardly_spill_and_fit_in_shared_memory(compiled: list[dict[str, Any]]):
    assert len({row["architecture"] for row in compiled}) == 1
    for row in compiled:
        assert row["spilled bytes"] <= SPILLED.get((row["architecture"], row["kernel"]), 0), row
        assert row["shared bytes"] <= 1024 * MOST_SHARED[row["architecture"]], row


def test_products_use_tensor_cores_and_what_moves_bytes_loads_sixteen_at_a_time(compiled: list[dict[str, Any]]):
    for row in compiled:
        if row["multiplies"]:
            assert row["tensor core instructions"] > 0, row
        if row["moves"]:
            assert row["loads of 128 bits"] > 0, row
    assert {row["kernel"] for row in compiled if row["multiplies"]} >= {"attend_items, 16 rows", "multiply_rows, many"}


def test_what_is_launched_before_the_last_kernel_ends_waits_for_it(compiled: list[dict[str, Any]]):
    ahead = {row["kernel"].partition(",")[0] for row in compiled if row["waits for the kernel before"]}
    there = int(compiled[0]["architecture"].removeprefix("sm_")) >= 90
    assert ahead == ({"multiply_rows", "rotate_and_write"} if there else set())


def test_every_kernel_of_the_folder_is_compiled(compiled: list[dict[str, Any]]):
    sources = Path(__file__).parents[3] / "kernels" / "triton"
    functions = [node for path in sources.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    kernels = {
        node.name
        for node in functions
        if isinstance(node, ast.FunctionDef) and "the grid is" in " ".join((ast.get_docstring(node) or "").split())
    }
    assert {row["kernel"].partition(",")[0] for row in compiled} == kernels


def test_the_committed_table_is_what_the_compiler_makes(compiled: list[dict[str, Any]]):
    record = json.loads(RECORD.read_text())
    rows = [row for row in record["rows"] if row["architecture"] == compiled[0]["architecture"]]
    named = [{name: row[name] for name in ("kernel", "model", "architecture")} for row in compiled]
    assert [{name: row[name] for name in named[0]} for row in rows] == named
    if record["machine"]["packages"]["triton"] == version("triton"):
        assert rows == compiled
