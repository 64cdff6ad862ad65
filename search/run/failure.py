"""What is left of a search that ends by a fault: its reason, and the vote on what it had found."""

import logging
from collections.abc import Callable, Sequence

from espalier.engine.errors import EspalierError, MisuseError
from espalier.search.request import Vote
from espalier.search.result import Candidate
from espalier.search.voting.equivalence import Grouping
from espalier.search.voting.vote import Ballot

log = logging.getLogger("espalier.search")


def reason_of(error: Exception, search_id: str) -> str:
    """Why a search has failed, in words for whoever asked for it.

    The text of an error that was not made on purpose is for the log alone, where it stands under the id that is given
    instead: it may hold what is nobody else's to read.
    """
    if isinstance(error, EspalierError) and not isinstance(error, MisuseError):
        return str(error)
    log.error("search %s met a fault", search_id, exc_info=error)
    return f"internal error, id={search_id}"


def settled_ballot(candidates: Callable[[], Sequence[Candidate]], vote: Vote, grouping: Grouping) -> Ballot:
    """The vote by spelling on what `candidates` gives; on nothing where not even these can be told."""
    try:
        ballot = Ballot(candidates(), vote, grouping)
        ballot.settle_by_spelling()
        ballot.elect()
    except Exception:
        log.exception("what a search had found before it failed is lost")
        return Ballot((), Vote.NAIVE, grouping)
    return ballot
