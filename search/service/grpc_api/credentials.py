"""TLS credentials of a gRPC port."""

import logging
import threading
from typing import Any

import grpc

from espalier.search.service.access.tls import TlsError, TlsFiles
from espalier.search.service.access.watched_files import WatchedFiles

log = logging.getLogger("espalier.service")


def reloading_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that follow changes of the files; see `TlsFiles.context`."""
    watched = WatchedFiles(files.all)
    watched.changed()
    lock = threading.Lock()  # handshakes may be on several threads

    def latest() -> Any:  # None, which the stubs do not know: no change
        with lock:
            try:
                return _read(files) if watched.changed() else None
            except TlsError as error:
                log.error("%s; the certificate read before stays", error)
                return None

    return grpc.dynamic_ssl_server_credentials(
        _read(files), latest, require_client_authentication=files.client_authority is not None
    )


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    files.context()  # checks them; gRPC would do so only in a handshake
    authority = files.client_authority.read_bytes() if files.client_authority else None
    pair = files.key.read_bytes(), files.certificate.read_bytes()
    return grpc.ssl_server_certificate_configuration([pair], authority)
