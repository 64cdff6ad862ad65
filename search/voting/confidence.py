"""The confidence of a path: how probable the generator found the tokens that it drew, for votes without a verifier.

    confidence          geometric mean of the probabilities of all tokens of the path, thought and answer
    tail-confidence     of the last 2,048 of them
    lowest-confidence   the least such mean of 2,048 neighbouring tokens, where a long sure path cannot hide a doubt

A path of less than four times as many tokens has groups of a quarter of its length. Each vote sums these over the paths
of an answer, so it weighs confidence and consistency together. Source: Fu et al., Deep Think with Confidence
(arXiv:2508.15260), whose confidence of a token is the mean log-probability of the 20 likeliest; here it is that of the
token drawn, under the untempered model, which costs nothing.
"""

import math
from collections.abc import Sequence

import numpy as np

from espalier.search.common_fields import Vote
from espalier.search.unsure_rule import DEFAULT_GROUP


def lowest_group(log_probabilities: Sequence[float], size: int) -> float:
    """The least mean of `size` neighbouring values; that of all where they are fewer."""
    size = min(size, len(log_probabilities))
    sums = np.concatenate(([0.0], np.cumsum(log_probabilities)))
    return float((sums[size:] - sums[:-size]).min()) / size


def path_confidence(log_probabilities: Sequence[float], vote: Vote) -> float:
    """Return the confidence, in [0, 1], that a vote reads of a path with these log-probabilities of tokens."""
    count = len(log_probabilities)
    if not count:
        return 0.0
    size = min(DEFAULT_GROUP, -(-count // 4))
    match vote:
        case Vote.TAIL_CONFIDENCE:
            mean = math.fsum(log_probabilities[-size:]) / size
        case Vote.LOWEST_CONFIDENCE:
            mean = lowest_group(log_probabilities, size)
        case _:
            mean = math.fsum(log_probabilities) / count
    return min(1.0, math.exp(mean))
