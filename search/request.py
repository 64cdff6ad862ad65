"""The request for one search: the problem, the algorithm and its parameters."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypedDict

from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.conversation import ChatMessage, conversation_text, history_violations
from espalier.search.fairness import Account
from espalier.search.schema import CodeName, Option, from_values, text_violations, violations


class AlgorithmName(StrEnum):
    """Available search algorithms."""

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
    """Aggregation of the scores of a path's steps into the path's score."""

    LAST = "last"
    MIN = "min"
    PROD = "prod"
    MEAN = "mean"


EXACT_MATCH = "exact-match"
"""Name of comparing answers by their canonical text alone."""


class AnswerEquivalence(StrEnum):
    """Test of a vote for the equality of two answers; see `voting.equivalence`."""

    MATH_VERIFY = "math-verify"
    EXACT_MATCH = EXACT_MATCH


class Vote(StrEnum):
    """Selection of one answer from the complete paths.

    `naive` takes the answer of the best-scored path, `weighted` the answer with the largest sum of path scores,
    `majority` the answer given by most paths.
    """

    NAIVE = "naive"
    WEIGHTED = "weighted"
    MAJORITY = "majority"


class EarlyStop(StrEnum):
    """When a majority or best-of-n search ends because its answer is decided; see `voting.decided`."""

    OFF = "off"
    DECIDED = "decided"
    FRUGAL = "frugal"


MAX_PROBLEM_BYTES = 32 * 1024
MAX_CANDIDATES = 1024
"""Limit on the children sampled in one round, N*M."""
MAX_TREE_NODES = 4096
"""Limit on the nodes created by `mcts`: simulations times M."""

_Count = Interval(ge=1, le=1024)


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """One problem and the search to run on it.

    `beam_width` is N, the number of paths kept after each step; `expansion` is M, the children sampled from each kept
    path. A step scores N*M candidates. (search-and-learn's `n` is our N*M, and its `beam_width` is our M.) Their
    meaning depends on the algorithm:

    - `best-of-n`, `majority`: N independent paths; M is not used.
    - `adaptive`: at most N independent paths, sampled M at a time.
    - `dvts`: N subtrees of M children. `particle`: N particles; M is not used.
    - `rebase`: N*M samples a round. `mcts`: M children per expanded leaf; N is not used.
    - `auto`: chooses its own N and M with the same product.

    Fields from `lookahead_steps` to `confidence` are used only by the algorithm that their help text names; None takes
    that algorithm's default.

    `history` holds the messages of a conversation before the problem, the oldest first. A first message of the role
    `system` replaces the generator's system prompt. The generator reads the conversation through its chat template, the
    verifier as plain text without the system message, `problem_text`.
    """

    help_panel: ClassVar = "Search"

    problem: str
    algorithm: Annotated[
        AlgorithmName | CodeName,
        Option("Which search; search/algorithms/README.md says what each does, and how to write one.", short="-a"),
    ] = AlgorithmName.BEAM
    beam_width: Annotated[
        int,
        Interval(ge=1, le=256),
        Option(
            "N: paths kept after each step, subtrees, particles, or independent paths. (search-and-learn's n is N·M.)",
            short="-N",
        ),
    ] = 4
    expansion: Annotated[
        int,
        Interval(ge=1, le=64),
        Option(
            "M: children sampled from each kept path. adaptive: paths sampled at a time. (search-and-learn's "
            "beam_width.)",
            short="-M",
        ),
    ] = 4
    vote: Annotated[
        Vote | None,
        Option("How to select the answer; default: majority for majority, adaptive and single paths, else weighted."),
    ] = None
    aggregation: Annotated[Aggregation, Option("How to combine the scores of a path's steps.")] = Aggregation.LAST
    temperature: Annotated[
        float | None,
        Interval(ge=0, le=10),
        Option("Sampling temperature, 0 for greedy; default: generation_config.json's, ignoring do_sample, else 0.8."),
    ] = None
    top_k: Annotated[
        int | None,
        Interval(ge=0, le=2**31 - 1),
        Option("Sample from the k most likely tokens, 0 for all; default: generation_config.json's, else 0."),
    ] = None
    top_p: Annotated[
        float | None,
        Interval(gt=0, le=1),
        Option("Nucleus sampling: probability mass to keep; default: generation_config.json's, else 1."),
    ] = None
    min_p: Annotated[
        float | None,
        Interval(ge=0, le=1),
        Option("Minimum probability relative to the most likely token; default: generation_config.json's, else 0."),
    ] = None
    max_steps: Annotated[int, Interval(ge=1, le=128), Option("Maximum depth, in steps.")] = 40
    max_step_tokens: Annotated[int, Interval(ge=1, le=2048), Option("Maximum tokens of one step.")] = 256
    max_tokens: Annotated[
        int | None,
        Interval(ge=1, le=262_144),
        Option("Maximum tokens of one path; default: 2048, or what the context leaves."),
    ] = None
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1), Option("Seed of all sampling.")] = 0
    lookahead_steps: Annotated[
        int | None,
        Interval(ge=1, le=16),
        Option("lookahead: greedy steps rolled out before a child is scored; default: 1."),
    ] = None
    simulations: Annotated[int | None, _Count, Option("mcts: number of simulations; default: 32.")] = None
    exploration: Annotated[
        float | None,
        Interval(ge=0, le=100),
        Option("mcts: PUCT exploration constant; default: 1.25."),
    ] = None
    rebase_temperature: Annotated[
        float | None,
        Interval(ge=0.001, le=100),
        Option("rebase: softmax temperature over scores when samples are allocated; default: 0.1."),
    ] = None
    iterations: Annotated[
        int | None,
        Interval(ge=1, le=64),
        Option("particle: iterations of the filter; more than one is particle Gibbs; default: 1."),
    ] = None
    confidence: Annotated[
        float | None,
        Interval(ge=0.5, le=1),
        Option(
            "adaptive: stop when the leading answer is the true majority with this probability; with 1, when nothing "
            "can overtake it; default: 0.95."
        ),
    ] = None
    generator_budget: Annotated[
        int | None,
        Interval(ge=1, le=16 * 2**20),
        Option("Maximum tokens sampled in the whole search; default: no limit."),
    ] = None
    verifier_budget: Annotated[
        int | None,
        Interval(ge=1, le=16 * 2**20),
        Option("Maximum verifier tokens in the whole search, including the problem; default: no limit."),
    ] = None
    time_limit: Annotated[
        float | None,
        Interval(gt=0, le=24 * 3600),
        Option("Seconds from submission after which the search returns its best answer so far; default: no limit."),
    ] = None
    merge_duplicates: Annotated[
        bool,
        Option(
            "Compute equal samples of a step once and count them. The distribution of answers does not change, "
            "computing each by itself is just slower."
        ),
    ] = True
    early_stop: Annotated[
        EarlyStop,
        Option(
            "majority, best-of-n: whether to end once no path can change the answer any more: off, decided, or frugal, "
            "which runs only as many paths at a time as could decide it: fewer tokens, in more rounds."
        ),
    ] = EarlyStop.DECIDED
    history: tuple[ChatMessage, ...] = ()

    @property
    def candidates(self) -> int:
        """Maximum children sampled in one round: N*M, N for independent paths and particles, 1 for a single path."""
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

    @property
    def problem_text(self) -> str:
        """The problem with the turns before it, as a verifier reads it; see `conversation_text`."""
        return conversation_text(self.problem, self.history) if self.history else self.problem

    def to_dict(self) -> dict[str, Any]:
        """Return the request as JSON-serializable values."""
        return asdict(self)


class SearchFields(TypedDict, total=False):
    """Keyword arguments that are fields of `SearchRequest`; a test holds that they are the same."""

    algorithm: AlgorithmName | str
    beam_width: int
    expansion: int
    vote: Vote | str | None
    aggregation: Aggregation | str
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    max_steps: int
    max_step_tokens: int
    max_tokens: int | None
    seed: int
    lookahead_steps: int | None
    simulations: int | None
    exploration: float | None
    rebase_temperature: float | None
    iterations: int | None
    confidence: float | None
    generator_budget: int | None
    verifier_budget: int | None
    time_limit: float | None
    merge_duplicates: bool
    early_stop: EarlyStop | str
    history: Sequence[ChatMessage | Mapping[str, str]]


def make_request(problem: str | SearchRequest, given: Mapping[str, Any]) -> SearchRequest:
    """Build the request of one problem from its text or another request, and fields; enums may be given as strings.

    Raises:
        TypeError: the problem is neither a text nor a request.
        InvalidRequestError: lists unknown fields and invalid values.
    """
    if not isinstance(problem, str | SearchRequest):
        raise TypeError(f"a problem is a text or a SearchRequest, not {_a(problem)}")
    base = {"problem": problem} if isinstance(problem, str) else problem.to_dict()
    return from_values(SearchRequest, base | dict(given))


def with_own_code(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a request with `algorithm="MODULE:CLASS"` as the name of code to load.

    For the fields that whoever runs this process gives, and those of the sweep that it resumes; never for those of a
    request over the wire.
    """
    name = fields.get("algorithm")
    return {**fields, "algorithm": CodeName(name)} if isinstance(name, str) and ":" in name else dict(fields)


def several(problems: Iterable[str | SearchRequest]) -> Iterable[str | SearchRequest]:
    """Return the problems of `solve_many`, which a single one is not.

    Raises:
        TypeError: a single text would be searched character by character.
    """
    if isinstance(problems, str | bytes | SearchRequest | Mapping) or not isinstance(problems, Iterable):
        raise TypeError(f"solve_many takes a list of problems, not {_a(problems)}; for one problem call solve")
    return problems


def _a(value: object) -> str:
    return "None" if value is None else f"an object of the type {type(value).__name__}"


def validate(request: SearchRequest) -> None:
    """Check every field of a request, and the limits on products of fields.

    Raises:
        InvalidRequestError: lists all violations.
    """
    found: list[Violation] = []

    def require(ok: bool, field: str, description: str) -> None:
        if not ok:
            found.append(Violation(field, description))

    of_fields = violations(request)
    if not {"problem", "history"} & {violation.field for violation in of_fields}:
        found += text_violations("problem", request.problem, MAX_PROBLEM_BYTES)
        require(bool(request.problem.strip()), "problem", "must not be empty")
        found += history_violations(request.history) if request.history else []
    found += of_fields
    tree = (request.simulations or 1) * request.expansion
    many = f"beam_width * expansion must be at most {MAX_CANDIDATES}, is {request.candidates}"
    require(request.candidates <= MAX_CANDIDATES, "expansion", many)
    large = f"simulations * expansion must be at most {MAX_TREE_NODES}, is {tree}"
    require(request.algorithm is not AlgorithmName.MCTS or tree <= MAX_TREE_NODES, "simulations", large)
    if found:
        raise InvalidRequestError(found)


DEFAULT_MAX_TOKENS = 2048
"""Default limit on the generated tokens of one path."""


def estimated_tokens(request: SearchRequest) -> int:
    """About how many tokens a search may sample, from the request alone: for shares, not for limits."""
    path = min(request.max_tokens or DEFAULT_MAX_TOKENS, request.max_steps * request.max_step_tokens)
    return request.beam_width * request.expansion * path


MAX_PRIORITY = 100
"""Priorities are between this and its negative."""


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """Options of a submission that do not change its result.

    Attributes:
        priority: searches of a larger priority start first, may preempt searches of a smaller one for memory or a slot,
            and are preempted last.
        caller: whose search it is; callers get equal shares of the slots and of the models' time.
        connection: the connection of a caller without a login; connections share what their caller gets.
        salt: cached prefixes are shared only between searches with the same salt. Use different salts for callers that
            must not observe each other's prompts through timing.
        waited: seconds that the search waited before submission; counted in its queue time and its time limit.
        timed_from_start: whether the time limit starts when the search leaves the queue, not at submission. Use it for
            batches submitted at once.
        max_seconds: seconds after submission at which the search ends, whatever its own time limit.
        report_nodes: whether `StepDone` events tell how the tree has changed, and come also while paths are sampled to
            their ends within one round.
    """

    priority: int = 0
    caller: str = ""
    connection: str = ""
    salt: bytes = b""
    waited: float = 0.0
    timed_from_start: bool = False
    max_seconds: float = math.inf
    report_nodes: bool = False

    @property
    def account(self) -> Account:
        """Account that the search is charged to."""
        return Account(self.caller, self.connection)


USUAL = SubmitOptions()
