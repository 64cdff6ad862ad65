"""A session of scores from submission to result: a tree to which steps are added while it is scored."""

from collections import deque
from dataclasses import dataclass

from espalier.engine.roles import VERIFIER
from espalier.prm.limits import UNLIMITED, PathLimits
from espalier.prm.scorer import ScoreStatus, StepScore
from espalier.search.algorithms.base import MemoryEstimate
from espalier.search.result import StopReason
from espalier.search.run.executor import ResolvedScores
from espalier.search.run.resolve import Resolver
from espalier.search.run.running import Submission
from espalier.search.run.scores import OVER_BUDGET, RunningScoring
from espalier.search.run.worst_case import blocks_of, worst_case
from espalier.search.score_session import ROOT, NodeScore, ScoreSessionRequest, SessionStep, SessionTurn, StepsScored
from espalier.search.tree import Node

_MAX_BRANCHES = 64
"""Steps of a session that are scored at a time."""
_MAX_JUDGED = 8
"""The same by rationales."""


@dataclass(slots=True)
class _Held:
    """State of a node that is held: it, or a node below it, may get steps or is being scored.

    Attributes:
        tokens: of its step, which its sequence and those below it hold.
        below: held nodes that continue it.
        ahead: those of them that have not been handed in to the scorer.
        scored: whether it has its score, or none for good.
        released: whether no further step comes below it.
    """

    tokens: int = 0
    below: int = 0
    ahead: int = 0
    scored: bool = False
    released: bool = False


class RunningScoreSession(RunningScoring):
    """A session of scores. `OpenNodes` has checked the turns that it is told.

    What is told is handed in to the scorer between two steps of the engine, so that steps told together are computed
    together. Blocks that all `max_nodes` and `max_tokens` need are reserved, so a step beyond them has no score.
    """

    @classmethod
    def resolve(cls, resolver: Resolver, request: ScoreSessionRequest) -> ResolvedScores:
        """See `Running`; raises as requests for scores do."""
        request.validate()
        scorer = resolver.scorer_of_texts("problem")
        prompt, most = scorer.prompt(request.problem_text), request.max_tokens
        limits = PathLimits(0, most, most)
        bounds = scorer.bounds(len(prompt), limits, request.max_nodes, resolver.tokenizer)
        if not bounds:
            return ResolvedScores(request, prompt)
        # Nothing of a path that is judged by rationales stays behind.
        judged = bounds.rationales is not None
        together = min(request.max_nodes, _MAX_JUDGED if judged else _MAX_BRANCHES)
        checked = MemoryEstimate(together if judged else int(scorer.needs.rescored == VERIFIER))
        paths = worst_case(resolver.engine, VERIFIER, (checked,), bounds)  # with the problem
        size = resolver.engine.settings.block_size
        # The first and the last block of a node's tokens are its own; so are those of what is fed to read its score.
        probes = together * bounds.probes if bounds.max_probe_tokens else 0
        of_probes = probes * (blocks_of(bounds.max_probe_tokens, size) + 1)
        held = blocks_of(most, size) + 2 * request.max_nodes + of_probes
        states = request.max_nodes + probes
        of_states = {pool.name for pool in resolver.engine.schedulers[VERIFIER].pools if pool.holds_states}
        blocks = {pool: count + (states if pool in of_states else held) for pool, count in paths.items()}
        resolver.require_fits(blocks, "max_nodes or max_tokens of the session")
        return ResolvedScores(request, prompt, blocks, together, UNLIMITED if judged else most)

    def __init__(self, resolved: ResolvedScores, submission: Submission) -> None:
        super().__init__(resolved, submission)
        assert isinstance(resolved.request, ScoreSessionRequest)
        self._request = resolved.request
        self._turns: deque[SessionTurn] = deque()
        # Those that steps may come below; None for one that is not held: a chain of nodes would grow without limit.
        self._by_name: dict[int, Node | None] = {ROOT: self._root}
        self._held: dict[Node, _Held] = {self._root: _Held(scored=True)}
        self._held_tokens = 0
        self._waiting: deque[Node] = deque()  # to be handed in
        self._scoring = 0  # nodes that were handed in and are not scored
        self._scored: list[NodeScore] = []  # to be reported
        self._last = False

    @property
    def waits_for_caller(self) -> bool:
        """See `Running`."""
        return not self._turns

    def tell(self, turn: SessionTurn) -> None:
        """Take what the caller says; carried out once the session runs."""
        self._turns.append(turn)

    def _begin_steps(self) -> None:
        """Nothing: steps are handed in by `report_growth`."""

    def report_growth(self) -> None:
        """Hand in the steps that have come, and report the scores that have become known."""
        while self._turns:
            turn = self._turns.popleft()
            for step in turn.steps:
                self._add(step)
            for name in turn.release:
                self._release(self._by_name.pop(name))
            self._last |= turn.last
        self._hand_in()
        self._report()
        self._end_if_complete()

    def stop(self, reason: StopReason) -> None:
        """See `RunningScoring`; reports the scores that are known."""
        self._report()
        super().stop(reason)

    def _report(self) -> None:
        if self._scored:
            scores, self._scored = tuple(self._scored), []
            self._on_event(StepsScored(self.search_id, scores))

    def _add(self, step: SessionStep) -> None:
        parent = self._by_name[step.parent]
        self.meter.nodes += 1
        self._by_name[step.node] = None
        if parent is None:
            self._scored.append(NodeScore(step.node, reason="a step before it has no score"))
            return
        parent.num_children += 1
        if len(self._held) > self._request.max_nodes:
            most = f"the session holds max_nodes={self._request.max_nodes}; release nodes, or open one with more"
            self._scored.append(NodeScore(step.node, reason=most))
            return
        node = Node(step.node, parent, (*parent.path, parent.num_children - 1), text=step.text)
        self._by_name[step.node] = node
        above = self._held[parent]
        above.below += 1
        above.ahead += 1
        self._held[node] = _Held()
        self._waiting.append(node)

    def _release(self, node: Node | None) -> None:
        if node is not None:
            held = self._held[node]
            held.released = True
            self._let_go(node, held)

    def _hand_in(self) -> None:
        while self._waiting and self._scoring < self.resolved.together:
            node = self._waiting.popleft()
            self._scoring += 1
            self._on_scores(self._session.want(node))
            assert node.parent is not None
            above = self._held[node.parent]
            above.ahead -= 1
            self._let_go(node.parent, above)

    def _let_go(self, node: Node, held: _Held) -> None:
        """Give back what a node holds if nothing needs it, and then what the nodes above it hold."""
        while held.released and not held.ahead and node is not self._root:
            self._session.release(node)
            if held.below or not held.scored:
                return
            del self._held[node]
            self._held_tokens -= held.tokens
            assert node.parent is not None
            node, held = node.parent, self._held[node.parent]
            held.below -= 1

    def _tokens_left(self, node: Node) -> int:
        return min(self._budget_left, self.resolved.max_tokens - self._held_tokens)

    def _on_step(self, step: StepScore) -> None:
        held = self._held[step.node]
        if step.status is ScoreStatus.PENDING:  # from now on its sequence has these tokens
            held.tokens += step.tokens
            self._held_tokens += step.tokens
            return
        self._scoring -= 1
        held.scored = True
        step.node.score = step.score
        self._scored.append(NodeScore(step.node.node_id, step.score, self._reason(step)))
        self._let_go(step.node, held)

    def _reason(self, step: StepScore) -> str:
        if step.status is not ScoreStatus.OVER_BUDGET:
            return step.reason
        if self._budget_left <= self.resolved.max_tokens - self._held_tokens:
            self._exhausted = True
            return OVER_BUDGET
        most = f"the session holds {self._held_tokens} of max_tokens={self._request.max_tokens}"
        return f"{most}; release nodes, or open one with more"

    def _end_if_complete(self) -> None:
        complete = self._last and not (self._turns or self._waiting or self._scoring or self._session.pending)
        if complete and self.result is None:
            self._report()
            self._finish()
