"""TLS credentials of a gRPC port."""

from functools import partial
from typing import Any

import grpc

from espalier.search.service.access.tls import CERTIFICATE_STAYS, TlsFiles
from espalier.search.service.access.watched_files import WatchedFiles


def reloading_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that follow changes of the files; see `TlsFiles.context`."""
    watched = WatchedFiles(files.all, partial(_read, files), CERTIFICATE_STAYS)

    def latest() -> Any:  # None, which the stubs do not know: no change
        return watched.value if watched.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        watched.value, latest, require_client_authentication=files.client_authority is not None
    )


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    files.context()  # checks them; gRPC would do so only in a handshake
    authority = files.client_authority.read_bytes() if files.client_authority else None
    pair = files.key.read_bytes(), files.certificate.read_bytes()
    return grpc.ssl_server_certificate_configuration([pair], authority)
