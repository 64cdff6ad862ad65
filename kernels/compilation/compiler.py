"""Functions compiled by numba, and the folder in which they are kept from one process to the next.

A process that finds none compiles for some fifteen seconds. So the folder is sought in turn: the one that
NUMBA_CACHE_DIR names, and no other; the one beside the sources, if they are a checkout's; the user's (XDG_CACHE_HOME,
or .cache at home); one of the user's own among the temporary files. Where none can be written, as in a container
without any disk of its own, functions are compiled and not kept, and a warning says so. No file that cannot be written
or read ever stops a search.
"""

import hashlib
import logging
import os
import pickle
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import config
from numba.core.caching import FunctionCache

_njit: Any = numba.njit
_config: Any = config  # it has no attributes that a type checker could see
_F = TypeVar("_F", bound=Callable[..., Any])
INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of `numba.njit` for functions that only compiled ones call; a call from Python ends the process.

What Python calls a function by has each argument taken apart, and takes longer to compile than many a function.
"""
inner: Any = partial(_njit, **INNER)
"""Compiles a function that only compiled ones call, and keeps it as a part of these."""
_log = logging.getLogger("espalier.kernels")


def folder_for_compiled(folder: Path, given: str, kind: str = "") -> Path | None:
    """The folder for functions compiled from the files of `folder`, made if it is missing; None if none can be written.

    numba looks for changes in a function's own file only. Functions here call others of several files, so a stale one
    could be linked with a new one: each state of `folder` has a folder of its own.

    Args:
        folder: the sources.
        given: what NUMBA_CACHE_DIR says; empty for nothing.
        kind: tells functions apart that are compiled differently from the same files.
    """
    texts = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    state = hashlib.sha256(texts + kind.encode()).hexdigest()[:16]
    for place in [Path(given)] if given else _places(folder):
        with suppress(OSError):
            (place / state).mkdir(parents=True, exist_ok=True)
            if os.access(place / state, os.W_OK):
                return place / state
    where = f"NUMBA_CACHE_DIR ({given})" if given else f"{folder} and the user's cache"
    _log.warning(
        "compiled code cannot be kept: %s cannot be written, so each command compiles anew, for about 15 s; set "
        "NUMBA_CACHE_DIR to a folder that can be written",
        where,
    )
    return None


def _places(folder: Path) -> Iterator[Path]:
    """Folders to try where none is given.

    What lies beside the sources of an installed package stays when that is uninstalled, and would go on to be imported
    as an empty package of its name.
    """
    if not {"site-packages", "dist-packages"} & {part.name for part in folder.resolve().parents}:
        yield folder / "__pycache__"
    with suppress(RuntimeError):  # there is no home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "espalier" / "compiled"
    with suppress(OSError):  # there is no folder of temporary files
        yield _own_folder(Path(tempfile.gettempdir()) / f"espalier-compiled-{os.getuid()}")


def _own_folder(folder: Path) -> Path:
    """A folder that only this user can write; what another one put there could be run as this one.

    Raises:
        OSError: it cannot be made, or is another's.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


class _Kept(FunctionCache):
    """numba's files of one function; what cannot be read is compiled again, what cannot be written is not kept."""

    said = False

    def holds(self, types: tuple[Any, ...], context: Any) -> bool:
        """True if there is a file for arguments of `types`."""
        with self._guard_against_spurious_io_errors():
            return self._index_key(types, context.codegen()) in self._cache_file._load_index()
        return False

    @contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, pickle.PickleError, ValueError) as error:
            if not _Kept.said:
                _log.warning("compiled code is not kept in %s: %s", self.cache_path, error)
            _Kept.said = True


class Compiler:
    """`numba.njit` for the functions of one folder, which are kept compiled where that is possible.

        compiled = Compiler(Path(__file__).parent)

        @compiled(nogil=True)
        def function(...): ...

    Attributes:
        place: the folder they are kept in; None if they are not.
    """

    def __init__(self, folder: Path, kind: str = "") -> None:
        """Find the place; see `folder_for_compiled`."""
        self.place = folder_for_compiled(folder, _config.CACHE_DIR, kind)

    def __call__(self, **options: Any) -> Callable[[_F], _F]:
        """A decorator that compiles; `options` are those of `numba.njit`."""

        def decorate(function: _F) -> _F:
            dispatcher: Any = _njit(**{"no_cfunc_wrapper": True, **options})(function)
            if self.place is not None:
                before, _config.CACHE_DIR = _config.CACHE_DIR, str(self.place)
                try:
                    dispatcher._cache = _Kept(function)  # what `cache=True` does, with numba's own class
                except RuntimeError as error:  # no folder can be made in the place any more
                    _log.warning("compiled code is not kept in %s: %s", self.place, error)
                finally:
                    _config.CACHE_DIR = before
            return dispatcher

        return decorate


def is_compiled(function: Any, types: tuple[Any, ...]) -> bool:
    """True if a function of a `Compiler` need not be compiled for arguments of `types`, here or in any process."""
    kept = isinstance(function._cache, _Kept) and function._cache.holds(types, function.targetctx)
    return types in function.overloads or kept


def kept_in(function: Any) -> Path | None:
    """The folder that a function of a `Compiler` is kept in, None if it is not."""
    return Path(function._cache.cache_path) if isinstance(function._cache, _Kept) else None
