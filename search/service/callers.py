"""Identifies callers, and gives each its own prefix-cache salt."""

import hmac
import secrets
from typing import Any


def caller_of(context: Any) -> str:
    """Return the caller's identity: its `authorization` metadata, else its host address."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return f"authorization {value}"
    peer = context.peer()
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class Salts:
    """Derives a salt for each caller: the HMAC of its identity under a key private to the process.

    Callers do not share cached prefixes, so response times reveal nothing about the prompts of others.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, caller: str) -> bytes:
        """Return the salt of `caller`, 32 bytes."""
        return hmac.digest(self._key, caller.encode(), "sha256")
