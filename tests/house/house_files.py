"""The checkout as git sees it: what is tracked, what would be, and which import name a folder has."""

import subprocess
import tomllib
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("kernels", "engine", "prm", "search", "experiments")  # lowest first
PACKAGE_ROOTS = {"proto/espalier": "espalier", **{layer: f"espalier.{layer}" for layer in LAYERS}}


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@cache
def tracked() -> tuple[str, ...]:
    """Paths in git's index, relative to the root."""
    return _git_files("--cached")


@cache
def checkout() -> tuple[str, ...]:
    """Tracked files and new ones that are not ignored, without those deleted on disk."""
    files = _git_files("--cached", "--others", "--exclude-standard")
    return tuple(name for name in files if (ROOT / name).is_file())


def sources() -> list[str]:
    """Python files of the layers and of `proto/espalier`."""
    return [name for name in checkout() if name.endswith(".py") and installed_path(name)]


def installed_path(name: str) -> PurePosixPath | None:
    """Where a file of the checkout lies in an installation, such as `espalier/engine/kv_pool.py`; None for nowhere."""
    for folder, package in PACKAGE_ROOTS.items():
        if name.startswith(f"{folder}/"):
            return PurePosixPath(*package.split("."), name.removeprefix(f"{folder}/"))
    return None


def module_name(name: str) -> str:
    """Import name of a source file of the checkout."""
    path = installed_path(name)
    assert path is not None
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _git_files(*options: str) -> tuple[str, ...]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if listed.returncode:
        pytest.skip("not a git checkout")
    return tuple(sorted({name for name in listed.stdout.split("\0") if name}))
