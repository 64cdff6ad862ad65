"""Weights as they are once they are loaded, kept in files: what took seconds to quantise is mapped at the next load.

An entry is a file of `torch.save`, in which tensors begin at multiples of 64 bytes, with a digest of all that it holds.
Its name is a hash of all that its tensors depend on, with the code that made them. Entries are written beside their
place and then renamed, so that processes may write and read at once; a file that is not whole, or is something else,
counts as missing and is written anew. Tensors are mapped privately: nothing that happens to an entry reaches the
process that reads it, or the other way round.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from espalier import kernels
from espalier.kernels.linear import Kept

log = logging.getLogger("espalier.engine")
MAX_BYTES = 16 * 2**30
"""Of all entries of a folder; the least recently used are removed."""
_LEAST_BYTES = 2**26
"""Of an entry: less is loaded as fast without."""
_SPARE = 2**31
"""Bytes of the disk that are left free."""
_SUFFIX = ".weights"
_SUMMED = 2**17
"""Words of 8 bytes that have one sum."""


def default_folder() -> Path | None:
    """`espalier/weights` in XDG_CACHE_HOME, or in ~/.cache; None where there is no home."""
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "espalier" / "weights"
    return None


@cache
def code_state() -> str:
    """A hash of the code that entries depend on: all that reads, quantises and packs weights."""
    folders = Path(__file__).parent, Path(kernels.__file__).parent / "cpu"
    texts = (path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()


class LoadCache:
    """A folder of entries; whatever is wrong with it is logged and costs the time that an entry would save."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES, least_bytes: int = _LEAST_BYTES) -> None:
        """Touch nothing yet.

        Args:
            folder: made when the first entry is written.
            max_bytes: of all entries.
            least_bytes: of an entry; smaller ones are not written.
        """
        self.folder = folder
        self._max_bytes = max_bytes
        self._least_bytes = least_bytes

    def entries(self) -> list[tuple[Path, int]]:
        """Files of entries and their bytes, the least recently used first."""
        found = list[tuple[float, Path, int]]()
        with suppress(OSError):
            for path in self.folder.glob(f"*{_SUFFIX}"):
                with suppress(OSError):  # another process has removed it
                    stat = path.stat()
                    found.append((stat.st_mtime, path, stat.st_size))
        return [(path, size) for _, path, size in sorted(found)]

    def read(self, name: str) -> Kept | None:
        """The entry of this name; None where there is none that is whole."""
        path = self._path(name)
        try:
            kept = _read(path, name)
        except FileNotFoundError:
            return None
        except Exception as error:  # bytes that are no entry raise whatever they happen to mean
            log.info("%s is no entry of kept weights and is made anew: %s", path, error)
            return None
        log.info("weights are mapped from %s", path)
        with suppress(OSError):  # a folder that cannot be written
            os.utime(path)
        return kept

    def write(self, name: str, kept: Kept) -> None:
        """Keep an entry, in the place of one of the same name, and remove the oldest that there is no room for."""
        size = sum(tensor.nbytes for tensor in kept.tensors.values())
        if not self._least_bytes <= size <= self._max_bytes:
            return
        place, unfinished = self._path(name), None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(self.folder).free) < size + _SPARE:
                log.info("weights are not kept: %s has %d MiB free, they take %d", self.folder, free >> 20, size >> 20)
                return
            # One that is abandoned counts as an entry, and is removed as the others are.
            handle, unfinished = tempfile.mkstemp(_SUFFIX, "unfinished-", self.folder)
            with open(handle, "wb") as file:
                _write(file, name, kept)
                file.flush()
                os.fsync(file.fileno())  # or a machine that stops now might keep the name and lose the content
            os.replace(unfinished, place)
        except OSError as error:
            log.info("weights are not kept in %s: %s", self.folder, error)
            if unfinished:
                _remove(Path(unfinished))
            return
        log.info("weights are kept in %s: %d MiB", place, size >> 20)
        entries = self.entries()
        total = sum(size for _, size in entries)
        for path, size in entries:
            if total > self._max_bytes and path != place:
                total -= size
                _remove(path)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
        log.info("%s is removed", path)


def _write(file: IO[bytes], name: str, kept: Kept) -> None:
    tensors = {each: tensor.contiguous() for each, tensor in kept.tensors.items()}
    entry = {"facts": kept.facts, "tensors": tensors, "digest": _digest(name, kept)}
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the digest says more, and torch looks at none as it maps a file
    try:
        torch.save(entry, file)
    finally:
        torch.serialization.set_crc32_options(computed)


def _read(path: Path, name: str) -> Kept:
    """The entry in a file.

    Raises:
        ValueError: it is not whole, or not the entry of this name.
    """
    entry = torch.load(path, "cpu", weights_only=True, mmap=True)
    kept = Kept(entry["tensors"], entry["facts"])
    if _digest(name, kept) != entry["digest"]:
        raise ValueError("it is damaged, or another entry")
    return kept


def _digest(name: str, kept: Kept) -> str:
    """A hash of an entry: of its name, of its facts, and of the type, shape and values of each tensor, in order."""
    tensors = [(each, str(it.dtype), list(it.shape), _checksum(it)) for each, it in kept.tensors.items()]
    return hashlib.sha256(json.dumps([name, kept.facts, tensors]).encode()).hexdigest()


def _checksum(tensor: torch.Tensor) -> str:
    """A hash of the sums of each MiB's words: as fast as memory is read, and no flipped bit leaves it as it was."""
    values = tensor.contiguous().flatten().view(torch.uint8).numpy()
    words = values[: len(values) // 8 * 8].view(np.int64)
    whole = len(words) // _SUMMED * _SUMMED
    sums = np.add.reduce(words[:whole].reshape(-1, _SUMMED), axis=1)
    return hashlib.sha256(sums.tobytes() + words[whole:].tobytes() + values[len(words) * 8 :].tobytes()).hexdigest()


def open_cache(folder: str) -> LoadCache | None:
    """The cache that `--load-cache` names: a folder, `auto` for `default_folder`, or `none`."""
    place: Any = {"auto": default_folder(), "none": None}.get(folder, Path(folder))
    return LoadCache(place) if place else None
