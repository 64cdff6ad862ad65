"""Has the steps of a tree scored, and says why a path ends that has no score."""

from collections.abc import Iterable, Sequence

from espalier.engine.work import Done
from espalier.prm.limits import UNLIMITED
from espalier.prm.scorer import ScoredSearch, ScoreSession, ScoreStatus, StepScore, steps_with_text
from espalier.search.algorithms.base import viable
from espalier.search.growth.policies import Branch, PathPolicy, PolicyContext
from espalier.search.tree import Node, Termination


class TreeScores:
    """The scores of one search.

    Attributes:
        session: scores its steps; one that scores nothing until `begin`, and after `abandon`.
    """

    def __init__(self, context: PolicyContext) -> None:
        self.session = ScoreSession()
        self._context = context
        self._meter = context.meter
        self._policies: Sequence[PathPolicy] = ()

    def begin(self, root: Node, salt: bytes, policies: Sequence[PathPolicy]) -> None:
        """Open the problem's sequence, and queue its computation if the budget covers it."""
        context, resolved = self._context, self._context.resolved
        self._policies = policies
        if context.scorer:
            self.session = context.scorer.begin(
                ScoredSearch(
                    context.engine,
                    context.owner,
                    root,
                    resolved.request.problem_text,
                    resolved.verifier_prompt,
                    salt,
                    resolved.request.seed,
                    resolved.verifier_limits,
                    self._verifier_left,
                    sampled=True,
                    score_final_only=resolved.score_final_only,
                )
            )
        root.verifier_tokens = self.session.prompt_tokens
        self._meter.verifier_tree_tokens += self.session.prompt_tokens
        if self._verifier_left(root) >= 0:
            self.session.prefill()

    def wants(self, node: Node) -> bool:
        """Return whether a node is to be scored: steps without text, and steps that were cut off, are not."""
        if self._context.resolved.score_final_only:
            return node.complete
        return bool(node.text.strip()) and viable(node)

    def hand_in(self, branch: Branch) -> Iterable[StepScore]:
        """Have a node scored, or skipped if it gets no score; returns what is known now."""
        node = branch.node
        return self.session.want(node, branch.alone) if self.wants(node) else self.session.skip(node)

    def take(self, done: Done) -> Iterable[StepScore]:
        """Process finished work of the scorer.

        Raises:
            ScoreMismatchError: the full-rescore check found a different score.
        """
        if not self.session.is_check(done):
            self._meter.verifier_tokens += done.computed_tokens
        return self.session.take(done)

    def why_unscored(self, node: Node, status: ScoreStatus | None = None) -> Termination:
        """The termination of a path whose last step was reported with `status`, or has an earlier one without score."""
        why = (policy.why_unscored(node, status) for policy in self._policies)
        return next(filter(None, why), Termination.LENGTH)

    def lacks(self, branch: Branch) -> bool:
        """Return whether a complete independent path lacks a score that its vote needs."""
        if not (self._context.scorer and branch.to_end and branch.node.complete):
            return False
        read = [branch.node] if self._context.resolved.score_final_only else steps_with_text(branch.node)
        return any(step.score is None for step in read)

    def abandon(self) -> None:
        """Leave everything as it is, after an error; the engine takes back what the session held."""
        self.session = ScoreSession()

    def _verifier_left(self, node: Node) -> int:
        return min((policy.verifier_left(node) for policy in self._policies), default=UNLIMITED)
