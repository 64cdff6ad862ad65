"""Who calls, and the salt that keeps what was computed for one caller from being reused for another."""

import hmac
import secrets
from typing import Any


def caller_of(context: Any) -> str:
    """The caller as the connection shows it: its `authorization` metadata, else the host it calls from."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return f"authorization {value}"
    peer = context.peer()
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class Salts:
    """A salt for every caller: its HMAC under a key that never leaves the process.

    Prompts that one caller has had computed answer another one's no faster, so timing tells nobody what others ask.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, caller: str) -> bytes:
        """The salt of `caller`, 32 bytes."""
        return hmac.digest(self._key, caller.encode(), "sha256")
