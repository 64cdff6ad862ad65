"""What a caller asks for: one problem and how to search it."""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.schema import Option, violations


class AlgorithmName(StrEnum):
    """The search algorithms on offer."""

    GREEDY = "greedy"
    CHAIN = "chain"
    MAJORITY = "majority"
    BEST_OF_N = "best-of-n"
    ADAPTIVE = "adaptive"
    BEAM = "beam"
    DVTS = "dvts"
    LOOKAHEAD = "lookahead"
    REBASE = "rebase"
    PARTICLE = "particle"
    MCTS = "mcts"
    AUTO = "auto"


class Aggregation(StrEnum):
    """How the scores of a path's steps become the path's score."""

    LAST = "last"
    MIN = "min"
    PROD = "prod"
    MEAN = "mean"


EXACT_MATCH = "exact-match"
"""Name of what tells answers apart where their canonical spellings do."""


class AnswerEquivalence(StrEnum):
    """What may tell equal answers from different ones in a vote; see `grouping`."""

    MATH_VERIFY = "math-verify"
    EXACT_MATCH = EXACT_MATCH


class Vote(StrEnum):
    """How complete answers elect one.

    `naive` takes the answer of the best-scored path, `weighted` the answer with the largest sum of path scores,
    `majority` the answer that most paths give.
    """

    NAIVE = "naive"
    WEIGHTED = "weighted"
    MAJORITY = "majority"


MAX_PROBLEM_BYTES = 32 * 1024
MAX_CANDIDATES = 1024
"""Children that one round may sample: N*M."""
MAX_TREE_NODES = 4096
"""Nodes that `mcts` may make: its simulations times M."""

_Count = Interval(ge=1, le=1024)


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """One problem and the search to run on it.

    `beam_width` is N, the paths kept after each step; `expansion` is M, the children each kept path samples, so a step
    scores N*M candidates. (search-and-learn names these the other way round: its `n` is our N*M, its `beam_width` our
    M.) For `best-of-n` and `majority`, N is the number of independent paths and M does not apply; `adaptive` samples M
    of them at a time. `dvts` has N subtrees, `particle` N particles (and no M), `rebase` N*M samples a round, `mcts`
    expands a leaf by M children (and has no N), and `auto` splits N*M into an N and M of its own.

    From `lookahead_steps` to `confidence`, a field is read by the algorithm it names alone, and None takes that
    algorithm's usual value.
    """

    help_panel: ClassVar = "Search"

    problem: str
    algorithm: Annotated[
        AlgorithmName, Option("Which search; search/algorithms/README.md says what each does.", short="-a")
    ] = AlgorithmName.BEAM
    beam_width: Annotated[
        int,
        Interval(ge=1, le=256),
        Option(
            "N: paths kept after each step, subtrees, particles, or independent paths. (search-and-learn: n is N·M.)",
            short="-N",
        ),
    ] = 4
    expansion: Annotated[
        int,
        Interval(ge=1, le=64),
        Option(
            "M: children each kept path samples; a step scores N·M. adaptive: paths at a time. (search-and-learn: "
            "beam_width.)",
            short="-M",
        ),
    ] = 4
    vote: Annotated[
        Vote | None,
        Option(
            "How complete answers become one; default: majority for majority, adaptive and one path, else weighted."
        ),
    ] = None
    aggregation: Annotated[Aggregation, Option("How the scores of a path's steps become the path's score.")] = (
        Aggregation.LAST
    )
    temperature: Annotated[
        float | None,
        Interval(ge=0, le=10),
        Option("0 is greedy; default: the checkpoint's own, whatever its do_sample says, else 0.8."),
    ] = None
    top_k: Annotated[
        int | None,
        Interval(ge=0, le=2**31 - 1),
        Option("Most likely tokens kept, 0 for all; default: the checkpoint's own."),
    ] = None
    top_p: Annotated[
        float | None,
        Interval(gt=0, le=1),
        Option("Nucleus mass kept of those; default: the checkpoint's own, else 1."),
    ] = None
    min_p: Annotated[
        float | None,
        Interval(ge=0, le=1),
        Option("Least share of the likeliest token's probability; default: the checkpoint's own, else 0."),
    ] = None
    max_steps: Annotated[int, Interval(ge=1, le=128), Option("Depth limit, in steps.")] = 40
    max_step_tokens: Annotated[int, Interval(ge=1, le=2048), Option("Limit on one step's tokens.")] = 256
    max_tokens: Annotated[
        int | None,
        Interval(ge=1, le=262_144),
        Option("Limit on one path's tokens; default: 2048, or what the context leaves."),
    ] = None
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1), Option("Seed of all sampling.")] = 0
    lookahead_steps: Annotated[
        int | None,
        Interval(ge=1, le=16),
        Option("lookahead: greedy steps after which a child is scored; default: 1."),
    ] = None
    simulations: Annotated[
        int | None, _Count, Option("mcts: walks down the tree, most of which expand a leaf; default: 32.")
    ] = None
    exploration: Annotated[
        float | None,
        Interval(ge=0, le=100),
        Option("mcts: weight of nodes that were seen little; default: 1.25."),
    ] = None
    rebase_temperature: Annotated[
        float | None,
        Interval(ge=0.001, le=100),
        Option(
            "rebase: softmax temperature by which scores share out the samples; small favours the best; default: 0.1."
        ),
    ] = None
    iterations: Annotated[
        int | None,
        Interval(ge=1, le=64),
        Option("particle: runs of the filter, more than one for particle Gibbs; default: 1."),
    ] = None
    confidence: Annotated[
        float | None,
        Interval(ge=0.5, le=1),
        Option(
            "adaptive: stop when the majority's leader is first for good with this probability; with 1, when nothing "
            "can overtake it; default: 0.95."
        ),
    ] = None
    generator_budget: Annotated[
        int | None,
        Interval(ge=1, le=16 * 2**20),
        Option("Limit on the tokens sampled in the whole search; default: none."),
    ] = None
    verifier_budget: Annotated[
        int | None,
        Interval(ge=1, le=16 * 2**20),
        Option("Limit on the verifier's tokens in the whole search, the problem's included; default: none."),
    ] = None
    time_limit: Annotated[
        float | None,
        Interval(gt=0, le=24 * 3600),
        Option("Seconds after which a search ends with the best it has, counted from its submission; default: none."),
    ] = None
    merge_duplicates: Annotated[
        bool,
        Option(
            "Compute equal samples of a step once and count them; without, each is decoded and scored by itself: the "
            "same distribution of answers for more work."
        ),
    ] = True

    @property
    def candidates(self) -> int:
        """Children sampled in one round at most: N*M, but N for independent paths and particles, 1 for one path."""
        match self.algorithm:
            case AlgorithmName.GREEDY | AlgorithmName.CHAIN:
                return 1
            case AlgorithmName.MAJORITY | AlgorithmName.BEST_OF_N | AlgorithmName.PARTICLE:
                return self.beam_width
            case AlgorithmName.ADAPTIVE:
                return min(self.beam_width, self.expansion)
            case AlgorithmName.MCTS:
                return self.expansion
            case _:
                return self.beam_width * self.expansion

    def to_dict(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def validate(request: SearchRequest) -> None:
    """Check every field of a request against its rule, and those together that have one in common.

    Raises:
        InvalidRequestError: listing all violations.
    """
    found: list[Violation] = []

    def require(ok: bool, field: str, description: str) -> None:
        if not ok:
            found.append(Violation(field, description))

    size, tree = len(request.problem.encode(errors="replace")), (request.simulations or 1) * request.expansion
    valid = not any("\ud800" <= c <= "\udfff" for c in request.problem)
    require(valid, "problem", "must be valid Unicode, and holds half a surrogate pair")
    require(bool(request.problem.strip()), "problem", "must not be empty")
    require(size <= MAX_PROBLEM_BYTES, "problem", f"must be at most {MAX_PROBLEM_BYTES} bytes, is {size}")
    found += violations(request)
    many = f"beam_width * expansion must be at most {MAX_CANDIDATES}, is {request.candidates}"
    require(request.candidates <= MAX_CANDIDATES, "expansion", many)
    large = f"simulations * expansion must be at most {MAX_TREE_NODES}, is {tree}"
    require(request.algorithm is not AlgorithmName.MCTS or tree <= MAX_TREE_NODES, "simulations", large)
    if found:
        raise InvalidRequestError(found)


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What whoever submits a search says of it; nothing here changes its result.

    Attributes:
        priority: searches of a larger one start first, take the place and memory of those of a smaller one where there
            is no other, and keep theirs where others must give theirs up.
        salt: prompts computed for one search are reused for another only under the same salt: give callers that must
            not learn of each other, by how fast an answer comes, different ones.
        waited: seconds it waited before it was submitted; its time in the queue and its time limit count them.
        timed_from_start: whether its time limit counts from when it leaves the queue, and not from when it came: for
            many that are submitted at once and that nobody waits for one by one.
    """

    priority: int = 0
    salt: bytes = b""
    waited: float = 0.0
    timed_from_start: bool = False


USUAL = SubmitOptions()
