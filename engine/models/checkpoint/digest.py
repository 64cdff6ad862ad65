"""The digest of a checkpoint: a hash over all files that results depend on."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from espalier.engine.errors import CheckpointError

_BLOB = re.compile(r"[0-9a-f]{64}")


def digest_of(kind: str, files: Iterable[Path]) -> str:
    """sha256 over files, in this order, and over what becomes of them.

    A weight file in the hub's cache is a link to a blob named by its sha256, so it is not read for this.

    Args:
        kind: what becomes of them, such as the kind of quantisation.
        files: configuration, tokenizer, chat template, weights.

    Raises:
        CheckpointError: one cannot be read.
    """
    total = hashlib.sha256(kind.encode())
    for file in files:
        blob = file.resolve().name
        total.update(f"\n{file.name} {blob if _BLOB.fullmatch(blob) else _file_digest(file)}".encode())
    return total.hexdigest()


def _file_digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
