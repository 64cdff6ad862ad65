"""What a run folder says of the machine and of the commit that made it."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from espalier.experiments.runs import provenance


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Runs git in a folder of the test; with no settings of the user's."""
    if not shutil.which("git"):
        pytest.skip("no git")
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, str(tmp_path / "no-settings"))

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    return git


@pytest.fixture
def source(tmp_path, git) -> Path:
    """A committed file."""
    git("init", "-q")
    file = tmp_path / "module.py"
    file.write_text("x = 1\n")
    git("add", "module.py")
    git("commit", "-qm", "First")
    return file


def test_a_checkout_has_a_commit_and_is_dirty_when_a_tracked_file_differs(source, git):
    commit = git("rev-parse", "HEAD")
    assert len(commit) == 40
    assert provenance.git_state(source) == {"commit": commit, "dirty": False}
    (source.parent / "notes.txt").write_text("untracked")
    assert provenance.git_state(source) == {"commit": commit, "dirty": False}
    source.write_text("x = 2\n")
    assert provenance.git_state(source) == {"commit": commit, "dirty": True}


def test_a_package_installed_in_somebodys_repository_has_no_commit(source):
    installed = source.parent / "venv" / "module.py"
    installed.parent.mkdir()
    shutil.copyfile(source, installed)
    assert provenance.git_state(installed) is None


def test_outside_a_repository_without_commits_and_without_git_there_is_no_commit(tmp_path, git, monkeypatch):
    file = tmp_path / "module.py"
    file.touch()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git_state(file) is None
    git("init", "-q")
    git("add", "module.py")
    assert provenance.git_state(file) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_state(file) is None
    assert provenance.git_state(tmp_path / "nowhere" / "module.py") is None


def test_hardware_is_of_this_machine():
    found = provenance.hardware()
    assert found["processor"]
    assert found["cores"] >= 1
    assert set(found["vector_units"]) <= {"AVX2", "AVX-512", "VNNI", "AMX"}
    assert found["memory_bytes"] > 2**28
    assert len(found["gpus"]) == torch.cuda.device_count()


def test_a_containers_limit_is_the_memory_and_no_limit_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_MEMORY_LIMIT", tmp_path / "memory.max")
    installed = provenance.memory_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert provenance.memory_bytes() == installed
    (tmp_path / "memory.max").write_text("1048576\n")
    assert provenance.memory_bytes() == 2**20


def test_processor_is_named_as_the_system_does_or_by_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_CPU_INFO", tmp_path / "cpuinfo")
    assert provenance.processor_name()
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nprocessor\t: 1\n")
    assert provenance.processor_name() == "Some CPU @ 3 GHz"


def test_gpus_are_named_with_their_memory(monkeypatch):
    one = SimpleNamespace(name="Some GPU", total_memory=2**34, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: [one][index])
    assert provenance.gpus() == [{"name": "Some GPU", "memory_bytes": 2**34, "compute_capability": "9.0"}]
