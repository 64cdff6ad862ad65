"""The script that runs on a machine with a GPU, as far as one without can tell."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "tests/gpu/all.sh"
ABSENT = ("annotated_types", "pydantic", "pydantic_core", "typing_inspection", "pebble")
PLAIN_IMAGE = f"""
import sys

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def plain_image(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python without the modules that images of PyTorch lack."""
    if not (Path(sys.prefix) / "bin" / "python").exists():
        pytest.skip("the script calls python by this name")
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PLAIN_IMAGE)
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": str(folder), "PATH": path, "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""}


def call(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "file",
    [
        "gpu/test_gpu_kernels.py",
        "gpu/test_gpu_products.py",
        "gpu/test_gpu_recorded.py",
        "gpu/on_gpu.py",
        "gpu/conftest.py",
        "kernels/paged_batch.py",
        "kernels/layer_steps.py",
    ],
)
def test_tests_of_kernels_import_nothing_above_them(file: str):
    imported = [
        node.module
        for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    ours = {name for name in imported if name.startswith("espalier")}
    assert {name for name in ours if not f"{name}.".startswith("espalier.kernels.")} == set()


def test_the_phases_are_listed_and_others_refused():
    listed = call("--help").stdout
    assert all(f"  {phase} " in listed for phase in ("kernels", "recorded", "steps", "rates", "searches", "faults"))
    refused = call("everything")
    assert refused.returncode == 2
    assert "everything is no phase; they are kernels recorded" in refused.stderr


@pytest.mark.slow
def test_kernels_are_tested_on_an_image_with_little_more_than_torch(plain_image: dict[str, str], tmp_path: Path):
    found = call("--out", str(tmp_path / "out"), "kernels", "recorded", env=plain_image)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "skipped" in found.stdout, "for want of a GPU, and of nothing else"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gpu-kernels.txt", "gpu-recorded.txt"}


def test_wheels_that_other_phases_need_are_named(plain_image: dict[str, str], tmp_path: Path):
    (tmp_path / "wheels").mkdir()
    found = call("--out", str(tmp_path), "faults", env=plain_image | {"WHEELS": str(tmp_path / "wheels")})
    assert found.returncode == 1
    assert "missing: annotated-types==" in found.stderr
    assert all(name in found.stderr for name in ("pydantic==", "pydantic_core==", "typing-inspection==", "Pebble=="))
    assert "WHEELS" in found.stderr
