"""One search from submission to result: rounds of its algorithm, events, candidates."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from espalier.engine.engine import Footprint
from espalier.engine.work import Done
from espalier.search import result
from espalier.search.algorithms import make_algorithm, needs_verifier
from espalier.search.algorithms.base import Expand
from espalier.search.common_fields import answer_in
from espalier.search.growth.policies import PolicyContext
from espalier.search.growth.tree import SearchTree
from espalier.search.request import SearchRequest, Vote
from espalier.search.run.executor import ResolvedRequest
from espalier.search.run.resolve import Resolver, resolve_search
from espalier.search.run.running import Running, Submission
from espalier.search.tree import ChangedNodes, Node, Termination, aggregate, computed_once, prune
from espalier.search.voting.vote import VoteResult, is_decided, probed_answer, select

T = TypeVar("T")

log = logging.getLogger("espalier.search")

_MAX_SHOWN = 256
"""Maximum number of kept nodes in one event; events are sent over the network."""

_PARTIAL_SECONDS = 0.05
"""Minimum seconds between two looks for changes within a round."""

_PARTIAL_SHARE = 0.05
"""Maximum share of the time that such looks take, however large the tree."""


class RunningSearch(Running[ResolvedRequest, result.SearchResult]):
    """One search, from its submission to its result.

    When its tree is complete, it holds no engine resources, and votes.

    Attributes:
        vote: selects its answer from the candidates.
        candidates: complete paths that vote; None while the search waits or runs.
    """

    @classmethod
    def resolve(cls, resolver: Resolver, request: SearchRequest) -> ResolvedRequest:
        """See `Running`."""
        return resolve_search(resolver, request)

    def __init__(self, resolved: ResolvedRequest, submission: Submission) -> None:
        super().__init__(resolved, submission)
        self.meter.prompt_tokens = resolved.generator_limits.prompt_tokens
        self.request = resolved.request
        self.vote = self.request.vote or Vote.NAIVE
        self.candidates: tuple[result.Candidate, ...] | None = None
        self._equivalence = submission.equivalence
        scorer = submission.scorer if needs_verifier(self.request) else None
        context = PolicyContext(
            self.search_id, resolved, submission.engine, scorer, self.meter, self.matchers, self._call_outside
        )
        self._tree = SearchTree(context, self.options.salt, self._on_complete)
        self._algorithm = make_algorithm(resolved.request, self._tree.root)
        self._asked: list[Expand] = []
        self._standing: list[Node] = []
        self._deepest = 0
        self._rounds: list[result.Round] = []
        self._moments: list[result.MemorySample] = []  # of the round in progress
        self._changes = ChangedNodes(self._tree.nodes) if self.options.report_nodes else None
        self._next_look = math.inf
        self._found: dict[Node, result.Candidate] = {}
        self._reason = result.StopReason.FINISHED
        self._error = ""
        self._outcome = VoteResult(None)

    @property
    def tree_complete(self) -> bool:
        """True if its tree is complete and it holds no engine resources: it votes, or is finished."""
        return self.candidates is not None

    def _begin(self) -> None:
        """Open the root's sequences and request the first steps."""
        self._next_look = self.meter.clock() + _PARTIAL_SECONDS
        self._on_event(result.Started(self.search_id, self.request, self.meter.prompt_tokens))
        self._tree.open()
        self._advance()

    def handle(self, done: Done) -> None:
        """See `Running`."""
        self._tree.handle(done)
        self._end_round_if_due()

    def report_growth(self) -> None:
        """Report how far the paths of an unfinished round have come, if the submission asked for it."""
        if self._changes is None or self.tree_complete or not any(expand.to_end for expand in self._asked):
            return
        if (began := self.meter.clock()) < self._next_look:
            return
        if changed := self._changes.take():
            self._deepest = max([self._deepest, *(record.depth for record in changed)])
            self._report(self._moment(self._tree.footprint()), scored=0, kept=(), nodes=changed, partial=True)
        ended = self.meter.clock()
        self._next_look = ended + max(_PARTIAL_SECONDS, (ended - began) / _PARTIAL_SHARE)

    def stop(self, reason: result.StopReason) -> None:
        """Stop the search with its best answer so far; cancels its work and releases every block.

        A voting search gets its result immediately, by exact match. A running one leaves its vote to the caller; see
        `cut_short`.

        Args:
            reason: why.
        """
        if self.candidates is not None:
            self._reason = reason
            self.end(select(self.candidates, self.vote))
            return
        self._tree.stop(Termination.BUDGET if reason is result.StopReason.BUDGET else Termination.CANCELLED)
        self._finish(reason)

    def fail(self, error: Exception) -> None:
        """See `Running`; candidates found so far are kept."""
        self._tree.abandon()
        super().fail(error)

    def _end(self, reason: result.StopReason, error: str = "") -> None:
        self._reason, self._error = reason, error
        if self.candidates is None:
            self._finish_usage()
        try:
            self.candidates = tuple(self._candidates())
            outcome = select(self.candidates, self.vote)
        except Exception:
            log.exception("the candidates of failed search %s are lost", self.search_id)
            self.candidates, outcome = (), VoteResult(None)
        self.end(outcome)

    def conclude(self) -> None:
        """Vote: immediately if no answers need comparing, or it was cut short, else on another thread."""
        candidates, vote, equivalence = self.candidates, self.vote, self._equivalence
        assert candidates is not None
        cut_short = self._reason in (result.StopReason.CANCELLED, result.StopReason.DEADLINE)
        if equivalence is None or cut_short or vote is Vote.NAIVE or is_decided(candidates, vote):
            self.end(select(candidates, vote))
            return
        of_vote = candidates, vote, equivalence, lambda: self.result is not None, self.account
        self._outside(partial(select, *of_vote), self.end)

    def _call_outside(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Have a policy's work done on another thread, and `then` process its result on this one."""

        def take_in(found: T) -> None:
            if not self.tree_complete:
                then(found)
                self._tree.after_work()
                self._end_round_if_due()

        self._outside(work, take_in)

    def _end_round_if_due(self) -> None:
        if not self.tree_complete and self._tree.outstanding == 0 and self._asked:
            self._end_round()

    def _advance(self) -> None:
        if self._algorithm.finished():
            cut = any(node.termination is Termination.BUDGET for node in self._tree.nodes)
            self._tree.end_round(())
            self._finish(result.StopReason.BUDGET if cut else result.StopReason.FINISHED)
            return
        self._asked = list(self._algorithm.ask())
        assert self._asked, "the algorithm is not finished and requests nothing"
        if not self._tree.begin_round(self._asked):
            self.stop(result.StopReason.BUDGET)

    def _end_round(self) -> None:
        footprint = self._tree.footprint()
        self.meter.observe(footprint)
        asked = tuple(map(result.ExpandRecord.of, self._asked))
        self._asked = []
        told = sorted(self._tree.settled, key=lambda node: node.path)
        for policy in self._tree.policies:
            policy.round_ended(told)
        snapshot = tuple(result.TellRecord(n.path, str(n.termination or ""), n.multiplicity, n.draws) for n in told)
        for node in told:
            self.meter.generator_unshared_tokens += node.multiplicity * self._unshared(node, "num_tokens")
            self.meter.verifier_unshared_tokens += node.multiplicity * self._unshared(node, "verifier_tokens")
        self._algorithm.tell(told)
        kept = list(self._algorithm.kept())  # one node may have several places in the beam
        self._tree.end_round(set(kept))
        prune([*self._standing, *told], kept, self._tree.sampled_from)
        self._standing = [node for node in dict.fromkeys(kept) if node is not self._tree.root]
        moment = self._moment(footprint)
        self._rounds.append(result.Round(asked, snapshot, tuple(node.path for node in kept), tuple(self._moments)))
        self._moments = []
        self._report_round(len(told), kept, moment)
        self._advance()

    def _moment(self, footprint: Footprint) -> result.MemorySample:
        """Record how far the search is now."""
        blocks = {role: int(count) for role, count in footprint.blocks_by_role.items()}
        moment = result.MemorySample(self.meter.elapsed(), len(self._tree.nodes), blocks)
        self._moments.append(moment)
        return moment

    def _report_round(self, scored: int, kept: list[Node], moment: result.MemorySample) -> None:
        tips = [node for node in kept if node is not self._tree.root and node not in self._tree.sampled_from]
        self._deepest = max([self._deepest, *(node.depth for node in tips)])
        changed: tuple[result.NodeRecord, ...] = ()
        if self._changes is None:
            tips = tips[-_MAX_SHOWN:]
        else:
            changed = self._changes.take()
            self._changes.end_round(kept)
        self._report(moment, scored=scored, kept=tuple(node.record() for node in tips), nodes=changed)

    def _report(self, moment: result.MemorySample, **progress: Any) -> None:
        """Report how far the search is, by fields of `StepDone`."""
        best, at = select(self._candidates(), self.vote).best, {"seconds": moment.seconds, "blocks": moment.blocks}
        self._on_event(result.StepDone(self.search_id, self._deepest, best=best, **at, **progress))

    def _unshared(self, node: Node, tokens: str) -> int:
        """Tokens that one model computes for the candidate alone, prompt and path; 0 if it does not read the path."""
        limits = self.resolved.generator_limits if tokens == "num_tokens" else self.resolved.verifier_limits
        path = node.path_tokens() if tokens == "num_tokens" else sum(n.verifier_tokens for n in node.lineage())
        return limits.prompt_tokens + path if limits and path else 0

    def _candidates(self) -> list[result.Candidate]:
        """The complete paths that are kept, in path order, including those not yet passed to the algorithm.

        If none of them has an answer, falls back to complete paths that were dropped earlier.
        """
        standing = {*self._algorithm.kept(), *self._tree.settled}.intersection(self._found)
        for nodes in (standing, self._found):
            candidates = [self._candidate(node) for node in sorted(nodes, key=lambda node: node.path)]
            if any(candidate.answer for candidate in candidates):
                return candidates
        return [self._candidate(node) for node in sorted(standing, key=lambda node: node.path)]

    def _finish(self, reason: result.StopReason) -> None:
        candidates = tuple(self._candidates())
        self._finish_usage()
        self._reason, self.candidates = reason, candidates

    def _finish_usage(self) -> None:
        self.meter.pruned = sum(node.termination is Termination.PRUNED for node in self._tree.nodes)
        self.meter.generator_tree_tokens += computed_once(self._tree.nodes)

    def end(self, outcome: VoteResult) -> None:
        """Create the result from the vote's outcome."""
        self._outcome = outcome
        super()._end(self._reason, self._error)

    def _own_fields(self) -> dict[str, Any]:
        best, nodes = self._outcome.best, self._tree.nodes
        probed = None if best else probed_answer(nodes)
        return {
            "answer": best.answer if best else probed.answer if probed else "",
            "score": best.score if best else None,
            "best": best,
            "candidates": self.candidates,
            "nodes": tuple(node.record() for node in nodes),
            "digests": self.digests,
            "grader": self._outcome.grader,
            "rounds": tuple(self._rounds) if self.options.keep_rounds else (),
            "warnings": (*self.resolved.warnings, *(text for each in self._tree.policies for text in each.warnings)),
            "sampled": tuple(result.Sampled(node.draws, node.own_tokens, node.verifier_tokens) for node in nodes),
            "probed": probed,
        }

    def _candidate(self, node: Node) -> result.Candidate:
        """The candidate of a complete path; only its multiplicity can have changed since its answer was extracted."""
        found = self._found[node]
        return found if found.multiplicity == node.multiplicity else replace(found, multiplicity=node.multiplicity)

    def _score(self, node: Node) -> float | None:
        """The score of a complete path in the vote."""
        if not self.vote.reads_confidence:
            return aggregate(node.step_scores(), self.request.aggregation)
        # A policy's module, like those of `make_policies`.
        from espalier.search.growth.confidence import path_confidence

        return path_confidence([value for step in node.lineage() for value in step.log_probabilities], self.vote)

    def _on_complete(self, node: Node) -> result.Candidate:
        """Extract the answer of a path that has just become complete."""
        plan = self.request.call_plan
        content, calls = plan.split(node.answer_text()) if plan else ("", ())
        found = self._found[node] = result.Candidate(
            node_id=node.node_id,
            answer=answer_in(node.answer_text(), self.request),
            score=self._score(node),
            multiplicity=node.multiplicity,
            steps=tuple(result.ScoredStep(n.text, n.score, n.thought_chars, n.written.text) for n in node.lineage()),
            thought_tokens=sum(n.num_tokens for n in node.lineage() if n.thought_chars),
            calls=calls,
            beside_calls=content.strip() if calls else "",
        )
        self._on_event(result.CandidateDone(self.search_id, found))
        return found
