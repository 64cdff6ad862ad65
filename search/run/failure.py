"""Why a search has failed, in words for whoever asked for it."""

import logging

from espalier.engine.errors import EspalierError, MisuseError

log = logging.getLogger("espalier.search")


def reason_of(error: Exception, search_id: str) -> str:
    """What the result of a failed search says.

    Only the text of an error that was raised on purpose: any other may hold what is nobody else's to read. It goes to
    the log, under the id that the result gives instead.
    """
    if isinstance(error, EspalierError) and not isinstance(error, MisuseError):
        return str(error)
    log.error("search %s met a fault", search_id, exc_info=error)
    return f"internal error, id={search_id}"
