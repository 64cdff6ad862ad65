"""Error messages of failed searches."""

import logging

from espalier.engine.errors import EspalierError, MisuseError

log = logging.getLogger("espalier.search")


def reason_of(error: Exception, search_id: str) -> str:
    """Return the error message for the result of a failed search.

    Only messages of typed errors are returned, as others may contain private data. Those are logged instead, under the
    id that the message gives.
    """
    if isinstance(error, EspalierError) and not isinstance(error, MisuseError):
        return str(error)
    log.error("search %s failed", search_id, exc_info=error)
    return f"internal error, id={search_id}"
