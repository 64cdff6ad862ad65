"""Bytes to a server as they stand, for what no client would send."""

import socket
from urllib.parse import urlsplit

from server_thread import PATIENCE


class RawConnection:
    """One connection; everything received so far is in `received`."""

    def __init__(self, url: str | None, receive_buffer: int | None = None) -> None:
        parts = urlsplit(url or "")
        self.socket = socket.socket()
        self.socket.settimeout(PATIENCE)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect((parts.hostname, parts.port))
        self.received = b""

    def __enter__(self) -> "RawConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, raw: bytes) -> None:
        self.socket.sendall(raw)

    def until(self, wanted: bytes) -> bytes:
        """Receive until something has come."""
        while wanted not in self.received:
            assert self._receive(), f"closed before {wanted!r}: {self.received!r}"
        return self.received

    def rest(self) -> bytes:
        """Receive until the server closes the connection."""
        while self._receive():
            pass
        return self.received

    def _receive(self) -> bool:
        try:
            more = self.socket.recv(65536)
        except ConnectionResetError:
            more = b""
        self.received += more
        return bool(more)


def post(raw: bytes, path: str = "/v1/chat/completions", *headers: str, length: int | None = None) -> bytes:
    """A POST of JSON as bytes."""
    size = len(raw) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {size}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + raw


def status(received: bytes) -> int:
    """The status of the first response."""
    return int(received.split(b" ", 2)[1])
