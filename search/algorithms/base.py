"""The contract of search algorithms: what a class declares, and a pure ask-and-tell interface.

The orchestrator calls `ask`, expands the requested nodes, passes all resulting nodes to `tell`, and repeats until
`finished`. An algorithm sees nodes and scores only. It may set the `multiplicity` of a node that it keeps to the number
of its places or votes, and nothing else. Its decisions are a function of its request, its root and the nodes it was
told; they must not depend on node ids, the order within `tell`, a clock, or randomness other than `algorithms.draws`.

`kept` lists the nodes to keep. After each `tell`, the sequences of all other nodes are released permanently, and leaves
among them are marked as pruned (`tree.prune`). A node that was not kept cannot be requested again.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeVar

from espalier.engine.errors import Violation
from espalier.search.algorithms.advised import AdvisedSearch
from espalier.search.common_fields import Aggregation, CommonFields, Vote
from espalier.search.schema import declared
from espalier.search.tree import Node, aggregate

Request = TypeVar("Request", bound=CommonFields)
Scores = Literal["none", "answers", "steps"]
"""Scores that a verifier gives or a search reads; each has what those before it have."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
USABLE = frozenset({"beam_width", "expansion", "vote", "early_stop", "stop_unsure", *SAMPLING})
"""Fields that change some searches only; see `SearchAlgorithm.uses`."""
MAX_CANDIDATES = 1024
"""Limit on the children sampled in one round."""


@dataclass(frozen=True, slots=True)
class Expand:
    """A request for `children` new children of a node. A kept node may be expanded again in a later round.

    Attributes:
        to_end: sample each child step by step to its end, as an independent path; `tell` gets the leaves, and paths
            with the same tokens as one leaf with a multiplicity. Otherwise each child is one step, and siblings with
            the same text are merged into one with a multiplicity.
        greedy: sample at temperature 0, whatever the request's. The children are marked as rollouts, which never become
            answers.
    """

    node: Node
    children: int
    to_end: bool = False
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Upper bounds on what a search holds of one model at one of its peaks.

    Attributes:
        paths: sequences up to the length of a whole path; only the prompt is sure to be shared among them.
        steps: sequences that extend one of those paths by one step.
        partial_blocks: additional partly filled blocks, held by inner nodes of paths that are being extended.
    """

    paths: int
    steps: int = 0
    partial_blocks: int = 0


class Growth(StrEnum):
    """The ways in which paths grow that are known before any score is."""

    INDEPENDENT = "independent"  # all candidates are sampled from the root to their ends in one round
    BEST = "best"  # M children of each kept path, of which the N best are kept
    SUBTREES = "subtrees"  # M children in each of N subtrees, of which the best is kept


@dataclass(frozen=True, slots=True)
class NoParameters:
    """Parameters of an algorithm that has none of its own."""


class SearchAlgorithm(ABC):
    """A search algorithm: class attributes and class methods declare it, an instance runs one search.

    Its constructor takes a request with its defaults filled in, and the root of the tree.

    Attributes:
        scores: the scores that it reads in `tell`: of every step, of complete answers, or none. A vote other than
            majority needs those of complete answers in any case.
        uses: those fields of `USABLE` that change the search. One that uses `early_stop` ends when its vote is decided,
            and must grow independent paths.
        growth: how its paths grow; None if that depends on scores or answers.
        vote: the default vote; None for `weighted` with scores and `majority` without.
        fixed: values of fields that it sets itself, whatever the request's.
        whole_paths: whether it samples nothing but whole paths (`Expand.to_end`), whose steps have no default limits.
        Parameters: a dataclass of parameters of its own, declared as in `search.schema`, each with a default.
    """

    scores: ClassVar[Scores] = "steps"
    uses: ClassVar[Collection[str]] = ("beam_width", "expansion", "vote", *SAMPLING)
    growth: ClassVar[Growth | None] = None
    vote: ClassVar[Vote | None] = None
    fixed: ClassVar[Mapping[str, Any]] = {}
    whole_paths: ClassVar[bool] = False

    Parameters: ClassVar[type[Any]] = NoParameters

    @abstractmethod
    def ask(self) -> Sequence[Expand]:
        """Expansions to run next, each node at most once; at least one unless finished."""

    @abstractmethod
    def tell(self, nodes: Sequence[Node]) -> None:
        """Take every node of the last `ask`, ordered by path; merged duplicates are left out."""

    @abstractmethod
    def finished(self) -> bool:
        """True if there is nothing left to request."""

    @abstractmethod
    def kept(self) -> Sequence[Node]:
        """Nodes that may be expanded later, possibly including the root, and the complete paths that vote."""

    @classmethod
    def parameters(cls, request: CommonFields) -> Any:
        """Its `Parameters`: from a field of the same name, then from the algorithm's name, else the default."""
        names = [field.name for field in declared(cls.Parameters)]
        given = {name: value for name in names if (value := getattr(request, name, None)) is not None}
        return cls.Parameters(**{**parameters_in(request.algorithm or ""), **given})

    @classmethod
    def candidates(cls, request: CommonFields) -> int:
        """Maximum children sampled in one round: the product of those of N and M that it uses."""
        width = request.beam_width if "beam_width" in cls.uses else 1
        return width * (request.expansion if "expansion" in cls.uses else 1)

    @classmethod
    def memory(cls, request: CommonFields) -> tuple[MemoryEstimate, ...]:
        """Upper bounds on what it holds, one for each of its peaks."""
        candidates = cls.candidates(request)
        match cls.growth:
            case Growth.INDEPENDENT:
                # Where paths diverge, their shared step holds a partial block until each has sampled its next step.
                return (MemoryEstimate(paths=candidates, partial_blocks=candidates - 1),)
            case Growth.BEST | Growth.SUBTREES:
                return (MemoryEstimate(paths=request.beam_width, steps=candidates),)
            case None:  # all samples of a round may be open paths, and be extended in the next round
                return (MemoryEstimate(paths=candidates, steps=candidates),)

    @classmethod
    def sampled(cls, request: CommonFields) -> tuple[int, int]:
        """Maximum number of whole paths that it samples, and of single steps besides."""
        return cls.candidates(request), 0

    @classmethod
    def advised(cls, request: Request, searches: Sequence[AdvisedSearch]) -> Request:
        """The request with what an advice file, where one is given, says of its search; by default as it is."""
        del searches
        return request

    @classmethod
    def violations(cls, request: CommonFields) -> list[Violation]:
        """Limits on products of fields that a request exceeds."""
        if (candidates := cls.candidates(request)) <= MAX_CANDIDATES:
            return []
        is_product = candidates == request.beam_width * request.expansion
        what = "beam_width * expansion" if is_product else "the number of children in a round"
        return [Violation("expansion", f"{what} must be at most {MAX_CANDIDATES}, is {candidates}")]


def parameters_in(name: str) -> dict[str, Any]:
    """Parameters in a name like `my_search:Halving:keep=0.5`; numbers, `true` and `false` as such, others as text."""
    pairs = (part.partition("=") for part in name.split(":")[2:])
    return {key: _plain(text) for key, _, text in pairs}


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def path_score(node: Node, how: Aggregation) -> float:
    """Score of the path that ends in `node`, complete or not; 0 for a path without scored steps."""
    score = aggregate(node.step_scores(), how)
    return 0.0 if score is None else score


def viable(node: Node) -> bool:
    """True if the path has an answer or may still reach one."""
    return node.open or node.complete
