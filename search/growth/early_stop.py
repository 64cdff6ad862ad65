"""Early stop: independent paths go on step by step until their vote is decided, whatever the open paths give."""

import math
from collections.abc import Collection, Iterable

from espalier.search.common_fields import EarlyStop, Vote
from espalier.search.grading.answers import exact_match_key, leader_and_rival
from espalier.search.growth.policies import Branch, Expansion, PathPolicy
from espalier.search.request import SearchRequest
from espalier.search.result import Candidate
from espalier.search.run.running import UsageMeter
from espalier.search.tree import Node

_SHARE = 8
"""A path goes on by its depth divided by this before it may wait again."""
_ROUNDING = 1e-6
"""More than the rounding errors of all sums of scores in one vote."""


class PartialVote:
    """The votes of the paths that have ended, and what the others may still change.

    Each path that has not ended casts at most one vote of at most 1, for any answer. Answers are counted by exact
    match, the finest grouping of `vote.select`: the vote may give an answer more than its count here, and never splits
    it. Answers that may turn out equal count as equal against the leader; see `leader_and_rival`. So a decided vote
    stays decided whichever answers are found equal, and whether or not there is time to compare them.

    The value of the winning answer is decided, not which path shows it: `vote.select` returns the best-scored of its
    paths, and one that has not ended might have a higher score, and spell the answer differently.
    """

    def __init__(self, vote: Vote, scored: bool) -> None:
        """Start without votes.

        Args:
            vote: any but naive. The best-scored path of a naive vote can be found by any path to its end.
            scored: whether paths have scores, which break ties; without, ties go to the first path.
        """
        assert vote is not Vote.NAIVE
        self._vote = vote
        self._scored = scored
        self._votes: dict[str, list[float]] = {}
        self._first: tuple[tuple[int, ...], str] | None = None

    def add(self, answer: str, score: float | None, multiplicity: int, path: tuple[int, ...]) -> None:
        """Count a path that has ended, with its multiplicity; one without an answer casts no vote."""
        if not answer:
            return
        key = exact_match_key(answer)
        weight = multiplicity * (1.0 if self._vote is Vote.MAJORITY else score or 0.0)
        self._votes.setdefault(key, []).append(weight)
        self._first = min(self._first or (path, key), (path, key))

    def decided(self, open_votes: int, first_open: tuple[int, ...] = ()) -> bool:
        """Return whether no answer can still overtake the leader.

        Args:
            open_votes: number of paths that have not ended.
            first_open: a path that is not after any of them in path order.
        """
        if not self._votes:
            return False
        leader, rival = self._leader_and_rival()
        if self._vote is not Vote.MAJORITY:
            return leader > rival + open_votes + _ROUNDING
        return leader > rival + open_votes or (leader == rival + open_votes and self._wins_ties(leader, first_open))

    def fewest_to_decide(self, open_votes: int) -> int:
        """The least number of further paths after which the vote can be decided, at least 1.

        That is where all of them vote for the leader, and correspondingly fewer are left.
        """
        leader, rival = self._leader_and_rival()
        gap = rival + open_votes - leader
        least = math.ceil(gap / 2) if not self._scored else math.floor(gap / 2) + 1
        return min(max(least, 1), open_votes)

    def may_be_decided(self, pending: int, open_votes: int) -> bool:
        """Return whether the votes of `pending` more paths could decide the vote against `open_votes`."""
        return self._leader_and_rival()[0] + pending >= open_votes

    def _leader_and_rival(self) -> tuple[float, float]:
        if not self._votes:
            return 0.0, 0.0
        return leader_and_rival({key: math.fsum(weights) for key, weights in self._votes.items()})

    def _wins_ties(self, leader: float, first_open: tuple[int, ...]) -> bool:
        """Return whether the leader has the first path of all, so that it wins a tie in a vote without scores."""
        if self._scored or self._first is None:
            return False
        path, key = self._first
        return math.fsum(self._votes[key]) == leader and path < first_open


class PathGate:
    """Lets independent paths go on step by step until their vote is decided.

    A path that has sampled a step waits here for its next one. Which paths go on, and when the vote is decided, depends
    on the paths alone and not on which of them was sampled first, so a search gives the same result and costs the same
    tokens whatever runs beside it. What a path says does not depend on the gate.

    - All together: the paths at one depth go on together as soon as it is known that the paths which ended up to that
      depth do not decide the vote. As half of all paths have to end before it can be decided, that is known when half
      of them are known to be open there; the slower half never waits. Paths that are 16 steps deep or more go on by an
      eighth of their depth: where they do not fit the memory together, most are computed again each time.
    - Frugal: whenever all paths have ended or wait, as many of them go on as could decide the vote; the longest first,
      then those that stand for the most samples. The others wait, and need not be sampled if these agree.
    """

    def __init__(self, vote: PartialVote, paths: int, frugal: bool) -> None:
        """Start with `paths` paths at the root, counted with their multiplicity."""
        self.decided = False
        self._vote = vote
        self._paths = paths
        self._frugal = frugal
        self._depth = 1
        self._ended = 0
        self._ended_tokens = 0

    def end(self, node: Node, candidate: Candidate | None) -> None:
        """Count a path that has ended; `candidate` is None if it is not complete."""
        self._ended += node.multiplicity
        self._ended_tokens += node.multiplicity * node.path_tokens()
        if candidate is not None:
            self._vote.add(candidate.answer, candidate.score, node.multiplicity, node.path)

    def release(self, waiting: Collection[Node]) -> list[Node]:
        """Return those of the waiting paths that may sample their next step; sets `decided` if none needs to."""
        if not waiting or self.decided:
            return []
        open_votes = sum(node.multiplicity for node in waiting)
        pending = self._paths - self._ended - open_votes
        slower = [node for node in waiting if node.depth < self._depth]
        if not self._frugal and slower:
            return slower
        if pending and (self._frugal or self._vote.may_be_decided(pending, open_votes)):
            return []
        if not pending and self._vote.decided(open_votes, min(node.path for node in waiting)):
            self.decided = True
            return []
        self._depth += max(1, self._depth // _SHARE)
        return self._fewest(waiting, open_votes) if self._frugal else list(waiting)

    def tokens_left(self, waiting: Iterable[Node]) -> int:
        """Tokens that the waiting paths would still sample if they became as long as the mean path that ended."""
        mean = self._ended_tokens / self._ended
        return round(sum(node.multiplicity * max(0.0, mean - node.path_tokens()) for node in waiting))

    def _fewest(self, waiting: Iterable[Node], open_votes: int) -> list[Node]:
        needed, chosen = self._vote.fewest_to_decide(open_votes), list[Node]()
        for node in sorted(waiting, key=lambda node: (-node.depth, -node.multiplicity, node.path)):
            if needed <= 0:
                break
            chosen.append(node)
            needed -= node.multiplicity
        return chosen


class EarlyStopping(PathPolicy):
    """Holds the next steps of paths until it is known that the vote needs them."""

    def __init__(self, request: SearchRequest, scored: bool, meter: UsageMeter) -> None:
        """Begin a search; `scored` if a verifier scores its paths."""
        vote = request.vote
        assert vote is not None
        partial = PartialVote(vote, scored or vote.reads_confidence)
        self._gate = PathGate(partial, request.candidates, request.early_stop is EarlyStop.FRUGAL)
        self._meter = meter
        self._waiting: dict[Node, Expansion] = {}

    def holds(self, expansion: Expansion) -> bool:
        """See `PathPolicy`."""
        if expansion.continues:
            self._waiting[expansion.branch.node] = expansion
        return expansion.continues

    def after_work(self) -> None:
        """Let the paths go on that the gate lets pass; once the vote is decided, settle those that wait."""
        if not self._waiting:
            return
        for node in self._gate.release(self._waiting):
            self.tree.resume(self._waiting.pop(node))
        if not self._gate.decided:
            return
        if not self._meter.stopped_paths:
            self._meter.stopped_paths = sum(node.multiplicity for node in self._waiting)
            self._meter.stopped_tokens = self._gate.tokens_left(self._waiting)
        for node, expansion in list(self._waiting.items()):
            if expansion.branch.scored:
                del self._waiting[node]
                self.tree.settle(expansion.branch)

    def settled(self, branch: Branch, candidate: Candidate | None) -> None:
        """See `PathPolicy`."""
        if branch.node.termination is not None:
            self._gate.end(branch.node, candidate)
