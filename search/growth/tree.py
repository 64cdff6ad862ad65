"""Grows the tree of one search: samples the steps that its algorithm asks for, and has each of them scored."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from espalier.engine.engine import Footprint
from espalier.engine.errors import ScoreMismatchError
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Done, Generate, Generated, PathStreams
from espalier.prm.limits import UNLIMITED
from espalier.prm.scorer import ScoredSearch, ScoreSession, ScoreStatus, StepScore, steps_with_text
from espalier.search.algorithms import stops_early, unused_fields
from espalier.search.algorithms.base import Expand, viable
from espalier.search.growth.endings import Endings
from espalier.search.growth.policies import (
    Branch,
    Draft,
    Expansion,
    InjectedText,
    Merging,
    PathPolicy,
    PolicyContext,
)
from espalier.search.result import Candidate
from espalier.search.run.resolve import sampling_of
from espalier.search.tree import HostText, Node, Termination


def make_policies(context: PolicyContext) -> list[PathPolicy]:
    """The policies of a search; modules of those that it does not need are not loaded."""
    resolved, policies = context.resolved, list[PathPolicy]()
    request, scorer, budget, thoughts = resolved.request, context.scorer, None, None
    if request.generator_budget is not None or request.verifier_budget is not None:
        from espalier.search.growth.budget import Budget

        verifies = resolved.verifier_limits is not None or (scorer is not None and bool(scorer.needs.question_lengths))
        policies.append(budget := Budget(request, context.meter, verifies))
    if stops_early(request):
        from espalier.search.growth.early_stop import EarlyStopping

        policies.append(EarlyStopping(request, scorer is not None, context.meter))
    if resolved.thoughts:
        from espalier.search.growth.thoughts import PathThoughts

        policies.append(thoughts := PathThoughts(context, resolved.thoughts, budget))
    if resolved.probes:
        from espalier.search.growth.probes import AnswerProbes

        policies.append(AnswerProbes(context, thoughts, budget))
    if resolved.grammar:
        from espalier.search.growth.forms import PathForms

        guide = context.matchers[resolved.grammar]
        if request.call_plan:
            guide = request.call_plan.guide(guide, context.engine.model(GENERATOR).tokenizer)
        policies.append(PathForms(guide, thoughts))
    unsure = request.stop_unsure.value if "stop_unsure" not in unused_fields(request) else None
    if unsure or (request.vote and request.vote.reads_confidence):
        from espalier.search.growth.confidence import ConfidenceFilter, LogProbabilities

        policies.append(ConfidenceFilter(unsure, context.meter) if unsure else LogProbabilities())
    if request.merge_duplicates and (scorer is None or scorer.needs.merges == "text"):
        policies.append(Merging(thoughts.position if thoughts else lambda _: None, context.meter))
    return policies


class SearchTree:
    """The tree of a search; holds the generator's sequences of its nodes, and the session that scores them.

    A round starts with the algorithm's expansions and ends when `outstanding` is 0; every sampled step then has a score
    or is known to have none. What else shapes its paths are its policies; see `policies`.

    Attributes:
        root: the root, which holds no text.
        nodes: all nodes in order of creation, the root first.
        settled: nodes finished in this round, in order of completion.
        sampled_from: nodes with children, not counting rollouts.
        policies: what shapes its paths, once it is opened.
    """

    def __init__(self, context: PolicyContext, salt: bytes, on_complete: Callable[[Node], Candidate]) -> None:
        """Create the root of a tree.

        Args:
            context: the search.
            salt: of cached prefixes.
            on_complete: called with every complete path once it has its score.
        """
        self.root = Node(0, None, ())
        self.nodes: list[Node] = [self.root]
        self.settled: list[Node] = []
        self.sampled_from: set[Node] = set()
        self._context = context
        self._engine, self._meter = context.engine, context.meter
        self._salt = salt
        self._on_complete = on_complete
        self._rule = context.resolved.request.step_rule.value
        self._endings = Endings(context.resolved, self._rule)
        self._sampling = sampling_of(context.resolved.request, context.resolved.generator_limits.prompt_tokens)
        self.policies: Sequence[PathPolicy] = ()
        self._session = ScoreSession()  # scores its steps; nothing before `open`, and after `abandon`
        self._branches: dict[Node, Branch] = {}
        self._unfinished = 0  # children requested in this round

    @property
    def outstanding(self) -> int:
        """Children requested in this round that are not finished, and scores that are still being checked."""
        return self._unfinished + self._session.pending

    def open(self) -> None:
        """Open the root's sequences, and queue the problem's verifier prefill if the budget covers it."""
        context, request = self._context, self._context.resolved.request
        self.policies = make_policies(context)
        for policy in self.policies:
            policy.tree = self
        prompt = list(context.resolved.generator_prompt)
        sequence = self._engine.open(GENERATOR, prompt, self._salt, context.owner)
        streams = PathStreams(request.seed, request.problem)
        self._branches[self.root] = Branch(self.root, False, streams, sequence)
        self._meter.generator_tree_tokens += len(prompt)
        if context.scorer:
            of_problem = request.problem_text, context.resolved.verifier_prompt, self._salt, request.seed
            bounds = context.resolved.verifier_limits, self._verifier_left
            how = {"sampled": True, "score_final_only": context.resolved.score_final_only}
            search = ScoredSearch(self._engine, context.owner, self.root, *of_problem, *bounds, **how)
            self._session = context.scorer.begin(search)
        self.root.verifier_tokens = self._session.prompt_tokens
        self._meter.verifier_tree_tokens += self._session.prompt_tokens
        if self._verifier_left(self.root) >= 0:
            self._session.prefill()

    def begin_round(self, asked: Sequence[Expand]) -> bool:
        """Start sampling the expansions; returns False, without sampling, if the budgets lack a token for each path."""
        self._unfinished = sum(expand.children for expand in asked)
        self._meter.begin_round(self._unfinished)
        if not all(policy.begin_round(self._unfinished) for policy in self.policies):
            return False
        for expand in asked:
            self.resume(Expansion(self._branches[expand.node], expand.children, expand.to_end, expand.greedy))
        return True

    def handle(self, done: Done) -> None:
        """Process one piece of finished engine work."""
        if isinstance(done, Generated) and isinstance(done.work.tag, Expansion):
            self._meter.count_sampled(done)
            self._on_sampled(done, done.work.tag)
        elif isinstance(done, Generated) and any(policy.take(done) for policy in self.policies):
            self._meter.count_sampled(done)
        else:
            try:
                if not self._session.is_check(done):
                    self._meter.verifier_tokens += done.computed_tokens
                self._on_scores(self._session.take(done))
            except ScoreMismatchError:
                self.abandon()  # the same step's other results may be lost to the error
                raise
        self.after_work()

    def after_work(self) -> None:
        """Tell the policies that a piece of work has been processed."""
        for policy in self.policies:
            policy.after_work()

    def footprint(self) -> Footprint:
        """The KV blocks that the tree holds now."""
        held = [branch.sequence for branch in self._branches.values() if branch.sequence is not None]
        of_policies = [sequence for policy in self.policies for sequence in policy.sequences()]
        return self._engine.footprint(held + self._session.sequences() + of_policies)

    def end_round(self, kept: Collection[Node]) -> None:
        """Release all nodes but those that the algorithm keeps; complete paths are released too."""
        self.settled = []
        for node in list(self._branches):
            if node not in kept or not node.open:
                self._release(self._branches.pop(node))

    def stop(self, mark: Termination) -> None:
        """Cancel all work, release all sequences, and set `mark` as the termination of unfinished nodes."""
        self._engine.cancel(self._context.owner)
        self._session.close()
        for policy in self.policies:
            policy.close()
        self._cut_off(mark)
        for branch in self._branches.values():
            self._release(branch)
        self._branches.clear()

    def abandon(self) -> None:
        """Like `stop`, after an error: also releases untracked sequences; results that arrive later are ignored."""
        self._session = ScoreSession()  # the engine takes back what it held
        self._engine.abandon(self._context.owner)
        self._cut_off(Termination.CANCELLED)
        self._branches.clear()

    def _cut_off(self, mark: Termination) -> None:
        for node in self._branches:
            if node.open and node is not self.root:
                node.termination = mark

    # ---- one step

    def resume(self, expansion: Expansion) -> None:
        """Sample the children of an expansion, or go on with that, unless one more policy holds it back."""
        branch = expansion.branch
        branch.held = expansion
        for policy in self.policies[expansion.passed :]:
            expansion.passed += 1
            if policy.holds(expansion):
                return
        branch.held = None
        self._sample(expansion)

    def _sample(self, expansion: Expansion) -> None:
        branch, node, resolved = expansion.branch, expansion.branch.node, self._context.resolved
        assert branch.sequence is not None, "the node's generator sequence was released"
        room = resolved.generator_limits.path_tokens - node.path_tokens()
        draft = Draft(room, resolved.request.max_step_tokens or room, self._rule.overrun(False))
        for policy in self.policies:
            policy.shape(expansion, draft)
        max_tokens = min(draft.max_tokens, draft.room)
        first = expansion.first_child = node.num_children
        node.num_children = end = first + expansion.children
        sampling = replace(self._sampling, temperature=0.0) if expansion.greedy else self._sampling
        keys = [branch.streams.child(index).key for index in range(first, end)]
        branch.expected += expansion.children
        if not expansion.greedy:
            self.sampled_from.add(node)
        self._engine.submit(
            Generate(
                self._context.owner,
                branch.sequence,
                tuple(replace(sampling, key=key, banned=draft.banned) for key in keys),
                max_tokens,
                delimiter=self._rule.delimiter,
                markers=self._rule.markers,
                marks=draft.marks,
                overrun=min(draft.overrun, draft.room - max_tokens),
                in_place=expansion.continues and expansion.children == 1,
                merge_equal=resolved.request.merge_duplicates,
                head=self._session.head,
                matcher=draft.matcher,
                tag=expansion,
            )
        )

    def _on_sampled(self, done: Generated, expansion: Expansion) -> None:
        parent, count = expansion.branch, len(done.indices)
        node = _new_node(len(self.nodes), done, expansion)
        self.nodes.append(node)
        self._meter.add_node(node)
        streams = parent.streams.child(node.draws[0])
        branch = self._branches[node] = Branch(node, expansion.to_end, streams, done.sequence, done.matcher)
        branch.alone = expansion.to_end and parent.to_end and parent.node.multiplicity == 1
        for policy in self.policies:
            policy.sampled(branch, done)
        parent.expected -= count
        if done.work.in_place:
            parent.sequence = None
        node.termination = self._endings.of(node, done.cause)
        for policy in self.policies:
            if injected := policy.grown(branch, done):
                self.write(branch, injected)
        if self._wants(node):
            node.score = self._session.score_sampled(node, done)
        if not branch.to_end:
            self._unfinished -= count - 1
            if any(policy.merges(branch) for policy in self.policies):
                self._unfinished -= 1
                self._release(self._branches.pop(node))
                return
        elif node.open:
            self.resume(Expansion(branch, node.multiplicity, True, expansion.greedy, continues=True))
        self.score(branch)
        self._release_inner(parent)

    def write(self, branch: Branch, injected: InjectedText) -> None:
        """Write text behind a step's tokens, so that its path goes on; it ends where it has no room for more."""
        node, tokens = branch.node, len(injected.token_ids)
        if node.path_tokens() + tokens >= self._context.resolved.generator_limits.path_tokens:
            node.termination = Termination.LENGTH  # it has thought again behind its first thought
            return
        assert branch.sequence is not None
        self._engine.append(branch.sequence, injected.token_ids, injected.replaces)
        node.termination, node.written = None, HostText(injected.text, tokens)
        branch.matcher = None
        self._meter.appended_tokens += node.multiplicity * tokens

    # ---- scores

    def score(self, branch: Branch) -> None:
        """Have a node scored, or skipped if it gets no score, unless one more policy holds that back."""
        node, session = branch.node, self._session
        if not self._wants(node):
            self._on_scores(session.skip(node))
            return
        for policy in self.policies[branch.passed :]:
            branch.passed += 1
            if policy.holds_score(branch):
                return
        self._on_scores(session.want(node, branch.alone))

    def _verifier_left(self, node: Node) -> int:
        return min((policy.verifier_left(node) for policy in self.policies), default=UNLIMITED)

    def _wants(self, node: Node) -> bool:
        """Return whether a node is to be scored: steps without text, and steps that were cut off, are not."""
        if self._context.resolved.score_final_only:
            return node.complete
        return bool(node.text.strip()) and viable(node)

    def _why_unscored(self, node: Node, status: ScoreStatus | None = None) -> Termination:
        """The termination of a path whose last step was reported with `status`, or has an earlier one without score."""
        why = (policy.why_unscored(node, status) for policy in self.policies)
        return next(filter(None, why), Termination.LENGTH)

    def _lacks_score(self, branch: Branch) -> bool:
        """Return whether a complete independent path lacks a score that its vote needs."""
        if not (self._context.scorer and branch.to_end and branch.node.complete):
            return False
        read = [branch.node] if self._context.resolved.score_final_only else steps_with_text(branch.node)
        return any(step.score is None for step in read)

    def _on_scores(self, scores: Iterable[StepScore]) -> None:
        for step in scores:
            node: Node = step.node
            node.verifier_tokens += step.tokens
            self._meter.verifier_tree_tokens += step.tokens
            if node is self.root or step.status is ScoreStatus.PENDING:
                continue
            branch = self._branches[node]
            node.score, branch.scored = step.score, True
            if step.status is not ScoreStatus.SCORED:
                why = self._why_unscored(node, step.status)
                node.termination = node.termination if branch.to_end else why
            if not branch.to_end or node.termination is not None:
                self.settle(branch)
            else:
                self._release_inner(branch)

    def settle(self, branch: Branch) -> None:
        """Count a node as finished: it is scored and, for independent paths, ended or stopped."""
        node = branch.node
        if self._lacks_score(branch):
            node.termination = self._why_unscored(node)
        self._unfinished -= node.multiplicity if branch.to_end else 1
        self.settled.append(node)
        candidate = self._on_complete(node) if node.complete and not node.rollout else None
        for policy in self.policies:
            policy.settled(branch, candidate)
        if branch.to_end and not node.open:
            self._meter.path_ended(self.footprint)
            self._release(branch)

    def _release_inner(self, branch: Branch) -> None:
        """Release the sequences of an inner node of independent paths once no child needs them."""
        if branch.to_end and not branch.expected and not branch.held:
            self._release(branch)

    def _release(self, branch: Branch) -> None:
        if branch.sequence is not None:
            self._engine.release(branch.sequence)
            branch.sequence = branch.matcher = None
        self._session.release(branch.node)


def _new_node(node_id: int, done: Generated, expansion: Expansion) -> Node:
    """The node of a step that was sampled."""
    parent, draws = expansion.branch.node, tuple(expansion.first_child + index for index in done.indices)
    return Node(
        node_id,
        parent,
        (*parent.path, draws[0]),
        done.text,
        len(done.token_ids),
        done.own_tokens,
        log_probability=done.log_probability,
        multiplicity=len(draws),
        draws=draws,
        rollout=expansion.greedy or parent.rollout,
    )
