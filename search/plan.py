"""A search that may run: its request, and the bounds its paths are held to."""

from dataclasses import dataclass

from espalier.search.demand import PathLimits
from espalier.search.request import SearchRequest


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A validated request with its defaults filled in, and the bounds its paths are held to."""

    search_id: str
    request: SearchRequest
    generator_limits: PathLimits
    verifier_limits: PathLimits | None
    salt: bytes = b""
