"""A request for scores from submission to result: solutions as a tree, each step of which is read once."""

from abc import abstractmethod
from collections.abc import Iterable

from espalier.engine.roles import VERIFIER
from espalier.engine.work import Done
from espalier.prm.limits import UNLIMITED, PathLimits
from espalier.prm.scorer import ScoredSearch, ScoreSession, ScoreStatus, StepScore
from espalier.search.algorithms.base import MemoryEstimate
from espalier.search.result import StopReason
from espalier.search.run.executor import ResolvedScores
from espalier.search.run.resolve import Resolver
from espalier.search.run.running import Running, Submission
from espalier.search.run.worst_case import worst_case
from espalier.search.scores import ScoreRequest, ScoreResult, SolutionScores
from espalier.search.tree import Node, aggregate

OVER_BUDGET = "verifier_budget is used up"


class RunningScoring(Running[ResolvedScores, ScoreResult]):
    """Base of scoring given steps, whether they come at once or one after another."""

    def __init__(self, resolved: ResolvedScores, submission: Submission) -> None:
        super().__init__(resolved, submission)
        assert submission.scorer, "requests for scores are resolved with a scorer alone"
        self._scorer = submission.scorer
        self._root = Node(0, None, ())
        self._session = ScoreSession()
        self._exhausted = False  # whether a step was left out for the budget

    def _begin(self) -> None:
        request = self.resolved.request
        scored = ScoredSearch(
            self._engine,
            self.search_id,
            self._root,
            request.problem_text,
            self.resolved.verifier_prompt,
            self.options.salt,
            request.seed,
            budget=self._tokens_left,
            score_final_only=self._scorer.needs.scores == "answers",
        )
        self._session = self._scorer.begin(scored)
        self.meter.verifier_tree_tokens += self._session.prompt_tokens
        if self._budget_left < 0:
            self.stop(StopReason.BUDGET)
            return
        self._session.prefill()
        self._begin_steps()

    @abstractmethod
    def _begin_steps(self) -> None:
        """Hand in the steps that are known."""

    @abstractmethod
    def _on_step(self, step: StepScore) -> None:
        """Store the score of a step, or that it has none."""

    @abstractmethod
    def _end_if_complete(self) -> None:
        """Finish if nothing is left to be scored."""

    def handle(self, done: Done) -> None:
        """See `Running`."""
        if not self._session.is_check(done):
            self.meter.verifier_tokens += done.computed_tokens
        self._on_scores(self._session.take(done))
        self.meter.observe(self._engine.footprint(self._session.sequences()))
        self._end_if_complete()

    def stop(self, reason: StopReason) -> None:
        """See `Running`; steps that are not scored yet have no score."""
        self._close()
        self._end(reason)

    @property
    def _budget_left(self) -> int:
        budget = self.resolved.request.verifier_budget
        return UNLIMITED if budget is None else budget - self.meter.verifier_tree_tokens

    def _tokens_left(self, node: Node) -> int:
        """Verifier tokens that a node's step may use."""
        return self._budget_left

    def _on_scores(self, scores: Iterable[StepScore]) -> None:
        """Store scores, one at a time: the next may depend on it."""
        for step in scores:
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

    def _end(self, reason: StopReason, error: str = "") -> None:
        self.end_with(
            ScoreResult(
                search_id=self.search_id,
                solutions=self._solutions(),
                stop_reason=reason,
                usage=self.meter.close(),
                configuration=self.resolved.request,
                scorer=self._scorer.identity,
                digests=self.digests,
                error=error,
            )
        )

    def _solutions(self) -> tuple[SolutionScores, ...]:
        """The scores of the solutions of a request that has any."""
        return ()


class RunningScores(RunningScoring):
    """The scores of solutions that are known from the beginning."""

    @classmethod
    def resolve(cls, resolver: Resolver, request: ScoreRequest) -> ResolvedScores:
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
        assert isinstance(resolved.request, ScoreRequest)
        self._request = resolved.request
        self._ends = [self._path_of(steps) for steps in self._request.solutions]
        self._reasons: dict[Node, str] = {}
        self._left = len(self._nodes)  # steps that are not scored yet
        self.meter.nodes = len(self._nodes)

    def _path_of(self, steps: Iterable[str]) -> Node:
        """The node of the last step of a solution; nodes of beginnings that solutions have in common are the same."""
        node = self._root
        for step in steps:
            if (child := self._nodes.get((node, step))) is None:
                child = self._nodes[node, step] = Node(
                    len(self._nodes) + 1, node, (*node.path, node.num_children), text=step
                )
                node.num_children += 1
            node = child
        return node

    def _begin_steps(self) -> None:
        answers = set(self._ends) if self._scorer.needs.scores == "answers" else None
        for node in self._nodes.values():
            wanted = answers is None or node in answers
            self._on_scores(self._session.want(node) if wanted else self._session.skip(node))
        for node in self._nodes.values():
            self._session.release(node)  # once the steps behind it are being read
        self._end_if_complete()

    def stop(self, reason: StopReason) -> None:
        """See `Running`; steps that are not scored yet have no score."""
        if self._budget_left < 0:
            self._reasons = dict.fromkeys(self._nodes.values(), OVER_BUDGET)
        super().stop(reason)

    def _on_step(self, step: StepScore) -> None:
        if step.status is ScoreStatus.PENDING:
            return
        self._left -= 1
        step.node.score = step.score
        if step.status is ScoreStatus.OVER_BUDGET:
            self._reasons[step.node], self._exhausted = OVER_BUDGET, True
        elif step.reason:
            self._reasons[step.node] = step.reason

    def _end_if_complete(self) -> None:
        if not self._left and not self._session.pending:
            self._finish()

    def _solutions(self) -> tuple[SolutionScores, ...]:
        return tuple(map(self._solution, self._ends))

    def _solution(self, end: Node) -> SolutionScores:
        steps = end.lineage()
        scores = tuple(step.score for step in steps)
        needed = scores[-1:] if self._scorer.needs.scores == "answers" else scores
        reason = next((self._reasons[step] for step in steps if step in self._reasons), "")
        if None in needed:
            return SolutionScores(None, scores, reason or "there was no time to score it")
        return SolutionScores(aggregate(end.step_scores(), self._request.aggregation), scores)
