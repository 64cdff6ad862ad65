"""The request for one search: the problem, the algorithm and its parameters."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypedDict

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.algorithms import PARAMETERS, algorithm_of, parameter_hint
from espalier.search.algorithms.base import SearchAlgorithm
from espalier.search.common_fields import Aggregation as Aggregation
from espalier.search.common_fields import AlgorithmName as AlgorithmName
from espalier.search.common_fields import CommonFields
from espalier.search.common_fields import EarlyStop as EarlyStop
from espalier.search.common_fields import Vote as Vote
from espalier.search.conversation import AboutProblem, ChatMessage
from espalier.search.fairness import Account
from espalier.search.schema import CodeName, from_values, violations

EXACT_MATCH = "exact-match"
"""Name of comparing answers by their canonical text alone."""


class AnswerEquivalence(StrEnum):
    """Test of a vote for the equality of two answers; see `voting.equivalence`."""

    MATH_VERIFY = "math-verify"
    EXACT_MATCH = EXACT_MATCH


@dataclass(frozen=True, slots=True)
class SearchRequest(CommonFields):
    """One problem and the search to run on it: the fields of every search, and parameters of single algorithms.

    An algorithm declares its parameters; None takes its default. Without an algorithm the loaded models decide; see
    `algorithms.default_algorithm`.
    """

    help_panel: ClassVar = "Search"

    lookahead_steps: Annotated[int | None, PARAMETERS["lookahead_steps"]] = None
    simulations: Annotated[int | None, PARAMETERS["simulations"]] = None
    exploration: Annotated[float | None, PARAMETERS["exploration"]] = None
    rebase_temperature: Annotated[float | None, PARAMETERS["rebase_temperature"]] = None
    iterations: Annotated[int | None, PARAMETERS["iterations"]] = None
    confidence: Annotated[float | None, PARAMETERS["confidence"]] = None

    @property
    def candidates(self) -> int:
        """Maximum children sampled in one round."""
        return algorithm_of(self).candidates(self)

    @property
    def estimated_tokens(self) -> int:
        """About how many tokens the search may sample, from the request alone: for shares, not for limits."""
        return self.beam_width * self.expansion * self.path_limit

    def all_violations(self) -> list[Violation]:
        """See `AboutProblem`; those of limits on products of fields too."""
        found = AboutProblem.all_violations(self)
        if self.answer_form and self.text_form:
            found.append(Violation("answer_form", "binds a part of what text_form binds; give one of them"))
        found += self.tool_violations()
        if self.answer_form and self.callable_tools:
            found.append(Violation("answer_form", "binds boxes, and calls of tools are in none; leave one out"))
        if self.stop_when and not self.probe_every:
            found.append(Violation("stop_when", "needs probe_every: the rule reads probes"))
        if "algorithm" not in {violation.field for violation in found}:
            its = algorithm_of(self)
            own = violations(its.parameters(self)) if isinstance(self.algorithm, CodeName) else []
            found += [*own, *its.violations(self)]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the request as JSON-serializable values."""
        return asdict(self)


class SearchFields(TypedDict, total=False):
    """Keyword arguments that are fields of `SearchRequest`; a test holds that they are the same."""

    algorithm: AlgorithmName | str | type[SearchAlgorithm] | None
    beam_width: int
    expansion: int
    vote: Vote | str | None
    aggregation: Aggregation | str
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: str | Mapping[int, float]
    step_rule: str
    end_at_box: bool
    thinking: str
    more_thinking: int
    probe_every: int | None
    stop_when: str
    stop_unsure: str
    answer_form: str
    text_form: str
    max_steps: int | None
    max_step_tokens: int | None
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
    tools: str | Sequence[Mapping[str, Any] | Callable[..., Any]]
    tool_choice: str
    parallel_tool_calls: bool
    early_stop: EarlyStop | str
    history: Sequence[ChatMessage | Mapping[str, str]]


def make_request(problem: str | SearchRequest, given: Mapping[str, Any]) -> SearchRequest:
    """Build the request of one problem from its text or another request, and fields; enums may be given as strings.

    Raises:
        TypeError: the problem is neither a text nor a request.
        InvalidRequestError: lists unknown fields and invalid values.
    """
    if not isinstance(problem, str | SearchRequest):
        raise TypeError(f"a problem is a text or a SearchRequest, not an object of the type {type(problem).__name__}")
    base = {"problem": problem} if isinstance(problem, str) else problem.to_dict()
    values = base | dict(given)
    if not isinstance(values.get("tools", ""), str):
        from espalier.search.tools.declared import tools_text  # for requests with tools alone

        values["tools"] = tools_text(values["tools"])
    try:
        return from_values(SearchRequest, values)
    except InvalidRequestError as error:
        found = [replace(v, description=v.description + parameter_hint(v.field, values)) for v in error.violations]
        raise InvalidRequestError(found) from None


def with_own_code(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a request with `algorithm="MODULE:CLASS"`, or with the class, as the name of code to load.

    For the fields that whoever runs this process gives, and those of the sweep that it resumes; never for those of a
    request over the wire.
    """
    name = fields.get("algorithm")
    if isinstance(name, type):
        name = f"{name.__module__}:{name.__qualname__}"
    return {**fields, "algorithm": CodeName(name)} if isinstance(name, str) and ":" in name else dict(fields)


def several(problems: Iterable[str | SearchRequest]) -> Iterable[str | SearchRequest]:
    """Return the problems of `solve_many`, which a single one is not.

    Raises:
        TypeError: a single text would be searched character by character.
    """
    if isinstance(problems, str | bytes | SearchRequest | Mapping) or not isinstance(problems, Iterable):
        kind = type(problems).__name__
        raise TypeError(f"solve_many takes a list of problems, not an object of the type {kind}; for one call solve")
    return problems


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
            batches submitted together.
        max_seconds: seconds after submission at which the search ends, whatever its own time limit.
        report_nodes: whether `StepDone` events tell how the tree has changed, and come also while paths are sampled to
            their ends within one round.
        keep_rounds: whether the result of a search has its rounds, by which a trace is replayed.
        stream_text: whether completions report their text as it is sampled, by `TextSampled`.
    """

    priority: int = 0
    caller: str = ""
    connection: str = ""
    salt: bytes = b""
    waited: float = 0.0
    timed_from_start: bool = False
    max_seconds: float = math.inf
    report_nodes: bool = False
    keep_rounds: bool = True
    stream_text: bool = False

    @property
    def account(self) -> Account:
        """The account that the search is charged to."""
        return Account(self.caller, self.connection)


DEFAULT_OPTIONS = SubmitOptions()
