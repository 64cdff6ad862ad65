"""The Observer protocol for calls and searches that have ended."""

from typing import Protocol

from espalier.search.service.access.calls import Call
from espalier.search.service.engine_thread import Search


class Observer(Protocol):
    """Is notified on the event loop; its methods must not block or raise."""

    def call_ended(self, call: Call) -> None:
        """Handle the end of a call."""
        ...

    def search_ended(self, call: Call, search: Search) -> None:
        """Handle the end of a search, with the call that asked for it.

        The call is over already if its client left; otherwise it ends after its search.
        """
        ...
