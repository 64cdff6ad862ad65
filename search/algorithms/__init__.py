"""Search algorithms, one class each, by name, and questions about the algorithm of a request."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar, get_args

from espalier.engine.own_code import file_digest
from espalier.search.algorithms.adaptive import AdaptivePaths
from espalier.search.algorithms.auto import AutoSearch
from espalier.search.algorithms.base import USABLE, Growth, MemoryEstimate, Scores, SearchAlgorithm
from espalier.search.algorithms.beam import BeamSearch
from espalier.search.algorithms.dvts import DiverseTreeSearch
from espalier.search.algorithms.independent import BestOfN, Chain, Greedy, Majority
from espalier.search.algorithms.lookahead import LookaheadSearch
from espalier.search.algorithms.mcts import MonteCarloSearch
from espalier.search.algorithms.own import make_own, own_class
from espalier.search.algorithms.particle import ParticleSearch
from espalier.search.algorithms.rebase import RewardBalancedSearch
from espalier.search.common_fields import (
    DEFAULT_MAX_STEP_TOKENS,
    DEFAULT_MAX_STEPS,
    Aggregation,
    AlgorithmName,
    CommonFields,
    EarlyStop,
    Vote,
)
from espalier.search.schema import CodeName, Field, Option, declared
from espalier.search.tree import Node

Request = TypeVar("Request", bound=CommonFields)

ALGORITHMS: Mapping[AlgorithmName, type[SearchAlgorithm]] = {
    AlgorithmName.GREEDY: Greedy,
    AlgorithmName.CHAIN: Chain,
    AlgorithmName.MAJORITY: Majority,
    AlgorithmName.BEST_OF_N: BestOfN,
    AlgorithmName.ADAPTIVE: AdaptivePaths,
    AlgorithmName.BEAM: BeamSearch,
    AlgorithmName.DVTS: DiverseTreeSearch,
    AlgorithmName.LOOKAHEAD: LookaheadSearch,
    AlgorithmName.REBASE: RewardBalancedSearch,
    AlgorithmName.PARTICLE: ParticleSearch,
    AlgorithmName.MCTS: MonteCarloSearch,
    AlgorithmName.AUTO: AutoSearch,
}
DEFAULTS = (AlgorithmName.BEAM, AlgorithmName.BEST_OF_N, AlgorithmName.MAJORITY)
"""Searches of requests that name none: the first that the loaded verifier's scores suffice for."""
SINGLE_PATH = AlgorithmName.GREEDY
"""The same of one path without a verifier."""


def _parameters() -> dict[str, Field]:
    found: dict[str, Field] = {}
    for its in ALGORITHMS.values():
        for field in declared(its.Parameters):
            users = ", ".join(name for name, each in ALGORITHMS.items() if each.Parameters is its.Parameters)
            assert field.option is not None, f"{its.__name__}.Parameters: {field.name} needs an Option with its help"
            help_text = f"{users}: {field.option.help}; default: {field.default}."
            found[field.name] = replace(field, optional=True, default=None, option=Option(help_text))
    return found


PARAMETERS: Mapping[str, Field] = _parameters()
"""Parameters of single algorithms as fields of a request, where None is the algorithm's default."""
_NOT_ALWAYS_USED = USABLE | {"aggregation", *PARAMETERS}


def algorithms_that_run(scores: Scores) -> list[AlgorithmName]:
    """Names of the algorithms that read no more than these scores, those of the loaded verifier."""
    sufficient = get_args(Scores)[: get_args(Scores).index(scores) + 1]
    return [name for name, its in ALGORITHMS.items() if its.scores in sufficient]


def default_algorithm(request: CommonFields, scores: Scores) -> AlgorithmName:
    """The search that runs where a request names none, by the scores of the loaded verifier."""
    if scores == "none" and request.beam_width == 1:
        return SINGLE_PATH
    running = algorithms_that_run(scores)
    return next(name for name in DEFAULTS if name in running)


def named(request: Request, scores: Scores) -> Request:
    """The request with the default search where it names none; see `default_algorithm`."""
    return request if request.algorithm else replace(request, algorithm=default_algorithm(request, scores))


def algorithm_of(request: CommonFields) -> type[SearchAlgorithm]:
    """The class of the request's algorithm, of the default with a verifier of steps where it names none.

    Code is loaded for a `CodeName` only.

    Raises:
        InvalidRequestError: a class of the user's own cannot be loaded or does not satisfy the contract.
        KeyError: there is no such algorithm.
    """
    name = request.algorithm or default_algorithm(request, "steps")
    return own_class(name) if isinstance(name, CodeName) else ALGORITHMS[name]


def parameter_hint(name: str, values: Mapping[str, Any]) -> str:
    """Advice for a name that is no field of a request but a parameter of the user's own algorithm; else empty."""
    own = values.get("algorithm")
    if not isinstance(own, CodeName) or name in {field.name for field in declared(CommonFields)} | PARAMETERS.keys():
        return ""
    if name not in {field.name for field in declared(own_class(own).Parameters)}:
        return ""
    return f"; write it behind the class: {own}:{name}={values.get(name)}"


def with_defaults(request: Request) -> Request:
    """Fill in the request's algorithm and vote, limits on steps, and fields that the algorithm uses, where None."""
    request = named(request, "steps")
    its = algorithm_of(request)
    parameters = its.parameters(request)
    values = {field.name: getattr(parameters, field.name) for field in fields(parameters) if field.name in PARAMETERS}
    if not its.whole_paths:
        values["max_steps"] = request.max_steps or DEFAULT_MAX_STEPS
        values["max_step_tokens"] = request.max_step_tokens or DEFAULT_MAX_STEP_TOKENS
    if tokens := request.step_rule.value.tokens:
        values["max_step_tokens"] = min(tokens, request.max_step_tokens or tokens)
    return replace(request, vote=vote_of(request), **values, **its.fixed)


def vote_of(request: CommonFields) -> Vote:
    """The request's vote, or the default of its algorithm."""
    its = algorithm_of(request)
    return Vote(request.vote or its.vote or (Vote.MAJORITY if its.scores == "none" else Vote.WEIGHTED))


def needs_verifier(request: CommonFields) -> bool:
    """True if the search uses the verifier's scores."""
    its = algorithm_of(request)
    return its.scores != "none" or ("vote" in its.uses and vote_of(request) in (Vote.NAIVE, Vote.WEIGHTED))


def what_needs_verifier(request: CommonFields) -> str:
    """Name that of a search which needs a verifier: its algorithm, or its vote."""
    name = request.algorithm or default_algorithm(request, "steps")
    return f"{name} with the vote {vote_of(request)}" if algorithm_of(request).scores == "none" else name


def unscored_default(what: str = f"the default search is {DEFAULTS[-1]}, {SINGLE_PATH} for a single path") -> str:
    """Return what follows, in a line, where no verifier is loaded and no search is named; and what would do."""
    return (
        f"no verifier is loaded, so that {what}; --verifier confidence scores steps by the generator's own "
        "probabilities, --verifier LARGER_MODEL --verifier-family likelihood-ratio by those of a larger model"
    )


def verifier_advice() -> str:
    """Advice for a search that needs a verifier where there is none."""
    without = ", ".join(algorithms_that_run("none"))
    return (
        "--verifier names a process reward model that fits the generator or the folder of a trunk head; self, "
        f"confidence and lowest-confidence need neither, {without} no verifier at all"
    )


def unused_fields(request: CommonFields) -> frozenset[str]:
    """Names of the fields that do not change this search, because its algorithm does not use them."""
    its = algorithm_of(request)
    used = {*its.uses, *(field.name for field in declared(its.Parameters))}
    return frozenset(_NOT_ALWAYS_USED - used - ({"aggregation"} if needs_verifier(request) else set()))


def stops_early(request: CommonFields) -> bool:
    """True if the search ends once its vote is decided.

    The best-scored path of a naive vote can be found by any path to its end, and `stop_unsure` needs whole paths first.
    """
    by_count = vote_of(request) is not Vote.NAIVE and not request.stop_unsure
    return by_count and "early_stop" in algorithm_of(request).uses and request.early_stop is not EarlyStop.OFF


def answers_suffice(request: CommonFields) -> bool:
    """True if the search uses no scores, or only those of complete answers."""
    return algorithm_of(request).scores != "steps"


def last_score_suffices(request: CommonFields) -> bool:
    """True if of a path's scores the search uses the last one alone, or none."""
    return answers_suffice(request) and request.aggregation is Aggregation.LAST


def algorithms_for_answers() -> list[str]:
    """Names of the algorithms that use scores, but only those of complete answers."""
    return [str(name) for name, its in ALGORITHMS.items() if its.scores != "steps" and "vote" in its.uses]


def has_independent_paths(request: CommonFields) -> bool:
    """True if the search votes over N paths that do not depend on one another, nor on scores."""
    its = algorithm_of(request)
    return its.growth is Growth.INDEPENDENT and "beam_width" in its.uses and not request.stop_unsure


def memory_estimate(request: CommonFields) -> tuple[MemoryEstimate, ...]:
    """Upper bounds on what the search holds of either model, one for each of its peaks."""
    return algorithm_of(request).memory(with_defaults(request))


def make_algorithm(request: CommonFields, root: Node) -> SearchAlgorithm:
    """Create the algorithm of a request, starting at `root`."""
    request = with_defaults(request)
    if isinstance(request.algorithm, CodeName):
        return make_own(request.algorithm, request, root)
    return algorithm_of(request)(request, root)  # pyright: ignore[reportCallIssue] - see `SearchAlgorithm`


def own_code(request: CommonFields) -> dict[str, str]:
    """SHA-256 of the file of a search of the user's own, by a name for it; empty for the others, and without a file."""
    name = request.algorithm
    return {"algorithm_code": file_digest(own_class(name))} if isinstance(name, CodeName) else {}
