"""Values that are read from files, and again when they change; among them the server's certificate."""

import logging
import os
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from espalier.engine.errors import EspalierError

T = TypeVar("T")

log = logging.getLogger("espalier.service")

CERTIFICATE_STAYS = "the certificate read before stays"


class WatchedFiles(Generic[T]):
    """The value of files as they are. Thread-safe.

    Attributes:
        value: what was read last.
    """

    def __init__(self, files: Iterable[Path], read: Callable[[], T], kept: str) -> None:
        """Read the value.

        Args:
            files: what it is read from.
            read: reads it.
            kept: for the log, that the value read before stays.

        Raises:
            EspalierError: what `read` raises.
        """
        self._files, self._read, self._kept = tuple(files), read, kept
        self._lock = threading.Lock()
        self._seen = list(map(_version, self._files))
        self.value = read()

    def refresh(self) -> bool:
        """Read the value again if a file has changed; the value stays where that fails, which is logged.

        Returns:
            Whether there is a new value.
        """
        with self._lock:
            before, self._seen = self._seen, list(map(_version, self._files))
            if self._seen == before:
                return False
            try:
                self.value = self._read()
            except EspalierError as error:
                log.error("%s; %s", error, self._kept)
                return False
            return True


def _version(file: Path) -> tuple[int, int, int] | None:
    """Identity of a file's content: modification time, size and inode; None if it cannot be read."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


# ---- the server's certificate


class TlsError(EspalierError):
    """The server's certificate, its key or the authority of its clients cannot be used."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files.

    Attributes:
        certificate: the server's certificate, and those between it and the authority.
        key: its private key.
        client_authority: certificates of who signs clients' certificates; None asks clients for none.
    """

    certificate: Path
    key: Path
    client_authority: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        """The files that are given."""
        return tuple(file for file in (self.certificate, self.key, self.client_authority) if file)

    def context(self) -> ssl.SSLContext:
        """Read the files.

        Raises:
            TlsError: they cannot be read, or do not belong together.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise TlsError(
                f"--tls-certificate {self.certificate} and --tls-key {self.key} cannot be used together: {error}"
            ) from error
        if self.client_authority:
            try:
                context.load_verify_locations(self.client_authority)
            except (OSError, ssl.SSLError) as error:
                raise TlsError(f"--tls-client-ca {self.client_authority} cannot be used: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class ReloadingContext(ssl.SSLContext):
    """Context for a server's connections that follows changes of the files; see `TlsFiles.context`.

    Every connection gets the context of the files as they are. That of changed files is a new one, with a session cache
    and ticket keys of its own, so that no session of before is resumed, whose client nobody would verify again.
    """

    _watched: WatchedFiles[ssl.SSLContext]

    @classmethod
    def of(cls, files: TlsFiles) -> "ReloadingContext":
        """Read the files.

        Raises:
            TlsError: they cannot be read, or do not belong together.
        """
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._watched = WatchedFiles(files.all, files.context, CERTIFICATE_STAYS)
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection."""
        self._watched.refresh()
        return self._watched.value.wrap_bio(*args, **kwargs)
