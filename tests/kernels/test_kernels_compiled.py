"""Compiled functions are kept where that is possible, and compiled all the same where it is not."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile

from espalier.kernels.compilation import compiler as compiled_module
from espalier.kernels.compilation.compiler import Compiler, folder_for_compiled


def folder_of(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / f"{name}.py").write_text(text)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources, and a home and temporary files beside it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return folder_of(tmp_path / "cpu", one="a = 1\n", two="b = 1\n")


def block(place: Path) -> None:
    """Let nobody, not even root, make a folder here."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("in the way")


def test_what_is_compiled_is_kept_apart_for_each_state_of_the_folder(folder: Path):
    places = {folder_for_compiled(folder, "")}
    assert places == {folder_for_compiled(folder, "")}
    (folder / "two.py").write_text("b = 2\n")
    places.add(folder_for_compiled(folder, ""))
    places.add(folder_for_compiled(folder, "", "another kind"))
    assert len(places) == 3
    assert all(place and place.parent == folder / "__pycache__" for place in places)


def test_a_place_that_was_asked_for_is_kept_to(folder: Path, tmp_path: Path):
    found = folder_for_compiled(folder, str(tmp_path / "there"))
    assert found
    assert found.parent == tmp_path / "there"
    assert not (folder / "__pycache__").exists()


def test_a_place_that_was_asked_for_and_cannot_be_written_is_named_and_no_other_is_taken(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    block(tmp_path / "there")
    assert folder_for_compiled(folder, str(tmp_path / "there")) is None
    assert f"NUMBA_CACHE_DIR ({tmp_path / 'there'}) cannot be written" in caplog.text


def test_nothing_is_kept_beside_the_sources_of_an_installed_package(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It would outlast `pip uninstall`, and `import espalier` would go on to find an empty package."""
    installed = tmp_path / "lib/python3.11/site-packages/espalier/kernels/cpu"
    shutil.copytree(folder, installed)
    found = folder_for_compiled(installed, "")
    assert found
    assert found.parent == tmp_path / "home/.cache/espalier/compiled"
    assert not (installed / "__pycache__").exists()


def test_places_are_tried_from_the_sources_to_the_temporary_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    block(folder / "__pycache__")
    for expected, obstacle in [
        (tmp_path / "home/.cache/espalier/compiled", tmp_path / "home/.cache"),
        (tmp_path / f"temporary/espalier-compiled-{os.getuid()}", tmp_path / "temporary/espalier-compiled-0"),
    ]:
        found = folder_for_compiled(folder, "")
        assert found
        assert found.parent == expected
        if expected.parent.parent.exists() and obstacle.is_dir():
            obstacle.rename(f"{obstacle}-gone")
        block(obstacle)
    assert not caplog.records
    block(Path(tempfile.tempdir or "") / f"espalier-compiled-{os.getuid()}")
    assert folder_for_compiled(folder, "") is None
    (record,) = caplog.records
    assert "cannot be kept" in record.message
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in record.message


@pytest.mark.parametrize("trap", ["a link", "open to others"])
def test_another_users_trap_among_the_temporary_files_is_not_taken(folder: Path, tmp_path: Path, trap: str):
    for place in (folder / "__pycache__", tmp_path / "home"):
        block(place)
    own = tmp_path / f"temporary/espalier-compiled-{os.getuid()}"
    if trap == "a link":
        (tmp_path / "elsewhere").mkdir()
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.mkdir()
        own.chmod(0o777)
    assert folder_for_compiled(folder, "") is None


def test_kernels_are_kept_there():
    from espalier.kernels.cpu import compiled, decoder

    assert compiled.place
    assert vars(decoder)["_forward"].stats.cache_path.startswith(str(compiled.place))


@pytest.fixture
def double(folder: Path) -> Callable[[], tuple[Any, Compiler]]:
    """Compiles a function of a folder, as a new process would."""

    def make() -> tuple[Any, Compiler]:
        compiler = Compiler(folder)

        @compiler(nogil=True)
        def function(x: int) -> int:
            return 2 * x

        return function, compiler

    return make


def test_a_function_is_compiled_once(double: Callable[[], tuple[Any, Compiler]]):
    for hits in (0, 1):
        function, _ = double()
        assert function(4) == 8
        assert sum(function.stats.cache_hits.values()) == hits


def test_a_disk_that_is_full_keeps_nothing_and_says_so_once(
    double: Callable[[], tuple[Any, Compiler]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiled_module._Kept, "said", False)
    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    function, compiler = double()
    assert (function(4), function(4.0)) == (8, 8.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"is not kept in {compiler.place}" in record.message
    assert "No space left" in record.message


def test_a_damaged_file_is_compiled_anew(double: Callable[[], tuple[Any, Compiler]], caplog: pytest.LogCaptureFixture):
    function, compiler = double()
    function(4)
    assert compiler.place
    for file in compiler.place.rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[:20])
    function, _ = double()
    assert function(4) == 8


_WITHOUT_A_PLACE = """
import os, tempfile
def refuse(*args, **options): raise OSError(30, "Read-only file system")
os.mkdir = os.makedirs = refuse
os.access = lambda path, mode, **options: not mode & os.W_OK
tempfile._candidate_tempdir_list = lambda: []
import espalier, torch
from espalier.kernels.cpu import compiled
assert compiled.place is None
from espalier.kernels.cpu.sampling import mask_tokens_cpu
logits = torch.arange(16, dtype=torch.float32)[None]
masked = mask_tokens_cpu(logits, torch.tensor([[255, 0]], dtype=torch.uint8))
assert torch.equal(masked[0, :8], logits[0, :8]) and masked[0, 8:].max() < -1e29
"""


def test_kernels_run_where_nothing_can_be_written():
    ran = subprocess.run([sys.executable, "-c", _WITHOUT_A_PLACE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("compiled code cannot be kept") == 1
