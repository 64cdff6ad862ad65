"""Gives each caller its own prefix-cache salt."""

import hmac
import secrets

from espalier.search.service.access.callers import Caller


class Salts:
    """Gives out prefix-cache salts, by which cached prompts are shared or kept apart.

    The salt of a caller is the HMAC of its name under a key private to the process. Callers do not share cached
    prefixes, so response times and usage reveal nothing about the prompts of others.
    """

    def __init__(self, share_by_host: bool = False) -> None:
        """Create salts; those of callers known only by their host differ for every call unless `share_by_host`."""
        self._key = secrets.token_bytes(32)
        self._share_by_host = share_by_host

    def of(self, caller: Caller) -> bytes:
        """Return the salt for a call of `caller`, 32 bytes."""
        if not caller.login and not self._share_by_host:
            return secrets.token_bytes(32)
        kind = b"login" if caller.login else b"host"
        return hmac.digest(self._key, kind + caller.name.encode(), "sha256")
