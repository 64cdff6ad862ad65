"""A plain gRPC client of the service, for what `SearchClient` would not send."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from espalier.search.service.access.callers import Caller
from espalier.v1.search_pb2_grpc import SearchServiceStub

NO_PROXY = [("grpc.enable_http_proxy", 0)]


@contextmanager
def raw_stub(address: str, credentials: grpc.ChannelCredentials | None = None, **options: Any) -> Iterator[Any]:
    """A stub on a channel of its own; `options` are channel arguments, with underscores for dots."""
    arguments = [*NO_PROXY, *((name.replace("__", "."), value) for name, value in options.items())]
    make = grpc.insecure_channel if credentials is None else grpc.secure_channel
    arguments_of = (address,) if credentials is None else (address, credentials)
    with make(*arguments_of, options=arguments) as channel:
        yield SearchServiceStub(channel)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a login."""
    return (("authorization", f"Bearer {token}"),)


SOMEBODY = Caller("somebody", login=True)
