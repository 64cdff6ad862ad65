"""What a search gives back: events while it runs and one result with its full accounting."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from espalier.search.request import SearchRequest


class StopReason(StrEnum):
    """Why a search ended."""

    FINISHED = "finished"  # the algorithm had nothing left to grow
    CANCELLED = "cancelled"
    FAILED = "failed"


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

    `termination` is empty for an inner node, else one of `eos`, `boxed`, `length`, `degenerate`, `duplicate`, `pruned`,
    `cancelled`.
    """

    node_id: int
    parent_id: int | None
    depth: int
    text: str
    score: float | None
    termination: str
    multiplicity: int


@dataclass(frozen=True, slots=True)
class Accounting:
    """What a search cost.

    Token counts are tokens whose KV was computed for this search by that model, prompt included; `*_tree_tokens` counts
    each token of the search tree once, and of siblings that begin alike their common beginning once. `generated_tokens`
    counts what was sampled, alike or not; `nodes` the steps sampled, of which `duplicates` say the same as a sibling
    and became one with it. Blocks are counted at the search's widest moment, for both models together:
    `logical_blocks` as if no two sequences shared any, `physical_blocks` as they are.
    """

    generator_tokens: int
    generator_tree_tokens: int
    generated_tokens: int
    verifier_tokens: int
    verifier_tree_tokens: int
    nodes: int
    pruned: int
    duplicates: int
    peak_kv_bytes: int
    logical_blocks: int
    physical_blocks: int
    queue_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of one search.

    `answer` is empty when no path gave one; that is an outcome, not an error. `configuration` is the request with every
    default filled in, `digests` the sha256 digests of both models' weights.
    """

    search_id: str
    answer: str
    score: float | None
    stop_reason: StopReason
    best: Candidate | None
    candidates: tuple[Candidate, ...]
    nodes: tuple[NodeRecord, ...]
    accounting: Accounting
    configuration: SearchRequest
    digests: dict[str, str]

    @property
    def elected_path(self) -> set[int]:
        """Ids of the nodes on the best candidate's path, the root included; empty without one."""
        parents = {node.node_id: node.parent_id for node in self.nodes}
        node_id = self.best.node_id if self.best else None
        path: set[int] = set()
        while node_id is not None:
            path.add(node_id)
            node_id = parents.get(node_id)
        return path

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return asdict(self)


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
    """

    search_id: str
    depth: int
    scored: int
    kept: tuple[NodeRecord, ...]


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
