"""What a caller asks for: one problem and how to search it."""

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from espalier.engine.errors import InvalidRequestError, Violation


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


SPELLING = "spelling"
"""Name of what tells answers apart where their canonical spellings do."""


class GroupingName(StrEnum):
    """What may tell equal answers from different ones in a vote; see `grouping`."""

    MATH_VERIFY = "math-verify"
    SPELLING = SPELLING


class Vote(StrEnum):
    """How complete answers elect one.

    `naive` takes the answer of the best-scored path, `weighted` the answer with the largest sum of path scores,
    `majority` the answer that most paths give.
    """

    NAIVE = "naive"
    WEIGHTED = "weighted"
    MAJORITY = "majority"


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds on what one request may ask for; the service's defaults."""

    problem_bytes: int = 32 * 1024
    beam_width: int = 256
    expansion: int = 64
    candidates: int = 1024
    max_steps: int = 128
    max_step_tokens: int = 2048
    max_tokens: int = 262_144
    lookahead_steps: int = 16
    simulations: int = 1024
    tree_nodes: int = 4096
    iterations: int = 64
    generator_budget: int = 16 * 2**20
    verifier_budget: int = 16 * 2**20
    time_limit: float = 24 * 3600


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """One problem and the search to run on it.

    `beam_width` is N, the paths kept after each step; `expansion` is M, the children each kept path samples, so a step
    scores N*M candidates. (search-and-learn names these the other way round: its `n` is our N*M, its `beam_width` our
    M.) For `best-of-n` and `majority`, N is the number of independent paths and M does not apply; `adaptive` samples M
    of them at a time. `dvts` has N subtrees, `particle` N particles (and no M), `rebase` N*M samples a round, `mcts`
    expands a leaf by M children (and has no N), and `auto` splits N*M into an N and M of its own.

    Attributes:
        problem: the question, as text.
        algorithm: which search to run.
        beam_width: N.
        expansion: M.
        vote: how complete answers elect one; None takes the algorithm's usual one.
        aggregation: how step scores become a path score.
        temperature: softmax temperature of the generator; 0 is greedy. None takes the checkpoint's own.
        top_k: most likely tokens kept, 0 for all. None takes the checkpoint's own.
        top_p: nucleus mass kept of those, in (0, 1]. None takes the checkpoint's own.
        min_p: least probability kept, as a share of the most likely token's. None takes the checkpoint's own.
        max_steps: depth limit, in steps.
        max_step_tokens: limit on the tokens of one step.
        max_tokens: limit on the generated tokens of one path. None takes what the context leaves.
        seed: seed of all sampling of this request.
        lookahead_steps: greedy steps after which `lookahead` scores a child. This and what follows is read by the
            algorithm it names alone; None takes that algorithm's usual value.
        simulations: leaves that `mcts` expands, or complete paths that it comes back to.
        exploration: weight of what `mcts` has seen little of.
        rebase_temperature: softmax temperature by which `rebase` shares out its samples; small favours the best.
        iterations: runs of the particle filter; more than one make `particle` particle Gibbs.
        confidence: probability that the majority's leader is first for good at which `adaptive` stops; with 1, only
            when nothing can overtake it.
        generator_budget: limit on the tokens sampled in the whole search; None for none.
        verifier_budget: limit on the verifier's tokens of the whole search, the problem's included; None for none.
        time_limit: seconds after which the search ends with what it has, counted from its submission; None for none.
        merge_duplicates: whether samples of one step that draw the same tokens are computed once, and equal siblings
            become one node that counts for all. Without, each sample is decoded and scored by itself: the same
            distribution of answers for more work, to measure what a model that words its steps freely would cost.
    """

    problem: str
    algorithm: AlgorithmName = AlgorithmName.BEAM
    beam_width: int = 4
    expansion: int = 4
    vote: Vote | None = None
    aggregation: Aggregation = Aggregation.LAST
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_steps: int = 40
    max_step_tokens: int = 256
    max_tokens: int | None = None
    seed: int = 0
    lookahead_steps: int | None = None
    simulations: int | None = None
    exploration: float | None = None
    rebase_temperature: float | None = None
    iterations: int | None = None
    confidence: float | None = None
    generator_budget: int | None = None
    verifier_budget: int | None = None
    time_limit: float | None = None
    merge_duplicates: bool = True

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


def validate(request: SearchRequest, limits: Limits) -> None:
    """Check every field of `request` against its rule and `limits`.

    Raises:
        InvalidRequestError: listing all violations.
    """
    found: list[Violation] = []

    def require(ok: bool, field: str, description: str) -> None:
        if not ok:
            found.append(Violation(field, description))

    def within(field: str, value: int, high: int) -> None:
        require(1 <= value <= high, field, f"must be between 1 and {high}, is {value}")

    size = len(request.problem.encode(errors="replace"))
    valid = not any("\ud800" <= c <= "\udfff" for c in request.problem)
    require(valid, "problem", "must be valid Unicode, and holds half a surrogate pair")
    require(bool(request.problem.strip()), "problem", "must not be empty")
    require(size <= limits.problem_bytes, "problem", f"must be at most {limits.problem_bytes} bytes, is {size}")
    within("beam_width", request.beam_width, limits.beam_width)
    within("expansion", request.expansion, limits.expansion)
    require(
        request.candidates <= limits.candidates,
        "expansion",
        f"beam_width * expansion must be at most {limits.candidates}, is {request.candidates}",
    )
    within("max_steps", request.max_steps, limits.max_steps)
    within("max_step_tokens", request.max_step_tokens, limits.max_step_tokens)
    if request.max_tokens is not None:
        within("max_tokens", request.max_tokens, limits.max_tokens)
    if (t := request.temperature) is not None:
        require(math.isfinite(t) and 0 <= t <= 10, "temperature", f"must be between 0 and 10, is {t}")
    if (k := request.top_k) is not None:
        require(0 <= k < 2**31, "top_k", f"must be between 0 and 2**31 - 1, is {k}")
    if (p := request.top_p) is not None:
        require(math.isfinite(p) and 0 < p <= 1, "top_p", f"must be above 0 and at most 1, is {p}")
    if (share := request.min_p) is not None:
        require(math.isfinite(share) and 0 <= share <= 1, "min_p", f"must be between 0 and 1, is {share}")
    for field in ("lookahead_steps", "simulations", "iterations", "generator_budget", "verifier_budget"):
        if (count := getattr(request, field)) is not None:
            within(field, count, getattr(limits, field))
    tree = (request.simulations or 1) * request.expansion
    if request.algorithm is AlgorithmName.MCTS and tree > limits.tree_nodes:
        require(False, "simulations", f"simulations * expansion must be at most {limits.tree_nodes}, is {tree}")
    if (weight := request.exploration) is not None:
        require(math.isfinite(weight) and 0 <= weight <= 100, "exploration", f"must be between 0 and 100, is {weight}")
    if (t := request.rebase_temperature) is not None:
        ok = math.isfinite(t) and 1e-3 <= t <= 100
        require(ok, "rebase_temperature", f"must be between 0.001 and 100, is {t}")
    if (c := request.confidence) is not None:
        require(math.isfinite(c) and 0.5 <= c <= 1, "confidence", f"must be between 0.5 and 1, is {c}")
    if (s := request.time_limit) is not None:
        ok = math.isfinite(s) and 0 < s <= limits.time_limit
        require(ok, "time_limit", f"must be above 0 and at most {limits.time_limit:g} seconds, is {s}")
    require(0 <= request.seed < 2**63, "seed", f"must be between 0 and 2**63 - 1, is {request.seed}")
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
