"""Events and result of a search, with what it cost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from html import escape
from itertools import dropwhile
from typing import Annotated, Any, Generic, TypeVar

from annotated_types import Ge

from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.stats import counter, counters
from espalier.search.algorithms.base import Expand
from espalier.search.conversation import ToolCall
from espalier.search.request import SearchRequest
from espalier.search.tree import NodeRecord as NodeRecord
from espalier.search.tree import path_to

_COMPUTED = "Tokens whose KV the model computed for searches, the prompts' too."
_IN_TREE = "Tokens of the search trees; siblings that share a prefix count it once."
_SAVED = "Further tokens, had every candidate been computed from the prompt on."


@dataclass(slots=True)
class Usage:
    """The cost of one search: a field for each of its counters, see `engine.stats`."""

    generator_tokens: int = counter(_COMPUTED, metric="computed_tokens", role=GENERATOR, span=True)
    generator_tree_tokens: int = counter(_IN_TREE, metric="tree_tokens", role=GENERATOR)
    generator_saved_tokens: int = counter(_SAVED, metric="saved_tokens", role=GENERATOR)
    generated_tokens: int = counter(
        "Tokens that the generator sampled, those of duplicates too, and all of answer probes, written and sampled.",
        metric="sampled_tokens",
        span=True,
    )
    verifier_tokens: int = counter(_COMPUTED, metric="computed_tokens", role=VERIFIER, span=True)
    verifier_tree_tokens: int = counter(_IN_TREE, metric="tree_tokens", role=VERIFIER)
    verifier_saved_tokens: int = counter(_SAVED, metric="saved_tokens", role=VERIFIER)
    nodes: int = counter("Steps sampled.", span=True)
    pruned: int = counter("Steps that the algorithm did not keep.")
    duplicates: int = counter("Steps merged into an equal sibling.")
    peak_kv_bytes: int = counter("Bytes of KV at the search's peak.", span=True)
    generator_peak_kv_bytes: int = counter("Those of the generator.")
    verifier_peak_kv_bytes: int = counter("Those of the verifier.")
    logical_blocks: int = counter("KV blocks at the search's peak, if no two sequences shared any.")
    physical_blocks: int = counter("KV blocks at the search's peak.")
    queue_seconds: float = counter("Time before the search started.", 0.0, span=True)
    first_step_seconds: float = counter("Time from the search's start to its first step.", 0.0, span=True)
    seconds: float = counter("Time from the search's start to its result.", 0.0)
    stopped_paths: int = counter("Paths not run to their end, as the answer was decided.", metric="stopped_paths")
    stopped_tokens: int = counter(
        "Tokens that stopped paths would still have sampled, had they become as long as the mean path that ended.",
        metric="stopped_tokens",
        span=True,
    )
    prompt_tokens: int = counter("Length of the generator's prompt.")
    appended_tokens: int = counter("Tokens that the host wrote into paths.")
    probe_tokens: int = counter(
        "Generated tokens that are answer probes'.", note="{probe_tokens} of the generated tokens are probes'"
    )
    drafted_tokens: int = counter(
        "Tokens proposed for paths and verified, which changes nothing but how long a search takes.",
        column="drafted tokens",
        note="{accepted_tokens} of {drafted_tokens} drafted tokens accepted",
    )
    accepted_tokens: int = counter(
        "Drafted tokens that paths drew, without a step of their own; the others are counted nowhere else.",
        column="accepted %",
        share_of="drafted_tokens",
    )

    @property
    def charged_tokens(self) -> int:
        """Tokens that the search used up: sampled by the generator, those of its probes, and read by the verifier."""
        return self.generated_tokens + self.verifier_tokens


USAGE_COUNTERS = counters(Usage)
"""The counters of a search."""


Path = tuple[int, ...]
R = TypeVar("R", covariant=True)


@dataclass(frozen=True, slots=True)
class ExpandRecord:
    """An expansion that the algorithm asked for; see `Expand`."""

    path: Path
    children: Annotated[int, Ge(1)]
    to_end: bool
    greedy: bool

    @classmethod
    def of(cls, expand: Expand) -> "ExpandRecord":
        """Record a request of the algorithm."""
        return cls(expand.node.path, expand.children, expand.to_end, expand.greedy)


@dataclass(frozen=True, slots=True)
class TellRecord:
    """A node as it was passed to `tell`; the search may change it later."""

    path: Path
    termination: str
    multiplicity: int
    draws: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Progress and memory of a search at one moment.

    Attributes:
        seconds: seconds since the search left the queue.
        nodes: size of the tree with the root; its nodes are those with a smaller `node_id`.
        blocks: KV blocks that the search held, by role.
    """

    seconds: Annotated[float, Ge(0)]
    nodes: Annotated[int, Ge(0)]
    blocks: dict[str, int]


@dataclass(frozen=True, slots=True)
class Round:
    """One round: the expansions that the algorithm requested, the nodes passed to it, and the paths it kept.

    The last of `moments` is the end of the round, before the memory of what is not kept is released. There are more if
    the submission had `report_nodes` and the round sampled paths to their ends.
    """

    asked: tuple[ExpandRecord, ...]
    told: tuple[TellRecord, ...]
    kept: tuple[Path, ...]
    moments: tuple[MemorySample, ...] = field(default=(), compare=False)


class StopReason(StrEnum):
    """Why a search ended."""

    FINISHED = "finished"  # the algorithm finished
    BUDGET = "budget"  # a token budget was used up
    DEADLINE = "deadline"  # the time limit passed
    CANCELLED = "cancelled"
    FAILED = "failed"  # an error occurred; see `SearchResult.error`


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """One step of a path: its text and the verifier's score in [0, 1]; None in searches without a verifier.

    The first `thought_chars` characters of the text are thought; `appended` is what the host wrote behind it.
    """

    text: str
    score: float | None
    thought_chars: int = 0
    appended: str = ""


def thought_of(steps: Sequence[ScoredStep | NodeRecord]) -> str:
    """The thought of a path, without marks; empty if there is none."""
    return "".join(step.text[: step.thought_chars] for step in steps).strip()


def content_of(steps: Sequence[ScoredStep | NodeRecord]) -> tuple[str, ...]:
    """The texts of a path's steps without its thought, and without the blanks between the two."""
    texts = [step.text[step.thought_chars :] for step in steps]
    if any(step.thought_chars or step.appended for step in steps):
        texts = list(dropwhile(lambda text: not text.strip(), texts))
        texts[:1] = [text.lstrip() for text in texts[:1]]
    return tuple(texts)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete path: its answer, its aggregated score, and the number of sampled paths merged into it.

    With a vote by confidence the score is the generator's confidence in the path, whatever its steps' scores.
    `thought_tokens` are those that the model sampled for its thought, marks included. `calls` are those of tools at its
    end, and `beside_calls` what it says besides.
    """

    node_id: int
    answer: str
    score: float | None
    multiplicity: int
    steps: tuple[ScoredStep, ...]
    thought_tokens: int = 0
    calls: tuple[ToolCall, ...] = ()
    beside_calls: str = ""

    @property
    def text(self) -> str:
        """The generated text of the whole path."""
        return "".join(step.text for step in self.steps)

    @property
    def thought(self) -> str:
        """The model's thought, without marks; empty if there is none."""
        return thought_of(self.steps)

    @property
    def content(self) -> str:
        """The text of the path without its thought, and without calls of tools."""
        return "".join(self.content_steps)

    @property
    def content_steps(self) -> tuple[str, ...]:
        """The same by steps; in one where there are calls."""
        return (self.beside_calls,) if self.calls else content_of(self.steps)


@dataclass(frozen=True, slots=True)
class ProbedAnswer:
    """The answer of a search in which no path has ended with one: by a vote of the last probe of each path.

    Attributes:
        answer: the one with the largest sum of certainties.
        share: its share of the sum of all.
        node_id: the node at whose end it was read most certainly.
    """

    answer: str
    share: float
    node_id: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampling of a node, and its cost.

    Attributes:
        draws: indices of the parent's samples that the node stands for, ascending.
        own_tokens: how many of its last tokens are not shared with a sibling of a lower path.
        verifier_tokens: tokens that the verifier read for it; the problem's for the root.
    """

    draws: tuple[int, ...]
    own_tokens: int
    verifier_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The outcome of one search.

    `answer` is empty when no path gave one; that is not an error. `configuration` is the request with every default
    filled in, `digests` holds the SHA-256 digest of each model's files. `grader` names how the vote compared answers:
    "math-verify" with its version, or "exact-match" where math-verify was not needed, not enabled, or too slow.
    `rounds` records the algorithm's requests and inputs (see `trace`), and `sampled` how each of `nodes` was sampled;
    neither is serialized. `error` is the reason of a failed search, else empty. `warnings` are sentences about the
    problem, where the generator was not made for its like and answers all the same. `probed` tells how `answer` was
    found where there is no `best`; None where there is, and without probes.
    """

    search_id: str
    answer: str = ""
    score: float | None = None
    stop_reason: StopReason
    best: Candidate | None = None
    candidates: tuple[Candidate, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    usage: Usage
    configuration: SearchRequest
    digests: dict[str, str] = field(default_factory=dict)
    grader: str = ""
    rounds: tuple[Round, ...] = ()
    error: str = ""
    warnings: tuple[str, ...] = ()
    sampled: tuple[Sampled, ...] = field(default=(), compare=False, repr=False)
    probed: ProbedAnswer | None = None

    @property
    def selected_path(self) -> set[int]:
        """Node ids of the path that gave the answer, including the root; empty without one."""
        answer = self.best or self.probed
        path = path_to({node.node_id: node for node in self.nodes}, answer.node_id if answer else None)
        return {node.node_id for node in path} | {node.parent_id or 0 for node in path}

    def _repr_html_(self) -> str:
        """The result as notebooks show it: answer, its text, votes, the tree and what it cost."""
        return _html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-serializable values, without `rounds` and `sampled`."""
        values = asdict(replace(self, rounds=(), sampled=()))
        del values["sampled"]
        return values


@dataclass(frozen=True, slots=True)
class Started:
    """The search left the queue; `configuration` is the request with every default filled in.

    `prompt_tokens` is the length of the generator's prompt; 0 from a server that does not report it.
    """

    search_id: str
    configuration: SearchRequest
    prompt_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class StepDone:
    """One round of the algorithm is complete, or has come further.

    Attributes:
        depth: depth of the deepest node kept so far, in steps.
        scored: number of nodes passed to the algorithm in this round.
        kept: leaves that may be expanded and complete paths that vote; only the last 256 of them, unless the submission
            had `report_nodes`.
        best: the best candidate so far.
        partial: whether the round goes on; `scored` is then 0, and `kept` empty. Only with `report_nodes`, in rounds
            that sample paths to their ends.
        nodes: with `report_nodes`, every node that is new or has changed since the last report, in order of `node_id`.
        seconds: seconds since the search left the queue.
        blocks: KV blocks held by the search, by role, before the memory of what is not kept is released.
    """

    search_id: str
    depth: int
    scored: int
    kept: tuple[NodeRecord, ...]
    best: Candidate | None = None
    partial: bool = False
    nodes: tuple[NodeRecord, ...] = ()
    seconds: float = 0.0
    blocks: dict[str, int] = field(default_factory=dict)

    def including(self, earlier: "StepDone") -> "StepDone":
        """Return this report with the changes of an earlier one that was not delivered."""
        nodes = {node.node_id: node for node in (*earlier.nodes, *self.nodes)}
        return replace(self, nodes=tuple(nodes[node_id] for node_id in sorted(nodes)))


@dataclass(frozen=True, slots=True)
class CandidateDone:
    """A path is complete."""

    search_id: str
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Finished(Generic[R]):
    """The last event of a search, a completion or a request for scores; carries its result."""

    search_id: str
    result: R


Event = Started | StepDone | CandidateDone | Finished[SearchResult]


_SHOWN_ANSWERS = 8


def _html(result: SearchResult) -> str:
    """A result as HTML that needs no style sheet and no script; texts of models and callers are escaped."""
    from espalier.search.tree_html import tree_html  # for notebooks alone

    facts = [f"score {result.score:.4g}"] if result.score is not None else []
    facts += [str(result.stop_reason), str(result.configuration.algorithm)]
    lines = [f"<b>{escape(result.answer) or 'no answer'}</b> &ensp; {escape(', '.join(facts))}"]
    errors = [f"error: {result.error}"] if result.error else []
    lines += map(escape, [*errors, *(f"warning: {warning}" for warning in result.warnings)])
    rows = "".join(
        f"<tr><td>{escape(answer) or '(none)'}</td><td>{paths}</td><td>{best}</td></tr>"
        for answer, paths, best in _votes(result.candidates)[:_SHOWN_ANSWERS]
    )
    table = f"<table><tr><th>answer</th><th>paths</th><th>best score</th></tr>{rows}</table>" if rows else ""
    usage = result.usage
    depth = max((node.depth for node in result.nodes), default=0)
    tree = [f"{len(result.nodes) - 1} in the tree, {depth} deep"] if result.nodes else []
    tree = [f"{usage.nodes} steps sampled", *tree, f"{usage.pruned} pruned", f"{usage.duplicates} merged"]
    cost = [f"{usage.generated_tokens} tokens sampled", f"{usage.verifier_tokens} read by the verifier"]
    lines.append(escape(", ".join([*tree, *cost, f"{usage.seconds:.2f} s"])))
    answers = {candidate.node_id: candidate.answer for candidate in result.candidates}
    below = [_text_html(result.best), table, tree_html(result.nodes, result.selected_path, answers)]
    return "".join([*(f"<div>{line}</div>" for line in lines[:-1]), *below, f"<div><small>{lines[-1]}</small></div>"])


def _text_html(best: Candidate | None) -> str:
    """The text of the selected path as it was written, its thought folded."""
    if best is None:
        return ""
    thought, content = (
        f'<div style="white-space: pre-wrap; margin: .5em 0">{escape(text.strip())}</div>' if text.strip() else ""
        for text in (best.thought, best.content)
    )
    return (f"<details><summary>thought</summary>{thought}</details>" if thought else "") + content


def _votes(candidates: tuple[Candidate, ...]) -> list[tuple[str, int, str]]:
    """Each answer with the number of its paths and its best score; that of most paths first."""
    paths, best = Counter[str](), dict[str, float | None]()
    for candidate in candidates:
        paths[candidate.answer] += candidate.multiplicity
        scores = [score for score in (best.get(candidate.answer), candidate.score) if score is not None]
        best[candidate.answer] = max(scores, default=None)
    shown = {answer: "" if score is None else f"{score:.4g}" for answer, score in best.items()}
    return [(answer, count, shown[answer]) for answer, count in paths.most_common()]
