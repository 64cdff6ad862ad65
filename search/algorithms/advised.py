"""Searches that an advice file forecasts; see `espalier advise`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.engine.errors import EspalierError
from espalier.search.common_fields import Aggregation, AlgorithmName, Vote

_NEAR = 0.01
"""Accuracy by which a search may be worse than the best and still be taken for costing less."""


@dataclass(frozen=True, slots=True)
class AdvisedSearch:
    """One search of an advice file.

    Attributes:
        candidates: children that it samples in a round at most.
        accuracy: share of problems that it is expected to solve.
        generator_tokens: that it computes a problem, prompts included.
        verifier_tokens: that the verifier reads a problem.
    """

    algorithm: AlgorithmName
    candidates: int
    accuracy: float
    generator_tokens: int
    verifier_tokens: int
    beam_width: int = 1
    expansion: int = 1
    vote: Vote | None = None
    aggregation: Aggregation = Aggregation.LAST


def read_advice(path: Path) -> tuple[AdvisedSearch, ...]:
    """Read the searches of an advice file; those of a user's own code are left out.

    Raises:
        EspalierError: it cannot be read, or is none.
    """
    from pydantic import TypeAdapter  # slow to import

    try:
        found = [{**each["search"], **each} for each in json.loads(path.read_text(encoding="utf-8"))["searches"]]
        built_in = [each for each in found if each["algorithm"] in list(AlgorithmName)]
        return TypeAdapter(tuple[AdvisedSearch, ...]).validate_python(built_in)
    except OSError as error:
        raise EspalierError(f"--advice: cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EspalierError(
            f"--advice: {str(path)!r} is no file of `espalier advise` ({type(error).__name__}: {error})"
        ) from error


def best_within(
    searches: Sequence[AdvisedSearch], candidates: int, generator_budget: int | None, verifier_budget: int | None
) -> AdvisedSearch | None:
    """The cheapest of the best searches within limits; None if there is none.

    Args:
        searches: to choose from.
        candidates: most children of a round.
        generator_budget: tokens; None for no limit.
        verifier_budget: the same of the verifier.
    """
    within = [
        each
        for each in searches
        if each.candidates <= candidates
        and (generator_budget is None or each.generator_tokens <= generator_budget)
        and (verifier_budget is None or each.verifier_tokens <= verifier_budget)
    ]
    best = max((each.accuracy for each in within), default=0.0)
    good = [each for each in within if each.accuracy >= best - _NEAR]
    return min(good, key=lambda each: (each.generator_tokens + each.verifier_tokens, -each.accuracy), default=None)
