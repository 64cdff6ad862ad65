"""Identifies callers, and gives each its own prefix-cache salt."""

import hmac
import secrets
from typing import Any


def caller_of(context: Any) -> tuple[str, bool]:
    """Return the caller's identity, its `authorization` metadata or else its host address, and whether it is a login.

    A host is no identity that cached prompts may be shared by: several people may use it.
    """
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return f"authorization {value}", True
    peer = context.peer()
    return (peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer), False


class Salts:
    """Gives out prefix-cache salts, by which cached prompts are shared or kept apart.

    The salt of a caller is the HMAC of its identity under a key private to the process. Callers do not share cached
    prefixes, so response times and usage reveal nothing about the prompts of others.
    """

    def __init__(self, share_by_host: bool = False) -> None:
        """Create salts; those of callers known only by their host differ for every call unless `share_by_host`."""
        self._key = secrets.token_bytes(32)
        self._share_by_host = share_by_host

    def of(self, caller: str, login: bool) -> bytes:
        """Return the salt for a call of `caller`, 32 bytes."""
        if not login and not self._share_by_host:
            return secrets.token_bytes(32)
        return hmac.digest(self._key, caller.encode(), "sha256")
