"""Who hears of calls and searches."""

from typing import Protocol

from espalier.search.service.access.calls import Call
from espalier.search.service.engine_thread import Search


class Observer(Protocol):
    """Hears of what is over, on the event loop; returns at once and does not raise."""

    def call_ended(self, call: Call) -> None:
        """Hear of a call that is over."""
        ...

    def search_ended(self, call: Call, search: Search) -> None:
        """Hear of a search that has ended, and of the call that it was for.

        The call is over already if its client left; otherwise it ends after its search.
        """
        ...
