"""From the scores of steps to the score of a path: one definition, used everywhere."""

import math

from espalier.search.request import Aggregation


def aggregate(step_scores: list[float], how: Aggregation) -> float | None:
    """The path's score; None for a path without scored steps.

    The product is taken in log space, where long paths do not underflow before the end.
    """
    if not step_scores:
        return None
    match how:
        case Aggregation.LAST:
            return step_scores[-1]
        case Aggregation.MIN:
            return min(step_scores)
        case Aggregation.MEAN:
            return math.fsum(step_scores) / len(step_scores)
        case Aggregation.PROD:
            return math.exp(math.fsum(map(math.log, step_scores))) if min(step_scores) > 0 else 0.0
