"""What a search gives back: events while it runs and one result with its full usage."""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from espalier.search.request import SearchRequest

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One expansion; see `Expand`."""

    path: Path
    children: int
    to_end: bool
    greedy: bool


@dataclass(frozen=True, slots=True)
class Told:
    """A node as it was when the algorithm was told of it; the search may change these later."""

    path: Path
    termination: str
    multiplicity: int
    draws: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One `ask`, its `tell`, and the paths kept after it."""

    asked: tuple[Asked, ...]
    told: tuple[Told, ...]
    kept: tuple[Path, ...]


class StopReason(StrEnum):
    """Why a search ended."""

    FINISHED = "finished"  # the algorithm had nothing left to grow
    BUDGET = "budget"  # a token budget cut it short
    DEADLINE = "deadline"  # its time limit did
    CANCELLED = "cancelled"
    FAILED = "failed"  # a model could not compute it, or a call made for it raised


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """One step of a path: its text and the verifier's score in [0, 1], None where the search uses no verifier."""

    text: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete path: the answer it gives, its aggregated score, and how many sampled paths merged into it."""

    node_id: int
    answer: str
    score: float | None
    multiplicity: int
    steps: tuple[ScoredStep, ...]

    @property
    def text(self) -> str:
        """The whole path as generated."""
        return "".join(step.text for step in self.steps)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node of the search tree as it ended, for display and traces.

    `path` are its child indices from the root, `tokens` those sampled for it. `termination` is empty for an inner node,
    else a `Termination`.
    """

    node_id: int
    parent_id: int | None
    path: tuple[int, ...]
    text: str
    score: float | None
    termination: str
    multiplicity: int
    tokens: int

    @property
    def depth(self) -> int:
        """Steps from the root."""
        return len(self.path)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a search cost.

    Token counts are tokens whose KV was computed for this search by that model, prompt included; `*_tree_tokens` counts
    each token of the search tree once, and of siblings that begin alike their common beginning once. `generated_tokens`
    counts what was sampled, alike or not; `nodes` the steps sampled, of which `duplicates` say the same as a sibling
    and became one with it. `*_saved_tokens` are those that were not computed because paths share what they begin with:
    with every candidate read from the prompt on, there would be so many more.

    Blocks are counted at the search's widest moment, for both models together: `logical_blocks` as if no two sequences
    shared any, `physical_blocks` as they are; bytes for both together and for each. Seconds count from the start of the
    search, `first_step_seconds` to the first step sampled; `queue_seconds` came before.
    """

    generator_tokens: int
    generator_tree_tokens: int
    generator_saved_tokens: int
    generated_tokens: int
    verifier_tokens: int
    verifier_tree_tokens: int
    verifier_saved_tokens: int
    nodes: int
    pruned: int
    duplicates: int
    peak_kv_bytes: int
    generator_peak_kv_bytes: int
    verifier_peak_kv_bytes: int
    logical_blocks: int
    physical_blocks: int
    queue_seconds: float
    first_step_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of one search.

    `answer` is empty when no path gave one; that is an outcome, not an error. `configuration` is the request with every
    default filled in, `digests` the sha256 digests of both models' files. `grader` is what told equal answers from
    different ones in the vote: "math-verify" and its version, or "exact-match" where no more was needed, wanted, or
    possible in time. `rounds` are what the algorithm asked for and was told; see `trace`. They stay where the search
    ran. `error` says why it failed, where it did.
    """

    search_id: str
    answer: str
    score: float | None
    stop_reason: StopReason
    best: Candidate | None
    candidates: tuple[Candidate, ...]
    nodes: tuple[NodeRecord, ...]
    usage: Usage
    configuration: SearchRequest
    digests: dict[str, str]
    grader: str
    rounds: tuple[Round, ...] = ()
    error: str = ""

    @property
    def selected_path(self) -> set[int]:
        """Ids of the nodes on the best candidate's path, the root included; empty without one."""
        parents = {node.node_id: node.parent_id for node in self.nodes}
        node_id = self.best.node_id if self.best else None
        path: set[int] = set()
        while node_id is not None:
            path.add(node_id)
            node_id = parents.get(node_id)
        return path

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values, without its rounds."""
        return asdict(replace(self, rounds=()))


@dataclass(frozen=True, slots=True)
class Started:
    """The search left the queue; `configuration` is the request with every default filled in."""

    search_id: str
    configuration: SearchRequest


@dataclass(frozen=True, slots=True)
class StepDone:
    """One round of the algorithm is over.

    Attributes:
        depth: of the deepest node kept so far, in steps.
        scored: nodes told to the algorithm in this round.
        kept: leaves that may grow and complete paths that vote, the last 256 where there are more.
        best: the best candidate so far.
    """

    search_id: str
    depth: int
    scored: int
    kept: tuple[NodeRecord, ...]
    best: Candidate | None = None


@dataclass(frozen=True, slots=True)
class CandidateDone:
    """A path became complete."""

    search_id: str
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every search."""

    search_id: str
    result: SearchResult


Event = Started | StepDone | CandidateDone | Finished
