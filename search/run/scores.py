"""Scores of given steps, from submission to result: solutions as a tree, or a session to which steps are added."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from espalier.engine.roles import VERIFIER
from espalier.engine.work import Done
from espalier.prm.limits import UNLIMITED, PathLimits
from espalier.prm.scorer import ScoredSearch, ScoreSession, ScoreStatus, StepScore
from espalier.search import scores
from espalier.search.algorithms.base import MemoryEstimate
from espalier.search.result import StopReason
from espalier.search.run.executor import ResolvedScores
from espalier.search.run.resolve import Resolver, blocks_of, worst_case
from espalier.search.run.running import Running, Submission
from espalier.search.tree import Node, aggregate

OVER_BUDGET = "verifier_budget is used up"
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


class RunningScoreSession(Running[ResolvedScores, scores.ScoreResult]):
    """A session of scores. `OpenNodes` has checked the turns that it is told.

    What is told is handed in to the scorer between two steps of the engine, so that steps told together are computed
    together. Blocks that all `max_nodes` and `max_tokens` need are reserved, so a step beyond them has no score.
    """

    @classmethod
    def resolve(cls, resolver: Resolver, request: Any) -> ResolvedScores:
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
        assert submission.scorer, "requests for scores are resolved with a scorer alone"
        self._scorer = submission.scorer
        self._root = Node(0, None, ())
        self._session = ScoreSession()
        self._exhausted = False  # whether a step was left out for the budget
        self._turns: deque[scores.SessionTurn] = deque()
        # Those that steps may come below; None for one that is not held: a chain of nodes would grow without limit.
        self._by_name: dict[int, Node | None] = {scores.ROOT: self._root}
        self._held: dict[Node, _Held] = {self._root: _Held(scored=True)}
        self._held_tokens = 0
        self._waiting: deque[Node] = deque()  # to be handed in
        self._scoring = 0  # nodes that were handed in and are not scored
        self._scored: list[scores.NodeScore] = []  # to be reported
        self._last = False

    @property
    def waits_for_caller(self) -> bool:
        """See `Running`."""
        return not (self._turns or self._last)

    def tell(self, turn: scores.SessionTurn) -> None:
        """Take what the caller says; carried out once the session runs."""
        self._turns.append(turn)

    def _begin(self) -> None:
        request = self.resolved.request
        of_problem = request.problem_text, self.resolved.verifier_prompt, self.options.salt, request.seed
        how = {"budget": self._tokens_left, "score_final_only": self._scorer.needs.scores == "answers"}
        scored = ScoredSearch(self._engine, self.search_id, self._root, *of_problem, **how)
        self._session = self._scorer.begin(scored)
        self.meter.verifier_tree_tokens += self._session.prompt_tokens
        if self._budget_left < 0:
            self.stop(StopReason.BUDGET)
        else:
            self._session.prefill()

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

    def _report(self) -> None:
        if self._scored:
            found, self._scored = tuple(self._scored), []
            self._on_event(scores.StepsScored(self.search_id, found))

    def _add(self, step: scores.SessionStep) -> None:
        parent = self._by_name[step.parent]
        self.meter.nodes += 1
        self._by_name[step.node] = None
        if parent is None:
            self._scored.append(scores.NodeScore(step.node, reason="a step before it has no score"))
            return
        parent.num_children += 1
        request = self.resolved.request
        assert isinstance(request, scores.ScoreSessionRequest)
        if len(self._held) > request.max_nodes:
            most = f"the session holds max_nodes={request.max_nodes}; release nodes, or open one with more"
            self._scored.append(scores.NodeScore(step.node, reason=most))
            return
        node = Node(step.node, parent, (*parent.path, parent.num_children - 1), text=step.text)
        self._by_name[step.node] = node
        self._hold(node)

    def _hold(self, node: Node) -> None:
        """Let a new node wait until it is handed in."""
        assert node.parent is not None
        above = self._held[node.parent]
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
            self._on_scores(self._handed_in(node))
            assert node.parent is not None
            above = self._held[node.parent]
            above.ahead -= 1
            self._let_go(node.parent, above)

    def _handed_in(self, node: Node) -> Iterable[StepScore]:
        return self._session.want(node)

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
        self._scored.append(scores.NodeScore(step.node.node_id, step.score, self._reason(step)))
        self._let_go(step.node, held)

    def _reason(self, step: StepScore) -> str:
        if step.status is not ScoreStatus.OVER_BUDGET:
            return step.reason
        if self._budget_left <= self.resolved.max_tokens - self._held_tokens:
            self._exhausted = True
            return OVER_BUDGET
        most = f"the session holds {self._held_tokens} of max_tokens={self.resolved.max_tokens}"
        return f"{most}; release nodes, or open one with more"

    def _end_if_complete(self) -> None:
        complete = self._last and not (self._turns or self._waiting or self._scoring or self._session.pending)
        if complete and self.result is None:
            self._report()
            self._finish()

    def handle(self, done: Done) -> None:
        """See `Running`."""
        if not self._session.is_check(done):
            self.meter.verifier_tokens += done.computed_tokens
        self._on_scores(self._session.take(done))
        self.meter.observe(self._engine.footprint(self._session.sequences()))
        self._end_if_complete()

    def stop(self, reason: StopReason) -> None:
        """See `Running`; scores that are known are reported, and steps that are not scored yet have none."""
        self._report()
        self._close()
        self._end(reason)

    @property
    def _budget_left(self) -> int:
        budget = self.resolved.request.verifier_budget
        return UNLIMITED if budget is None else budget - self.meter.verifier_tree_tokens

    def _on_scores(self, found: Iterable[StepScore]) -> None:
        """Store scores, one at a time: the next may depend on it."""
        for step in found:
            self.meter.verifier_tree_tokens += step.tokens
            if step.node is not self._root:
                self._on_step(step)

    def _finish(self) -> None:
        self._close()
        self._end(StopReason.BUDGET if self._exhausted else StopReason.FINISHED)

    def _close(self) -> None:
        self._engine.cancel(self.search_id)
        self._session.close()
        self._session = ScoreSession()

    def _own_fields(self) -> dict[str, Any]:
        return {"scorer": self._scorer.identity, "digests": self.digests}


class RunningScores(RunningScoreSession):
    """The scores of solutions that are known from the beginning: a session in which all is said at once."""

    @classmethod
    def resolve(cls, resolver: Resolver, request: scores.ScoreRequest) -> ResolvedScores:
        """See `Running`.

        Raises:
            InvalidRequestError: lists every invalid field; there is no verifier, or it scores no given texts.
            RequestTooLargeError: the problem fills the verifier's context; PoolTooSmallError if the KV pool could not
                hold all solutions.
        """
        request.validate()
        scorer = resolver.scorer_of_texts("solutions")
        prompt = scorer.prompt(request.problem_text)
        tokenizer = resolver.tokenizer
        lengths = [[len(tokenizer.encode(step)) for step in steps] for steps in request.solutions]
        limits = PathLimits(0, max(map(sum, lengths)), max(map(max, lengths)))
        bounds = scorer.bounds(len(prompt), limits, max(map(len, lengths)), tokenizer)
        paths = len(set(request.solutions)) + (scorer.needs.rescored == VERIFIER)
        blocks = worst_case(resolver.engine, VERIFIER, (MemoryEstimate(paths, paths),), bounds) if bounds else {}
        resolver.require_fits(blocks, "the number or the length of the solutions")
        return ResolvedScores(request, prompt, blocks)

    def __init__(self, resolved: ResolvedScores, submission: Submission) -> None:
        super().__init__(resolved, submission)
        self._nodes: dict[tuple[Node, str], Node] = {}  # by parent and text, parents first
        assert isinstance(resolved.request, scores.ScoreRequest)
        self._request = resolved.request
        self._ends = [self._path_of(steps) for steps in self._request.solutions]
        self._reasons: dict[int, str] = {}  # by node
        self.meter.nodes = len(self._nodes)

    def _path_of(self, steps: Iterable[str]) -> Node:
        """The node of the last step of a solution; nodes of beginnings that solutions have in common are the same."""
        node = self._root
        for step in steps:
            if (child := self._nodes.get((node, step))) is None:
                path = *node.path, node.num_children
                child = self._nodes[node, step] = Node(len(self._nodes) + 1, node, path, step)
                node.num_children += 1
            node = child
        return node

    def _begin(self) -> None:
        super()._begin()
        if self.result is not None:
            return
        for node in self._nodes.values():
            self._hold(node)
        self._last = True
        self._hand_in()
        for node in self._nodes.values():
            self._release(node)  # once the steps behind it are being read
        self._end_if_complete()

    def _handed_in(self, node: Node) -> Iterable[StepScore]:
        wanted = self._scorer.needs.scores != "answers" or node in self._ends
        return self._session.want(node) if wanted else self._session.skip(node)

    def _report(self) -> None:
        found, self._scored = self._scored, []
        self._reasons |= {each.node: each.reason for each in found if each.reason}

    def stop(self, reason: StopReason) -> None:
        """See `Running`; steps that are not scored yet have no score."""
        if self._budget_left < 0:
            self._reasons = {node.node_id: OVER_BUDGET for node in self._nodes.values()}
        super().stop(reason)

    def _own_fields(self) -> dict[str, Any]:
        self._report()
        return {"solutions": tuple(map(self._solution, self._ends)), **super()._own_fields()}

    def _solution(self, end: Node) -> scores.SolutionScores:
        steps = end.lineage()
        found = tuple(step.score for step in steps)
        needed = found[-1:] if self._scorer.needs.scores == "answers" else found
        reason = next((self._reasons[step.node_id] for step in steps if step.node_id in self._reasons), "")
        if None in needed:
            return scores.SolutionScores(None, found, reason or "there was no time to score it")
        return scores.SolutionScores(aggregate(end.step_scores(), self._request.aggregation), found)
