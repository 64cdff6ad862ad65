"""The Executor protocol: searches and completions run by an orchestrator in this process, or by other processes.

Imported without torch, so that a server can handle signals before it loads anything.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, get_args

from espalier.engine.errors import EspalierError, MisuseError
from espalier.prm.limits import UNLIMITED, PathLimits
from espalier.search import completion
from espalier.search.algorithms import algorithm_of, named, with_defaults
from espalier.search.algorithms.advised import AdvisedSearch
from espalier.search.algorithms.base import Scores
from espalier.search.common_fields import DEFAULT_MAX_TOKENS, PenaltyFields
from espalier.search.request import DEFAULT_OPTIONS, SearchRequest, SubmitOptions
from espalier.search.result import Event, Finished, SearchResult, StopReason, Usage
from espalier.search.rollout import RolloutRequest, RolloutResult
from espalier.search.rules import ThinkingMode
from espalier.search.scores import (
    ScoreRequest,
    ScoreResult,
    ScoreSessionRequest,
    SessionTurn,
    SolutionScores,
    StepsScored,
)
from espalier.search.server_info import Occupancy
from espalier.search.voting.equivalence import MathVerify

if TYPE_CHECKING:
    from espalier.engine.guidance.grammar import Grammar
    from espalier.search.thoughts.marks import ThoughtMarks
    from espalier.search.thoughts.plans import ProbePlan, ThoughtPlan

AnyRequest = SearchRequest | completion.CompletionRequest | ScoreRequest | ScoreSessionRequest | RolloutRequest
AnyResult = SearchResult | completion.CompletionResult | ScoreResult | RolloutResult
AnyEvent = Event | completion.TextSampled | StepsScored | Finished[AnyResult]


@dataclass(frozen=True, slots=True)
class Rejected:
    """The only event of a search that a worker did not accept; `error` is what `submit` would have raised."""

    search_id: str
    error: Exception


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields whose default may be the checkpoint's."""


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """Values of the loaded models for the fields that a request leaves open.

    Attributes:
        temperature: taken from the checkpoint's generation_config.json like the three below, where 0 is greedy; 0.8 if
            absent. `do_sample` is ignored: it is a default for `generate()` of transformers, and search needs samples
            that differ.
        top_k: 0 keeps all tokens.
        top_p: in (0, 1].
        min_p: 0 keeps all tokens.
        repetition_penalty: of the file too, as transformers and vLLM take it; 1 is none.
        max_positions: the context size, in tokens.
        by_mode: by the mode of `thinking`, the values that take the place of those above.
        advised: searches of an advice file, from which an algorithm may choose; see `SearchAlgorithm.advised`.
        scores: those of the verifier, which decide the search of a request that names none; see `default_algorithm`.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_positions: int
    repetition_penalty: float = 1.0
    by_mode: Mapping[ThinkingMode, Mapping[str, float]] = field(default_factory=dict)
    advised: tuple[AdvisedSearch, ...] = ()
    scores: Scores = "steps"

    def sampling_of(self, request: PenaltyFields, mode: ThinkingMode | None = None) -> dict[str, Any]:
        """The sampling parameters that a request leaves open, for a `mode` of thinking if it has one."""
        own = self.by_mode.get(mode, {}) if mode else {}
        names = [name for name in _SAMPLING if hasattr(request, name) and getattr(request, name) is None]
        return {name: own.get(name, getattr(self, name)) for name in names}

    def fill(self, request: SearchRequest) -> SearchRequest:
        """Return the request with every default filled in from the algorithm, the checkpoint and the context size.

        None remains for absent limits and for fields that the algorithm does not use. The path's token limit is that of
        a prompt which leaves room for it.
        """
        request = named(request, self.scores)
        request = with_defaults(algorithm_of(request).advised(request, self.advised))
        max_tokens = min(request.max_tokens or DEFAULT_MAX_TOKENS, self.max_positions)
        return replace(request, **self.sampling_of(request, request.thinking.value.mode), max_tokens=max_tokens)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A generator's prompt for a search.

    Attributes:
        token_ids: its tokens.
        opened: whether it opens a thought.
        thinks: whether the model is expected to think; of a completion, whether a thought is told apart.
        warnings: what the chat template did not take as it stood, whole sentences.
    """

    token_ids: list[int]
    opened: bool = False
    thinks: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A valid request with all that follows from it for the models that will run it; picklable.

    Attributes:
        request: the request with every default filled in.
        generator_limits: bounds on the generator's tokens.
        verifier_limits: bounds on the verifier's tokens; None if the search opens no verifier sequences.
        blocks: KV blocks that the search may hold, by KV group: at most, or with paths of the expected length.
        generator_prompt: the generator's prompt, as token ids.
        verifier_prompt: the verifier's prompt; empty without `verifier_limits`.
        score_final_only: whether only the last step of each path is scored; the verifier then reads the path at once.
        warnings: what the result will warn of, whole sentences.
        thoughts: how its paths think; None for a generator that does not.
        probes: how its paths are probed; None if they are not.
        grammar: what its paths write behind their thoughts; None for anything.
        probe_grammar: what its probes write; None for anything.
    """

    request: SearchRequest
    generator_limits: PathLimits
    verifier_limits: PathLimits | None
    blocks: Mapping[str, int] = field(default_factory=dict)
    generator_prompt: tuple[int, ...] = ()
    verifier_prompt: tuple[int, ...] = ()
    score_final_only: bool = False
    warnings: tuple[str, ...] = ()
    thoughts: ThoughtPlan | None = None
    probes: ProbePlan | None = None
    grammar: Grammar | None = None
    probe_grammar: Grammar | None = None

    @property
    def grammars(self) -> tuple[Grammar, ...]:
        """All of them."""
        return tuple(grammar for grammar in (self.grammar, self.probe_grammar) if grammar)


@dataclass(frozen=True, slots=True)
class ResolvedCompletion:
    """A valid completion request with all that follows from it for the generator; picklable.

    Attributes:
        request: the request with every default filled in.
        prompts: its prompts as they are fed.
        max_tokens: limit on new tokens, by prompt.
        together: prompts that are worked on at a time.
        blocks: maximum KV blocks that may be held, by KV group.
        marks: of the generator's thoughts.
        grammar: what choices hold behind their thoughts; None for anything.
    """

    request: completion.CompletionRequest
    prompts: tuple[RenderedPrompt, ...]
    max_tokens: tuple[int, ...]
    together: int
    blocks: Mapping[str, int]
    marks: ThoughtMarks | None
    grammar: Grammar | None = None

    @property
    def grammars(self) -> tuple[Grammar, ...]:
        """The one of its choices, if any."""
        return (self.grammar,) if self.grammar else ()


@dataclass(frozen=True, slots=True)
class ResolvedScores:
    """A valid request for scores or a session, with all that follows from it for the verifier; picklable.

    Attributes:
        request: the request.
        verifier_prompt: the problem, as token ids.
        blocks: maximum KV blocks that may be held, by KV group.
        together: steps of a session that are scored at a time.
        max_tokens: verifier tokens that the nodes of a session hold at a time.
    """

    grammars: ClassVar[tuple[Grammar, ...]] = ()

    request: ScoreRequest | ScoreSessionRequest
    verifier_prompt: tuple[int, ...]
    blocks: Mapping[str, int] = field(default_factory=dict)
    together: int = UNLIMITED
    max_tokens: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class ResolvedRollout:
    """A valid request for rollouts with all that follows from it for the generator; picklable.

    Attributes:
        request: the request with its temperature filled in.
        prompt: the generator's prompt, as token ids.
        defaults: of the generator.
        blocks: maximum KV blocks that may be held, by KV group.
        is_right: grades answers of this process, where the request's `golds` do not.
    """

    grammars: ClassVar[tuple[Grammar, ...]] = ()

    request: RolloutRequest
    prompt: tuple[int, ...]
    defaults: RequestDefaults
    blocks: Mapping[str, int] = field(default_factory=dict)
    is_right: Callable[[str], bool] | None = None


Resolved = ResolvedRequest | ResolvedCompletion | ResolvedScores | ResolvedRollout


def request_of(checked: AnyRequest | Resolved) -> AnyRequest:
    """The request itself, with defaults filled in if it is resolved."""
    return checked if isinstance(checked, AnyRequest) else checked.request


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request.

    Attributes:
        result: the class of its results.
        runner: the class that resolves and runs it, a subclass of `Running`, by module and name; imported as late as
            it is needed.
        empty: makes the fields that have no default of the result of a request that was not run, and of the reason.
    """

    result: type[Any]
    runner: str
    empty: Callable[[Any, str], dict[str, Any]] = lambda request, why: {}

    @property
    def running(self) -> type[Any]:
        """The class that resolves and runs it, see `Running`."""
        return pkgutil.resolve_name(self.runner)


def _no_scores(request: ScoreRequest, why: str) -> dict[str, Any]:
    return {"solutions": tuple(SolutionScores(None, (None,) * len(steps), why) for steps in request.solutions)}


KINDS: dict[type, Kind] = {
    SearchRequest: Kind(SearchResult, "espalier.search.growth.search:RunningSearch"),
    completion.CompletionRequest: Kind(completion.CompletionResult, "espalier.search.run.completion:RunningCompletion"),
    ScoreRequest: Kind(ScoreResult, "espalier.search.run.scores:RunningScores", _no_scores),
    ScoreSessionRequest: Kind(ScoreResult, "espalier.search.run.scores:RunningScoreSession"),
    RolloutRequest: Kind(RolloutResult, "espalier.search.run.rollout:RunningRollout"),
}
"""The kinds of requests that an orchestrator runs, each registered once, by the class of their requests."""
assert set(KINDS) == set(get_args(AnyRequest)), "each kind is part of the union"


def result_without(search_id: str, request: AnyRequest, reason: StopReason, why: str = "") -> AnyResult:
    """The result of a request that was not run, because of the error `why` if that is not empty."""
    kind = KINDS[type(request)]
    of_request = {"search_id": search_id, "configuration": request, **kind.empty(request, why)}
    return kind.result(**of_request, stop_reason=reason, usage=Usage(), error=why)


class Executor(Protocol):
    """Runs searches; the `Orchestrator`, for one. All methods but `check` are called on one thread.

    Attributes:
        kv_memory_bytes: size of the KV pool, in bytes; of one worker's where there are several.
        max_running: searches that run at once where memory allows; of all workers where there are several.
        model_names: names of the models by role, for people; see `settings.model_names`.
        defaults: fill in a request for the generator.
        equivalence: compares answers in votes, until the executor is closed; None for exact match.
    """

    kv_memory_bytes: int
    max_running: int
    model_names: Mapping[str, str]
    defaults: RequestDefaults
    equivalence: MathVerify | None

    @property
    def busy(self) -> bool:
        """True if any search is waiting or running."""
        ...

    @property
    def idle(self) -> bool:
        """True if `step` has nothing to do until something is asked, or some seconds have passed."""
        ...

    def occupancy(self) -> Occupancy:
        """Return what is held now."""
        ...

    def describe_models(self) -> dict[str, str]:
        """Return what results depend on besides the request."""
        ...

    def check(self, request: AnyRequest) -> AnyRequest | Resolved:
        """Resolve a request, for `submit`; may be called on any thread.

        Workers are asked, for seconds at most: without their answer, only invalid fields are found, and the request is
        returned as it is.

        Raises:
            InvalidRequestError: lists every invalid field.
            RequestTooLargeError: the search can never fit.
        """
        ...

    def tokenize(self, request: completion.TokenizationRequest) -> completion.Tokenization:
        """Have the generator's tokenizer look at a prompt; may be called on any thread.

        Raises:
            InvalidRequestError: it cannot be tokenised.
            NoAnswerError: no worker answers.
        """
        ...

    def submit(
        self,
        request: AnyRequest | Resolved,
        on_event: Callable[[AnyEvent | Rejected], None] | None = None,
        options: SubmitOptions = DEFAULT_OPTIONS,
    ) -> str:
        """Queue a search and return its id; `on_event` is called from `step`.

        Args:
            request: what `check` returned, or a request, which is checked now.
            on_event: called with each event.
            options: priority and other options of the submission.

        Raises:
            InvalidRequestError, RequestTooLargeError: see `check`. What only a worker finds is reported later, by
                `Rejected` and a failed result.
        """
        ...

    def prepare_reload(self, folder: str) -> str:
        """Load the weights that `reload` is to take, beside those that go on; may be called on any thread.

        Args:
            folder: of a checkpoint that differs from the generator's in its weights alone.

        Returns:
            The digest of the checkpoint.

        Raises:
            CheckpointError: it cannot be loaded, or differs in more; nothing has changed then.
            NoAnswerError: a worker does not answer.
        """
        ...

    def reload(self, folder: str) -> None:
        """Go on with a checkpoint's weights for the generator's, between two steps; it is loaded unless it was before.

        What runs goes on where it is: its tokens stay, and are read again by the new weights. What was kept of prompts
        is dropped.
        """

    def cancel_reload(self) -> None:
        """Let go of what `prepare_reload` has loaded; may be called on any thread."""

    def tell(self, search_id: str, turn: SessionTurn) -> None:
        """Go on with a session of scores. Unknown and finished ids are ignored."""

    def cancel(self, search_id: str) -> None:
        """Stop a search at the next `step`, which still finishes it. Unknown and finished ids are ignored."""

    def drop(self, search_ids: Iterable[str]) -> None:
        """Cancel searches immediately; `step` does not return them."""

    def step(self) -> list[AnyResult]:
        """Work on the searches for a moment, and return those that finished.

        Raises:
            FatalError: no search can continue.
        """
        ...

    def close(self) -> None:
        """Cancel all searches and release everything."""


log = logging.getLogger("espalier.search")


def reason_of(error: Exception, search_id: str) -> str:
    """Return the error message for the result of a failed search.

    Only messages of typed errors are returned, as others may contain private data. Those are logged instead, under the
    id that the message gives.
    """
    if isinstance(error, EspalierError) and not isinstance(error, MisuseError):
        return str(error)
    log.error("search %s failed", search_id, exc_info=error)
    return f"internal error, id={search_id}"


E = TypeVar("E", bound="Executor")

_IDLE_SECONDS = 1.0
"""Seconds that an executor whose searches all wait for their callers is left alone; time limits are met so late."""


class ExecutorLoop(Generic[E]):
    """Runs an executor on one thread; `call` and `stop` may be called on any thread."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Callable[[E], object]] = SimpleQueue()
        self._stopped = False

    def call(self, command: Callable[[E], object]) -> None:
        """Call `command` with the executor before its next step."""
        self._commands.put(command)

    def stop(self) -> None:
        """Make `run` return after the current step."""
        self._stopped = True
        self.call(lambda _: None)  # an idle loop waits for a command

    def run(self, executor: E, after_turn: Callable[[E], object] = lambda _: None) -> None:
        """Carry out commands and step the executor while it is busy, until `stop`; raises what either raises.

        Args:
            executor: used on this thread only.
            after_turn: called each time after the commands and the step.
        """
        while not self._stopped:
            wait, seconds = executor.idle, _IDLE_SECONDS if executor.busy else None
            with suppress(Empty):
                while True:
                    self._commands.get(wait, seconds)(executor)
                    wait = False
            if executor.busy and not self._stopped:
                executor.step()
            after_turn(executor)
