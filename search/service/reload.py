"""Checkpoints that callers may have reloaded: those below one folder alone."""

from pathlib import Path

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.engine.models.options import GGUF


def checkpoint_below(root: Path, path: str) -> Path:
    """The checkpoint at a path that a caller names, absolute and without links.

    Raises:
        InvalidRequestError: it is not below `root`, or there is none.
    """
    if not path:
        raise wrong_path("is required")
    try:
        folder, root = (root / path).resolve(), root.resolve()
        if not folder.is_relative_to(root):
            raise wrong_path("must lead to a folder below --reload-folder")
        if folder.is_dir():
            _require_files(folder, root)
        elif not (folder.suffix == GGUF and folder.is_file()):
            raise wrong_path("leads to no checkpoint: there is no such folder below --reload-folder")
    except PermissionError:
        raise wrong_path("leads to what the server may not read") from None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null, links in a circle
        if isinstance(error, InvalidRequestError):
            raise
        raise wrong_path("is no path") from None
    return folder


def _require_files(folder: Path, root: Path) -> None:
    """Raise where something in a folder is no file, as a pipe, which is read for ever, or is a link out of `root`."""
    for entry in folder.iterdir():
        target = entry.resolve()
        if not target.is_relative_to(root):
            raise wrong_path(f"leads to a folder whose {entry.name[:80]!r} is a link out of --reload-folder")
        if not (target.is_file() or target.is_dir()):
            raise wrong_path(f"leads to a folder whose {entry.name[:80]!r} is no file")


def wrong_path(rule: str) -> InvalidRequestError:
    """The error of a path that breaks a rule."""
    return InvalidRequestError([Violation("path", rule)])
