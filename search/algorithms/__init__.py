"""Search algorithms, one file each, and their registry: adding an algorithm takes one file and one entry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeVar

from espalier.search.algorithms.adaptive import AdaptivePaths
from espalier.search.algorithms.auto import AutoSearch
from espalier.search.algorithms.base import SearchAlgorithm
from espalier.search.algorithms.beam import BeamSearch
from espalier.search.algorithms.dvts import DiverseTreeSearch
from espalier.search.algorithms.independent import IndependentPaths
from espalier.search.algorithms.lookahead import LookaheadSearch
from espalier.search.algorithms.mcts import MonteCarloSearch
from espalier.search.algorithms.own import code_digest, make_own, own_class, own_defaults
from espalier.search.algorithms.particle import ParticleSearch
from espalier.search.algorithms.rebase import RewardBalancedSearch
from espalier.search.request import AlgorithmName, EarlyStop, SearchRequest, Vote
from espalier.search.run.memory import MemoryEstimate
from espalier.search.schema import CodeName
from espalier.search.tree import Node

T = TypeVar("T")
_STOPPABLE = (AlgorithmName.MAJORITY, AlgorithmName.BEST_OF_N)


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered algorithm.

    Attributes:
        make: creates the algorithm for a resolved request and a root.
        estimate: upper bounds on what it holds of either model at its peaks, for a resolved request.
        vote: the default vote.
        scored: whether it uses the verifier's scores.
        usual: defaults of the optional request fields that it uses.
        answers_suffice: whether it uses scores of complete answers only.
    """

    make: Callable[[SearchRequest, Node], SearchAlgorithm]
    estimate: Callable[[SearchRequest], tuple[MemoryEstimate, ...]]
    vote: Vote = Vote.WEIGHTED
    scored: Callable[[SearchRequest], bool] = lambda request: True
    usual: Mapping[str, int | float] = field(default_factory=dict)
    answers_suffice: bool = False


def with_defaults(request: SearchRequest) -> SearchRequest:
    """Fill in the request's vote and the fields that its algorithm uses, where they are None."""
    entry = _entry(request)
    missing = {name: value for name, value in entry.usual.items() if getattr(request, name) is None}
    return replace(request, vote=request.vote or entry.vote, **missing)


def needs_verifier(request: SearchRequest) -> bool:
    """Whether the search uses the verifier's scores."""
    return _entry(request).scored(with_defaults(request))


def without_verifier() -> list[str]:
    """Names of the algorithms that use no scores with their default vote."""
    return [str(name) for name, entry in _TABLE.items() if not entry.scored(with_defaults(SearchRequest("-", name)))]


def verifier_advice() -> str:
    """What to do where a search needs a verifier and there is none."""
    return (
        "--verifier names a process reward model that fits the generator or the folder of a trunk head; self, "
        f"confidence and lowest-confidence need neither, {', '.join(without_verifier())} no verifier at all"
    )


def unused_fields(request: SearchRequest) -> frozenset[str]:
    """Names of the fields that do not change this search, because its algorithm does not use them."""
    unused = _fields_of_some() - _entry(request).usual.keys()
    match request.algorithm:
        case AlgorithmName.GREEDY:
            unused |= {"beam_width", "expansion", "temperature", "top_k", "top_p", "min_p", "seed"}
        case AlgorithmName.CHAIN:
            unused |= {"beam_width", "expansion"}
        case AlgorithmName.MAJORITY | AlgorithmName.BEST_OF_N | AlgorithmName.PARTICLE:
            unused |= {"expansion"}
        case AlgorithmName.MCTS:
            unused |= {"beam_width"}
        case _:
            pass
    if request.algorithm not in _STOPPABLE:
        unused |= {"early_stop"}
    return frozenset(unused | (set() if needs_verifier(request) else {"aggregation"}))


def stops_early(request: SearchRequest) -> bool:
    """Whether the search ends once its vote is decided: of independent paths that all start at once, by `early_stop`.

    The best-scored path of a naive vote can be found by any path to its end.
    """
    by_count = with_defaults(request).vote is not Vote.NAIVE
    return by_count and request.algorithm in _STOPPABLE and request.early_stop is not EarlyStop.OFF


def answers_suffice(request: SearchRequest) -> bool:
    """Whether the search uses no scores, or only those of complete answers."""
    return _entry(request).answers_suffice or not needs_verifier(request)


def algorithms_for_answers() -> list[str]:
    """Names of the algorithms that use scores, but only those of complete answers."""
    return [str(name) for name, entry in _TABLE.items() if entry.answers_suffice]


def memory_estimate(request: SearchRequest) -> tuple[MemoryEstimate, ...]:
    """Upper bounds on what the search holds of either model, one for each of its peaks."""
    return _entry(request).estimate(with_defaults(request))


def make_algorithm(request: SearchRequest, root: Node) -> SearchAlgorithm:
    """Create the algorithm of a resolved request, starting at `root`."""
    return _entry(request).make(with_defaults(request), root)


def own_code(request: SearchRequest) -> dict[str, str]:
    """Digest of the code of a search of the user's own, by a name for it; empty for the others."""
    return {"algorithm_code": code_digest(request.algorithm)} if isinstance(request.algorithm, CodeName) else {}


def _entry(request: SearchRequest) -> Entry:
    """The entry of the request's algorithm; code is loaded for a `CodeName` only."""
    return _own(request.algorithm) if isinstance(request.algorithm, CodeName) else _TABLE[request.algorithm]


@cache
def _own(name: CodeName) -> Entry:
    its = own_class(name)
    vote, usual = own_defaults(name, _fields_of_some())
    return Entry(
        partial(make_own, name),
        getattr(its, "memory", _open_children),
        vote,
        (lambda request: True) if its.uses_scores else _scored_by_its_vote,
        usual,
        bool(getattr(its, "answers_suffice", False)),
    )


def _fields_of_some() -> set[str]:
    """Optional fields of a request that only some algorithms use."""
    return {name for entry in _TABLE.values() for name in entry.usual}


def _given(value: T | None) -> T:
    assert value is not None, "a default was not filled in"
    return value


def _longest_path(request: SearchRequest) -> int:
    """Maximum tokens of a path."""
    longest = request.max_steps * request.max_step_tokens
    return longest if request.max_tokens is None else min(longest, request.max_tokens)


def _unscored(request: SearchRequest) -> bool:
    return False


def _scored_by_its_vote(request: SearchRequest) -> bool:
    return request.vote is not Vote.MAJORITY


def _independent(request: SearchRequest, root: Node) -> SearchAlgorithm:
    return IndependentPaths(root, request.candidates, needs_verifier(request))


def _parting_paths(request: SearchRequest) -> tuple[MemoryEstimate, ...]:
    """Where independent paths diverge, their shared step holds a partial block until each has sampled its next step."""
    return (MemoryEstimate(paths=request.candidates, partial_blocks=request.candidates - 1),)


def _kept_and_children(request: SearchRequest) -> tuple[MemoryEstimate, ...]:
    """N kept paths, and N*M children of a step."""
    return (MemoryEstimate(paths=request.beam_width, steps=request.candidates),)


def _rollouts(request: SearchRequest) -> tuple[MemoryEstimate, ...]:
    """As above, plus a rollout of each child, whose last step but one is held while the last is sampled."""
    return (MemoryEstimate(paths=request.beam_width, steps=request.candidates * (1 + _given(request.lookahead_steps))),)


def _open_children(request: SearchRequest) -> tuple[MemoryEstimate, ...]:
    """All N*M samples of a round may be open paths, and be extended in the next round."""
    return (MemoryEstimate(paths=request.candidates, steps=request.candidates),)


def _particles(request: SearchRequest) -> tuple[MemoryEstimate, ...]:
    """N paths and their next steps; a later iteration may branch at any inner step, so each holds a partial block."""
    inner = request.max_steps if _given(request.iterations) > 1 else 0
    return (
        MemoryEstimate(paths=request.beam_width, steps=request.beam_width, partial_blocks=request.beam_width * inner),
    )


def _tree(request: SearchRequest) -> tuple[MemoryEstimate, ...]:
    """Every node of the tree as one step; or, at the end, the one path sampled to completion."""
    return (MemoryEstimate(paths=0, steps=_given(request.simulations) * request.expansion), MemoryEstimate(paths=2))


_TABLE: Mapping[AlgorithmName, Entry] = {
    AlgorithmName.GREEDY: Entry(_independent, _parting_paths, Vote.MAJORITY, _unscored),
    AlgorithmName.CHAIN: Entry(_independent, _parting_paths, Vote.MAJORITY, _unscored),
    AlgorithmName.MAJORITY: Entry(
        _independent, _parting_paths, Vote.MAJORITY, _scored_by_its_vote, answers_suffice=True
    ),
    AlgorithmName.BEST_OF_N: Entry(_independent, _parting_paths, answers_suffice=True),
    AlgorithmName.ADAPTIVE: Entry(
        lambda r, root: AdaptivePaths(
            root, r.beam_width, r.expansion, _given(r.vote), _given(r.confidence), r.aggregation
        ),
        _parting_paths,
        Vote.MAJORITY,
        _scored_by_its_vote,
        usual={"confidence": 0.95},
        answers_suffice=True,
    ),
    AlgorithmName.BEAM: Entry(
        lambda r, root: BeamSearch(root, r.beam_width, r.expansion, r.aggregation), _kept_and_children
    ),
    AlgorithmName.DVTS: Entry(
        lambda r, root: DiverseTreeSearch(root, r.beam_width, r.expansion, r.aggregation), _kept_and_children
    ),
    AlgorithmName.LOOKAHEAD: Entry(
        lambda r, root: LookaheadSearch(root, r.beam_width, r.expansion, _given(r.lookahead_steps), r.aggregation),
        _rollouts,
        usual={"lookahead_steps": 1},
    ),
    AlgorithmName.REBASE: Entry(
        lambda r, root: RewardBalancedSearch(root, r.candidates, _given(r.rebase_temperature), r.aggregation),
        _open_children,
        usual={"rebase_temperature": 0.1},
    ),
    AlgorithmName.PARTICLE: Entry(
        lambda r, root: ParticleSearch(root, r, r.beam_width, _given(r.iterations)),
        _particles,
        usual={"iterations": 1},
    ),
    AlgorithmName.MCTS: Entry(
        lambda r, root: MonteCarloSearch(
            root, r.expansion, _given(r.simulations), _given(r.exploration), r.aggregation
        ),
        _tree,
        usual={"simulations": 32, "exploration": 1.25},
    ),
    AlgorithmName.AUTO: Entry(
        lambda r, root: AutoSearch(
            root,
            r.candidates,
            r.aggregation,
            _given(r.rebase_temperature),
            (r.generator_budget, r.verifier_budget),
            _longest_path(r),
        ),
        _open_children,
        usual={"rebase_temperature": 0.1},
    ),
}
