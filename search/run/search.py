"""One running search: grows what its algorithm asks for and holds the sequences of every node."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from espalier.engine.engine import Engine
from espalier.engine.errors import NoEmbeddingError
from espalier.engine.memory.sequences import Sequence
from espalier.engine.scheduling.admission import Reservation
from espalier.engine.scheduling.role_policy import VERIFIER
from espalier.engine.work import Done, Generate, Generated, Sampling, StopCause, stream_key
from espalier.prm.generative import Critiques
from espalier.prm.verifier import Verification, Verifier
from espalier.search.algorithms import make_algorithm
from espalier.search.algorithms.base import Expand, viable
from espalier.search.request import Vote
from espalier.search.result import (
    Asked,
    Candidate,
    CandidateDone,
    Event,
    Finished,
    Round,
    ScoredStep,
    SearchResult,
    Started,
    StepDone,
    StopReason,
    Told,
)
from espalier.search.run.budget import Budget
from espalier.search.run.failure import reason_of
from espalier.search.run.generator import Generator
from espalier.search.run.memory import ResolvedRequest
from espalier.search.run.node_state import NodeState, PendingExpansion
from espalier.search.run.usage import UsageMeter
from espalier.search.tree import Node, Termination, aggregate, computed_once, is_degenerate, prune
from espalier.search.voting.answers import extract_answer, last_boxed
from espalier.search.voting.vote import VoteResult, select

log = logging.getLogger("espalier.search")

_MOST_SHOWN = 256
"""Nodes that one event names at most: events are sent over the network, and a tree may be large."""


class RunningSearch:
    """One search, from its submission to its result.

    The engine's finished work goes in by `handle`. Once the search has grown it holds nothing of the engine's any more;
    its `candidates` then vote, which is up to whoever runs the search, and `end` takes what came of it.

    Attributes:
        resolved: what was asked for.
        meter: what it has cost so far.
        candidates: the complete paths that vote; None while the search waits or grows.
        result: None until the search is over.
        reservation: the memory set aside for it while it may grow.
        suspended: whether it gave way to another search while it grew.
        cancelled: whether somebody asked for its end.
        arrival: its number in the order in which searches were submitted.
        deadline: the time at which its time limit is over, by the meter's clock.
        vote_deadline: the time at which its vote has taken too long.
    """

    def __init__(
        self,
        resolved: ResolvedRequest,
        engine: Engine,
        generator: Generator,
        verifier: Verifier | None,
        on_event: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resolved = resolved
        self.request = resolved.request
        self.meter = UsageMeter(clock, resolved.options.waited)
        self.candidates: tuple[Candidate, ...] | None = None
        self.result: SearchResult | None = None
        self.reservation: Reservation | None = None
        self.suspended = False
        self.cancelled = False
        self.arrival = 0
        self.deadline = math.inf if resolved.options.timed_from_start else self._time_limit_from(self.meter.submitted)
        self.vote_deadline = math.inf
        self._engine = engine
        self._generator = generator
        self._verifier = verifier if resolved.verifier_limits else None
        self._verification: Verification | Critiques | None = None
        self._whole_answers = self._verifier is not None and self._verifier.family.info.whole_answers
        self._on_event = on_event
        self._root = Node(0, None, ())
        self._algorithm = make_algorithm(resolved.request, self._root)
        self._nodes: list[Node] = [self._root]
        self._states: dict[Node, NodeState] = {}
        self._by_verifier: dict[Sequence, Node] = {}
        self._by_generator: dict[Sequence, Node] = {}
        self._siblings: dict[tuple[Node, str, Termination | None], Node] = {}
        self._expansions: dict[Generate, PendingExpansion] = {}
        self._sampled_from: set[Node] = set()
        self._asked: list[Expand] = []
        self._round: list[Node] = []
        self._standing: list[Node] = []
        self._deepest = 0
        self._outstanding = 0
        self._rounds: list[Round] = []
        self._found: dict[Node, Candidate] = {}
        self._reason = StopReason.FINISHED
        self._error = ""
        self._budget = Budget(resolved.request, self.meter, self._verifier is not None)

    @property
    def search_id(self) -> str:
        """Its name, which is also that of its work in the engine."""
        return self.resolved.search_id

    @property
    def priority(self) -> int:
        """Searches of a larger one go first."""
        return self.resolved.options.priority

    @property
    def vote(self) -> Vote:
        """How its candidates select an answer."""
        return self.request.vote or Vote.NAIVE

    @property
    def has_grown(self) -> bool:
        """Whether it holds nothing of the engine's any more: it votes, or is over."""
        return self.candidates is not None

    @property
    def voting(self) -> bool:
        """Whether it has grown and has no result yet."""
        return self.candidates is not None and self.result is None

    @property
    def cut_short(self) -> bool:
        """Whether it was stopped from outside: its vote must not take any more time."""
        return self._reason in (StopReason.CANCELLED, StopReason.DEADLINE)

    def _time_limit_from(self, start: float) -> float:
        return math.inf if self.request.time_limit is None else start + self.request.time_limit

    def start(self) -> None:
        """Open the root's sequences and ask for the first steps."""
        self.meter.start()
        if self.resolved.options.timed_from_start:
            self.deadline = self._time_limit_from(self.meter.clock())
        self._on_event(Started(self.search_id, self.request))
        root = NodeState(to_end=False)
        self._states[self._root] = root
        root.generator, prompt = self._generator.open(self.search_id, self.request.problem, self.resolved.options.salt)
        self.meter.generator_tree_tokens += prompt
        self._by_generator[root.generator] = self._root
        if self._verifier:
            begun = self._verifier.begin(
                self.search_id, self.request.problem, self.resolved.options.salt, self.request.seed
            )
            self._verification, root.verifier = begun, begun.root
            self._root.verifier_tokens = begun.prompt_tokens
            self.meter.verifier_tree_tokens += begun.prompt_tokens
            self._by_verifier[begun.root] = self._root
            if self._budget.covers_the_problem:
                begun.prefill()
        self._advance()

    def handle(self, done: Done) -> None:
        """Take in one piece of finished work; nothing that comes late to a search that has failed."""
        if self._reason is StopReason.FAILED:
            return
        if done.work.sequence.role == VERIFIER:
            self._on_verified(done)
        elif isinstance(done, Generated):
            self.meter.generator_tokens += done.computed_tokens
            self._on_generated(done)
        if not self.has_grown and self._outstanding == 0 and self._asked:
            self._end_round()

    def stop(self, reason: StopReason | None = None) -> None:
        """End the search now with what it has; its work is dropped and every block released.

        A search that votes already has its result at once, by exact match. One that grows leaves its vote to whoever
        runs it: see `cut_short`.

        Args:
            reason: why; None leaves it at the reason for which it has stopped growing.
        """
        if self.candidates is not None:
            self._reason = reason or self._reason
            self.end(select(self.candidates, self.vote))
            return
        assert reason is not None
        self._engine.cancel(self.search_id)
        if self._verification is not None:
            self._verification.close()
        self._cut_off(Termination.BUDGET if reason is StopReason.BUDGET else Termination.CANCELLED)
        self._finish(reason)

    def _cut_off(self, mark: Termination) -> None:
        for node in self._states:
            if node.open and node is not self._root:
                node.termination = mark

    def fail(self, error: Exception) -> None:
        """End the search, in whatever state it is, for what one of its calls has raised; what it had found stays."""
        self._error = reason_of(error, self.search_id)
        self._reason, self._verification = StopReason.FAILED, None
        self._engine.abandon(self.search_id)
        self._cut_off(Termination.CANCELLED)
        self._states.clear()
        if self.candidates is None:
            self._close_books()
        try:
            self.candidates = tuple(self._candidates())
            outcome = select(self.candidates, self.vote)
        except Exception:
            log.exception("what search %s had found before it failed is lost", self.search_id)
            self.candidates, outcome = (), VoteResult(None)
        try:
            self.end(outcome)
        except Exception:
            log.exception("nobody could be told that search %s has failed", self.search_id)

    def _advance(self) -> None:
        if self._algorithm.finished():
            cut = any(node.termination is Termination.BUDGET for node in self._nodes)
            self._finish(StopReason.BUDGET if cut else StopReason.FINISHED)
            return
        self._asked, self._round = list(self._algorithm.ask()), []
        assert self._asked, "the algorithm is not finished and asks for nothing"
        self._outstanding = sum(expand.children for expand in self._asked)
        if not self._budget.deal(self._outstanding):
            self.stop(StopReason.BUDGET)
            return
        for expand in self._asked:
            self._generate(expand.node, expand.children, expand.to_end, expand.greedy, expand.node, in_place=False)

    def _generate(
        self, node: Node, children: int, to_end: bool, greedy: bool, round_root: Node, in_place: bool
    ) -> None:
        state = self._states[node]
        sequence = state.generator
        assert sequence is not None, "the node's generator sequence was released"
        first = node.num_children
        node.num_children += children
        state.expected += children
        if not greedy:
            self._sampled_from.add(node)
        request = self.request
        temperature = 0.0 if greedy else request.temperature or 0.0
        filters = temperature, request.top_k or 0, request.top_p or 1.0, request.min_p or 0.0
        samplings = tuple(
            Sampling(*filters, key=stream_key(request.seed, request.problem, (*node.path, i)))
            for i in range(first, first + children)
        )
        limits = self.resolved.generator_limits
        left = min(
            limits.step_tokens, limits.path_tokens - node.path_tokens(), self._budget.generator_left(node, round_root)
        )
        self._by_generator[sequence] = node
        merge = request.merge_duplicates
        work = self._generator.generate(self.search_id, sequence, samplings, left, in_place, merge)
        self._expansions[work] = PendingExpansion(first, to_end, greedy, round_root)

    def _on_generated(self, done: Generated) -> None:
        parent = self._by_generator[done.work.sequence]
        above, count, expansion = self._states[parent], len(done.indices), self._expansions[done.work]
        draws = tuple(expansion.first_child + i for i in done.indices)
        node = Node(len(self._nodes), parent, (*parent.path, draws[0]), draws=draws)
        node.rollout = expansion.greedy or parent.rollout
        node.text, node.num_tokens, node.log_probability = done.text, len(done.token_ids), done.log_probability
        node.own_tokens, node.multiplicity = done.own_tokens, count
        self._nodes.append(node)
        self._budget.begin(node, expansion.round_root)
        self.meter.note_step()
        self.meter.nodes += count
        self.meter.duplicates += count - 1
        self.meter.generated_tokens += count * node.num_tokens
        state = NodeState(expansion.to_end, generator=done.sequence)
        above.expected -= count
        if done.work.in_place:
            above.generator = None
        self._states[node] = state
        node.termination = self._termination(node, done.cause, expansion)
        if not state.to_end:
            self._outstanding -= count - 1
            # Only alike ends merge: the same text may be a complete answer here and cut off there.
            alike = parent, node.text, node.termination
            if self.request.merge_duplicates and (duplicate := self._siblings.setdefault(alike, node)) is not node:
                self._merge(node, duplicate)
                return
        elif node.termination is None:
            self._generate(node, count, expansion.to_end, expansion.greedy, expansion.round_root, in_place=count == 1)
        if not self._verifier:
            self._mark_verified(node)
        elif above.verified:
            self._score(node)
        else:
            above.unscored_children.append(node)
        self._give_up_path_sequences(parent)

    def _give_up_path_sequences(self, node: Node) -> None:
        """Release what an inner node of independent paths holds once its children hold what they need of it."""
        state = self._states[node]
        if not state.to_end or state.expected:
            return
        if state.generator is not None:
            self._engine.release(state.generator)
            state.generator = None
        if state.verified and state.verifier is not None:
            self._engine.release(state.verifier)
            state.verifier = None

    def _merge(self, node: Node, duplicate: Node) -> None:
        """Count a sibling with the same text and end on the one that is there already.

        The one that stays takes the lower path of the two and what was sampled there, so that what grows from it does
        not depend on which of them was finished first.
        """
        if node.path < duplicate.path:
            one, other = self._states[node], self._states[duplicate]
            one.generator, other.generator = other.generator, one.generator
            for name in ("path", "num_tokens", "own_tokens", "log_probability"):
                mine, theirs = getattr(node, name), getattr(duplicate, name)
                setattr(node, name, theirs)
                setattr(duplicate, name, mine)
        duplicate.draws = tuple(sorted((*duplicate.draws, *node.draws)))
        node.termination = Termination.DUPLICATE
        duplicate.multiplicity += node.multiplicity
        self.meter.duplicates += 1
        self._release(node)
        self._outstanding -= 1

    def _termination(self, node: Node, cause: StopCause, expansion: PendingExpansion) -> Termination | None:
        if cause is StopCause.EOS:
            # An end without a word of its own still ends what was said before it.
            return Termination.EOS if node.path_text().strip() else Termination.DEGENERATE
        if cause is StopCause.DELIMITER and last_boxed(node.text) is not None:
            return Termination.BOXED
        if (cause is not StopCause.DELIMITER or expansion.to_end) and self._budget.generator_left(
            node, expansion.round_root
        ) <= 0:
            return Termination.BUDGET
        if cause is not StopCause.DELIMITER or node.depth >= self.request.max_steps:
            return Termination.LENGTH
        if node.path_tokens() >= self.resolved.generator_limits.path_tokens:
            return Termination.LENGTH
        return Termination.DEGENERATE if is_degenerate([step.text for step in node.lineage()]) else None

    def _score(self, node: Node) -> None:
        """Queue the node's step for scoring, its parent being verified.

        A step without text has no score, one that was cut off needs none, and one that is too long for the verifier or
        holds tokens it cannot be fed ends its path. A verifier of whole answers reads nothing until there is one, and
        then all of it after the problem.
        """
        assert self._verification is not None
        assert node.parent is not None
        state = self._states[node]
        if not self._has_score(node):
            self._mark_verified(node)
            return
        parent = self._states[self._root if self._whole_answers else node.parent]
        # Along a path of its own, a node takes over its parent's sequence: nobody else will extend it.
        take_over = state.to_end and parent.to_end and node.parent.multiplicity == 1
        scoring = None
        if parent.verifier is not None:
            room, share = self._verifier_room(parent.verifier), self._budget.verifier_left(node)
            steps = [step for step in node.lineage() if step.text.strip()]
            try:
                scoring = self._verification.score(
                    parent.verifier,
                    tuple(step.text for step in steps),
                    min(room, share),
                    in_place=take_over,
                    before=steps[-2].score if len(steps) > 1 else None,
                )
            except NoEmbeddingError:
                share = room  # the step cannot be read, however much of it there may be
            if scoring is None and share < room:
                self._budget.refuse(node)
        if scoring is None:
            if not state.to_end:
                node.termination = self._budget.why_unscored(node)
            self._mark_verified(node)
            return
        if take_over:
            parent.verifier = None
        state.verifier = scoring.sequence
        self._by_verifier[scoring.sequence] = node
        node.verifier_tokens = scoring.num_tokens
        self.meter.verifier_tree_tokens += node.verifier_tokens

    def _has_score(self, node: Node) -> bool:
        return node.complete if self._whole_answers else bool(node.text.strip()) and viable(node)

    def _verifier_room(self, sequence: Sequence) -> int:
        limits = self.resolved.verifier_limits
        assert limits is not None
        return min(limits.prompt_tokens + limits.path_tokens - self._engine.length(sequence), limits.step_tokens)

    def _on_verified(self, done: Done) -> None:
        assert self._verification is not None
        if not self._verification.is_check(done):
            self.meter.verifier_tokens += done.computed_tokens
        if (verdict := self._verification.take(done)) is not None:
            node = self._by_verifier[verdict.sequence]
            node.score = verdict.score
            node.verifier_tokens += verdict.late_tokens
            self.meter.verifier_tree_tokens += verdict.late_tokens
            self._mark_verified(node)

    def _mark_verified(self, node: Node) -> None:
        """The verifier is done with the node: let its children be scored, and count it as grown where it has ended."""
        state = self._states[node]
        state.verified = True
        waiting, state.unscored_children = state.unscored_children, []
        for child in waiting:
            self._score(child)
        if state.to_end and node.termination is None:
            self._give_up_path_sequences(node)
        if node is not self._root and not (state.to_end and node.termination is None):
            self._settle(node)

    def _settle(self, node: Node) -> None:
        """Count a node that is verified and, on a path of its own, ended."""
        state = self._states[node]
        read = [node] if self._whole_answers else [step for step in node.lineage() if step.text.strip()]
        unscored = self._verifier and any(step.score is None for step in read)
        if unscored and state.to_end and node.complete:
            node.termination = self._budget.why_unscored(node)  # the path has no score
        self._outstanding -= node.multiplicity if state.to_end else 1
        self._round.append(node)
        if node.complete and not node.rollout:
            self._found[node] = self._read_answer(node)
            self._on_event(CandidateDone(self.search_id, self._found[node]))

    def _end_round(self) -> None:
        self.meter.observe(self._engine.footprint(self._held_sequences()))
        asked = tuple(Asked(e.node.path, e.children, e.to_end, e.greedy) for e in self._asked)
        self._asked = []
        told = sorted(self._round, key=lambda node: node.path)
        snapshot = tuple(Told(n.path, str(n.termination or ""), n.multiplicity, n.draws) for n in told)
        for node in told:
            self.meter.generator_alone_tokens += node.multiplicity * self._alone(node, "num_tokens")
            self.meter.verifier_alone_tokens += node.multiplicity * self._alone(node, "verifier_tokens")
        self._algorithm.tell(told)
        self._round = []
        self._siblings.clear()
        self._expansions.clear()
        self._give_up(told)
        self._rounds.append(Round(asked, snapshot, tuple(node.path for node in self._algorithm.kept())))
        tips = [node for node in self._algorithm.kept() if node is not self._root and node not in self._sampled_from]
        kept = tuple(node.record() for node in tips[-_MOST_SHOWN:])
        self._deepest = max([self._deepest, *(node.depth for node in tips)])
        best = select(self._candidates(), self.vote).best
        self._on_event(StepDone(self.search_id, self._deepest, len(told), kept, best))
        self._advance()

    def _alone(self, node: Node, tokens: str) -> int:
        """Tokens that one model, if it read the candidate, has to read of it: the prompt's and its path's."""
        limits = self.resolved.generator_limits if tokens == "num_tokens" else self.resolved.verifier_limits
        path = sum(getattr(step, tokens) for step in node.lineage())
        return limits.prompt_tokens + path if limits and path else 0

    def _candidates(self) -> list[Candidate]:
        """The complete paths that stand, in order of path; those its algorithm was not told of yet too.

        Where none of them gives an answer, those that were overtaken: an answer that was found is not lost.
        """
        standing = {*self._algorithm.kept(), *self._round}.intersection(self._found)
        for nodes in (standing, self._found):
            candidates = [self._candidate(node) for node in sorted(nodes, key=lambda node: node.path)]
            if any(candidate.answer for candidate in candidates):
                return candidates
        return [self._candidate(node) for node in sorted(standing, key=lambda node: node.path)]

    def _give_up(self, told: list[Node]) -> None:
        """Release what the algorithm does not keep, and mark it; complete paths need no sequences either."""
        kept = dict.fromkeys(self._algorithm.kept())
        for node in list(self._states):
            if node not in kept or not node.open:
                self._release(node)
        prune([*self._standing, *told], kept, self._sampled_from)
        self._standing = [node for node in kept if node is not self._root]

    def _held_sequences(self) -> list[Sequence]:
        return [s for state in self._states.values() for s in (state.generator, state.verifier) if s is not None]

    def _release(self, node: Node) -> None:
        if (state := self._states.pop(node, None)) is None:
            return
        for sequence in (state.generator, state.verifier):
            if sequence is not None:
                self._engine.release(sequence)

    def _finish(self, reason: StopReason) -> None:
        for node in list(self._states):
            self._release(node)
        candidates = tuple(self._candidates())
        self._close_books()
        self._reason, self.candidates = reason, candidates

    def _close_books(self) -> None:
        self.meter.pruned = sum(node.termination is Termination.PRUNED for node in self._nodes)
        self.meter.generator_tree_tokens += computed_once(self._nodes)

    def end(self, outcome: VoteResult) -> None:
        """Make the result of what has grown and what its vote came to."""
        assert self.candidates is not None
        best = outcome.best
        self.result = SearchResult(
            search_id=self.search_id,
            answer=best.answer if best else "",
            score=best.score if best else None,
            stop_reason=self._reason,
            best=best,
            candidates=self.candidates,
            nodes=tuple(node.record() for node in self._nodes),
            usage=self.meter.close(),
            configuration=self.request,
            digests={role: model.digest for role, model in self._engine.models.items()},
            grader=outcome.grader,
            rounds=tuple(self._rounds),
            error=self._error,
        )
        self._on_event(Finished(self.search_id, self.result))

    def _candidate(self, node: Node) -> Candidate:
        """The candidate of a finished path; only its multiplicity may have changed since it was read."""
        found = self._found[node]
        return found if found.multiplicity == node.multiplicity else replace(found, multiplicity=node.multiplicity)

    def _read_answer(self, node: Node) -> Candidate:
        return Candidate(
            node_id=node.node_id,
            answer=extract_answer(node.path_text()),
            score=aggregate(node.step_scores(), self.request.aggregation),
            multiplicity=node.multiplicity,
            steps=tuple(ScoredStep(n.text, n.score) for n in node.lineage()),
        )
