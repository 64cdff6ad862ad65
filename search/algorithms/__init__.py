"""Search algorithms, one file each, and the choice among them by name."""

from espalier.search.algorithms.base import SearchAlgorithm
from espalier.search.algorithms.beam import BeamSearch
from espalier.search.algorithms.independent import IndependentPaths
from espalier.search.node import Node
from espalier.search.request import AlgorithmName, SearchRequest, Vote

_USUAL_VOTE = {
    AlgorithmName.GREEDY: Vote.MAJORITY,
    AlgorithmName.MAJORITY: Vote.MAJORITY,
    AlgorithmName.BEST_OF_N: Vote.WEIGHTED,
    AlgorithmName.BEAM: Vote.WEIGHTED,
}

_UNSCORED = (AlgorithmName.GREEDY, AlgorithmName.MAJORITY)


def usual_vote(algorithm: AlgorithmName) -> Vote:
    """The vote an algorithm takes when the request names none."""
    return _USUAL_VOTE[algorithm]


def needs_verifier(request: SearchRequest) -> bool:
    """Whether the search reads the verifier's scores."""
    return request.algorithm not in _UNSCORED


def make_algorithm(request: SearchRequest, root: Node) -> SearchAlgorithm:
    """The algorithm a request asks for, ready at `root`."""
    match request.algorithm:
        case AlgorithmName.BEAM:
            return BeamSearch(root, request.beam_width, request.expansion, request.aggregation)
        case _:
            return IndependentPaths(root, request.candidates, needs_verifier(request))
