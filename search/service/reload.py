"""Reloading the generator's weights for a caller: from below one folder alone, one at a time."""

import asyncio
import logging
import time
from pathlib import Path

from espalier.engine.errors import CheckpointError, InvalidRequestError, Violation
from espalier.engine.models.options import GGUF
from espalier.engine.roles import GENERATOR
from espalier.search.server_info import Reloaded
from espalier.search.service.engine_thread import EngineThread

log = logging.getLogger("espalier.service")


async def reload_from(root: Path, path: str, engine: EngineThread) -> Reloaded:
    """Reload the weights of a checkpoint below `root`; goes on to its end if the caller leaves.

    Raises:
        InvalidRequestError: there is no such checkpoint, or it differs from the generator in more than its weights.
        BusyError, NotReadyError: see `EngineThread.reload`.
    """
    began = time.monotonic()
    engine.reachable()
    folder = await asyncio.to_thread(checkpoint_below, root, path)
    before = engine.models[GENERATOR]
    try:
        digest = await engine.reload(str(folder))
    except CheckpointError as error:
        raise _wrong(str(error).replace(str(folder), path)) from None
    reloaded = Reloaded(digest, before, time.monotonic() - began)
    log.info("the generator's weights are those of %s, %s, after %.1f s", folder, digest[:12], reloaded.seconds)
    return reloaded


def checkpoint_below(root: Path, path: str) -> Path:
    """The checkpoint at a path that a caller names, absolute and without links.

    Raises:
        InvalidRequestError: it is not below `root`, or there is none.
    """
    if not path:
        raise _wrong("is required")
    try:
        folder, root = (root / path).resolve(), root.resolve()
        if not folder.is_relative_to(root):
            raise _wrong("must lead to a folder below --reload-folder")
        if folder.is_dir():
            _require_files(folder, root)
        elif not (folder.suffix == GGUF and folder.is_file()):
            raise _wrong("leads to no checkpoint: there is no such folder below --reload-folder")
    except PermissionError:
        raise _wrong("leads to what the server may not read") from None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null, links in a circle
        if isinstance(error, InvalidRequestError):
            raise
        raise _wrong("is no path") from None
    return folder


def _require_files(folder: Path, root: Path) -> None:
    """Raise where something in a folder is no file, as a pipe, which is read for ever, or is a link out of `root`."""
    for entry in folder.iterdir():
        target = entry.resolve()
        if not target.is_relative_to(root):
            raise _wrong(f"leads to a folder whose {entry.name[:80]!r} is a link out of --reload-folder")
        if not (target.is_file() or target.is_dir()):
            raise _wrong(f"leads to a folder whose {entry.name[:80]!r} is no file")


def _wrong(rule: str) -> InvalidRequestError:
    return InvalidRequestError([Violation("path", rule)])
