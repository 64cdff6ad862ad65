"""Expands the tree of one search: samples the requested steps and has each of them scored."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from espalier.engine.engine import Engine, Footprint
from espalier.engine.errors import ScoreMismatchError
from espalier.engine.guidance.grammar import Grammar
from espalier.engine.guidance.matcher import Matcher
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.roles import GENERATOR
from espalier.engine.work import NO_MARKS, Done, Generate, Generated, PathStreams, StopCause
from espalier.prm.scorer import ScoredSearch, Scorer, ScorerNeeds, ScoreSession, ScoreStatus, StepScore, steps_with_text
from espalier.search.algorithms import needs_verifier, stops_early, unused_fields
from espalier.search.algorithms.base import Expand, viable
from espalier.search.form import answer_in
from espalier.search.grading.boxes import boxed
from espalier.search.loops import LONGEST_LOOP, is_degenerate
from espalier.search.result import Candidate
from espalier.search.run.executor import ResolvedRequest, sampling_of
from espalier.search.run.path_thoughts import PathThoughts, Writing
from espalier.search.run.probes import AnswerProbes, RunningProbe
from espalier.search.run.usage import Budget, UsageMeter
from espalier.search.step_rule import PARAGRAPH, read_step_rule
from espalier.search.thoughts.reading import IN_ANSWER, Position
from espalier.search.thoughts.stop_rule import read_stop_rule
from espalier.search.tree import HostText, Node, Probe, Termination
from espalier.search.unsure_rule import read_unsure_rule
from espalier.search.voting.decided import make_gate
from espalier.search.voting.unsure import ConfidenceBar

_BLANK_LINES = re.compile(r"\n\s*\n")
_PEAK_LOOKS = 16
"""Times in a round of whole paths that memory is looked at: before paths end, as each gives its own back."""


@dataclass(slots=True, eq=False)
class NodeState:
    """The generator sequence of a node, and how far it is.

    `to_end` is set for steps of independent paths. `scored` is False until the node's score is known, or that it has
    none. `expected` is the number of children still being sampled, `position` where the path is between thought and
    answer, `streams` the randomness of its children, `matcher` what they may write; None where they may write anything,
    or an answer begins.
    """

    to_end: bool
    streams: PathStreams
    generator: KVSequence | None = None
    scored: bool = False
    expected: int = 0
    position: Position = IN_ANSWER
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class PendingExpansion:
    """The purpose of a piece of generator work: the node, the index of its first child, and options of the request.

    `round_root` is the node at which the round started; the path's share of the budgets counts from there.
    """

    node: Node
    first_child: int
    to_end: bool
    greedy: bool
    round_root: Node


class TreeExpander:
    """Expands the nodes of a search; holds their generator sequences, and the session that scores them.

    A round starts with the algorithm's expansions and ends when `outstanding` is 0; every sampled step then has a score
    or is known to have none.

    Attributes:
        nodes: all nodes in order of creation, the root first.
        settled: nodes finished in this round, in order of completion.
        sampled_from: nodes with children, not counting rollouts.
    """

    def __init__(
        self,
        owner: str,
        resolved: ResolvedRequest,
        salt: bytes,
        engine: Engine,
        scorer: Scorer | None,
        meter: UsageMeter,
        on_complete: Callable[[Node], Candidate],
        matchers: Mapping[Grammar, Matcher] = MappingProxyType({}),
    ) -> None:
        """Create the root of a tree.

        Args:
            owner: of its work.
            resolved: the request.
            salt: of cached prefixes.
            engine: runs the models.
            scorer: of steps; None if there is none.
            meter: of what is spent.
            on_complete: called with every complete path once it has its score.
            matchers: what binds the paths, once the tree is opened.
        """
        self.root = Node(0, None, ())
        self.nodes: list[Node] = [self.root]
        self.settled: list[Node] = []
        self.sampled_from: set[Node] = set()
        self._resolved = resolved
        self._request = resolved.request
        self._sampling = sampling_of(resolved.request, resolved.generator_limits.prompt_tokens)
        self._owner = owner
        self._salt = salt
        self._engine = engine
        self._scorer = scorer if needs_verifier(resolved.request) else None
        self._session = ScoreSession()
        self._meter = meter
        self._rule = read_step_rule(resolved.request.step_rule)
        self._thoughts = None
        if resolved.thoughts:
            stop = read_stop_rule(resolved.request.stop_when) if resolved.request.stop_when else None
            model = engine.model(GENERATOR)
            self._thoughts = PathThoughts(resolved.thoughts, stop, model.tokenizer, model.eos_token_ids)
        self._matchers = matchers
        self._guide: Matcher | None = None  # at the beginning of an answer
        self._failures: dict[str, int] = {}  # paths that ended with an error, by its text
        self._probes: AnswerProbes | None = None
        self._held: dict[Node, tuple[Expand, Node, bool]] = {}  # by the node whose probe they wait for, see `_generate`
        needs = self._scorer.needs if self._scorer else ScorerNeeds()
        self._scores_probes = needs.reads == "probes"
        self._merges_texts = resolved.request.merge_duplicates and needs.merges == "text"
        self._unscored: dict[Node, bool] = {}  # nodes that are to be scored once probed, by `in_place` of `want`
        self._on_complete = on_complete
        verifies = resolved.verifier_limits is not None or bool(needs.question_lengths)
        self._budget = Budget(resolved.request, meter, verifies)
        self._gate = make_gate(resolved.request, self._scorer is not None) if stops_early(resolved.request) else None
        unsure = resolved.request.stop_unsure if "stop_unsure" not in unused_fields(resolved.request) else ""
        self._bar = ConfidenceBar(read_unsure_rule(unsure)) if unsure else None
        by_confidence = resolved.request.vote is not None and resolved.request.vote.reads_confidence
        self._keeps_log_probabilities = by_confidence or self._bar is not None
        self._unfinished = 0  # children requested in this round
        self._ended, self._look_every = 0, 1  # paths of this round that ended; before which ends memory is looked at
        self._waiting: dict[Node, PendingExpansion] = {}  # paths that wait at the gate, by what sampled their last step
        self._states: dict[Node, NodeState] = {}
        self._siblings: dict[tuple[Node, str, Termination | None, Position, HostText], Node] = {}

    @property
    def outstanding(self) -> int:
        """Children requested in this round that are not finished, and scores that are still being checked."""
        return self._unfinished + self._session.pending

    def open(self) -> None:
        """Open the root's sequences, and queue the problem's verifier prefill if the budget covers it."""
        if grammar := self._resolved.grammar:
            self._guide = self._matchers[grammar]
        if self._resolved.probes:
            matcher = self._matchers[grammar] if (grammar := self._resolved.probe_grammar) else None
            self._probes = AnswerProbes(self._engine, self._owner, self._resolved, matcher)
        start = self._thoughts.start if self._thoughts else IN_ANSWER
        request, resolved, salt = self._request, self._resolved, self._salt
        streams = PathStreams(request.seed, request.problem)
        root = self._states[self.root] = NodeState(False, streams, scored=True, position=start)
        root.generator = self._engine.open(GENERATOR, list(resolved.generator_prompt), salt, self._owner)
        self._meter.generator_tree_tokens += len(resolved.generator_prompt)
        if self._scorer:
            self._session = self._scorer.begin(
                ScoredSearch(
                    self._engine,
                    self._owner,
                    self.root,
                    request.problem_text,
                    resolved.verifier_prompt,
                    salt,
                    request.seed,
                    resolved.verifier_limits,
                    self._budget.verifier_left,
                    sampled=True,
                    score_final_only=resolved.score_final_only,
                )
            )
        self.root.verifier_tokens = self._session.prompt_tokens
        self._meter.verifier_tree_tokens += self._session.prompt_tokens
        if self._budget.covers_the_problem:
            self._session.prefill()

    def begin_round(self, asked: Sequence[Expand]) -> bool:
        """Start sampling the expansions; returns False, without sampling, if the budgets lack a token for each path."""
        if self._bar:
            self._bar.begin_round()
        self._unfinished = sum(expand.children for expand in asked)
        self._ended, self._look_every = 0, max(1, self._unfinished // _PEAK_LOOKS)
        if not self._budget.split(self._unfinished):
            return False
        for expand in asked:
            self._generate(expand, expand.node)
        return True

    def handle(self, done: Done) -> None:
        """Process one piece of finished engine work."""
        if isinstance(done.work.tag, PendingExpansion):
            assert isinstance(done, Generated)
            self._count(done)
            self._on_generated(done, done.work.tag)
        elif isinstance(done.work.tag, RunningProbe):
            assert isinstance(done, Generated)
            self._count(done)
            self._on_probed(done, done.work.tag.node)
        else:
            self._on_scoring(done)
        if self._waiting:
            self._pass_gate()

    def footprint(self) -> Footprint:
        """The KV blocks that the tree holds now."""
        held = [state.generator for state in self._states.values() if state.generator is not None]
        probed = self._probes.sequences if self._probes else []
        return self._engine.footprint(held + self._session.sequences() + probed)

    def end_round(self, kept: Collection[Node]) -> None:
        """Release the nodes that the algorithm does not keep, and prepare the next round."""
        self.settled = []
        self._siblings.clear()
        self.keep(kept)

    def keep(self, kept: Collection[Node]) -> None:
        """Release the sequences of all nodes but `kept`; complete paths are released too."""
        for node in list(self._states):
            if node not in kept or not node.open:
                self._release(node)

    def stop(self, mark: Termination) -> None:
        """Cancel all work, release all sequences, and set `mark` as the termination of unfinished nodes."""
        self._engine.cancel(self._owner)
        self._session.close()
        if self._probes:
            self._probes.close()
        self._cut_off(mark)
        self.keep(())

    def abandon(self) -> None:
        """Like `stop`, after an error: also releases untracked sequences; results that arrive later are ignored."""
        self._session = ScoreSession()
        self._engine.abandon(self._owner)
        self._cut_off(Termination.CANCELLED)
        self._states.clear()

    def _cut_off(self, mark: Termination) -> None:
        for node in self._states:
            if node.open and node is not self.root:
                node.termination = mark

    def _generate(self, expand: Expand, round_root: Node, in_place: bool = False) -> None:
        """Sample the children of an expansion, once its node is probed if that is due."""
        node, state = expand.node, self._states[expand.node]
        answers = not (expand.greedy or node.rollout)
        if self._probed_now(node, round_root, starts=answers):
            state.expected += expand.children
            self._held[node] = expand, round_root, in_place
        else:
            self._sample(expand, round_root, in_place)

    def _probed_now(self, node: Node, round_root: Node, starts: bool) -> bool:
        """Return whether a node is being probed; where it `starts` that, from now on, if it is due."""
        if self._probes is None or self._probes.runs(node):
            return self._probes is not None
        state, left = self._states[node], self._budget.generator_left(node, round_root)
        opening = self._probes.opening(node, state.position.inside, left) if starts else ()
        if not opening:
            return False
        assert state.generator is not None, "the node's generator sequence was released"
        self._probes.start(node, state.generator, opening)
        return True

    def _on_probed(self, done: Generated, node: Node) -> None:
        assert self._probes is not None, "only its own probes are processed"
        if (probe := self._probes.take(done)) is None:
            return
        node.probe = probe
        for name in ("probe_tokens", "generated_tokens", "generator_tree_tokens", "generator_unshared_tokens"):
            setattr(self._meter, name, getattr(self._meter, name) + probe.tokens)
        if node in self._unscored:
            self._on_scores(self._session.want(node, self._unscored.pop(node)))
        if held := self._held.pop(node, None):
            self._resume(*held)

    def _resume(self, expand: Expand, round_root: Node, in_place: bool) -> None:
        """Sample the children of a node that is probed; its thought is closed before if its probes agree."""
        node, state = expand.node, self._states[expand.node]
        state.expected -= expand.children
        if self._thoughts:
            self._write(node, state, self._thoughts.once_probed(node, state.position))
        self._sample(expand, round_root, in_place)

    def _sample(self, expand: Expand, round_root: Node, in_place: bool) -> None:
        node, work = expand.node, self._work(expand, round_root, in_place)
        node.num_children += expand.children
        self._states[node].expected += expand.children
        if not expand.greedy:
            self.sampled_from.add(node)
        self._engine.submit(work)

    def _work(self, expand: Expand, round_root: Node, in_place: bool) -> Generate:
        """The work that samples the children of an expansion."""
        node, request = expand.node, self._request
        state, first, end = self._states[node], node.num_children, node.num_children + expand.children
        assert state.generator is not None, "the node's generator sequence was released"
        banned = self._thoughts.banned(state.position) if self._thoughts else ()
        sampling = replace(self._sampling, temperature=0.0) if expand.greedy else self._sampling
        samplings = tuple(replace(sampling, key=state.streams.child(i).key, banned=banned) for i in range(first, end))
        room = min(
            self._resolved.generator_limits.path_tokens - node.path_tokens(),
            self._budget.generator_left(node, round_root),
        )
        left, marks = min(room, request.max_step_tokens or room), NO_MARKS
        if self._thoughts:
            marks = self._thoughts.step_marks(state.position)
            left = self._thoughts.step_room(state.position, node.path_tokens(), left)
        overrun = min(self._rule.overrun(self._thoughts is not None), room - left)
        expansion = PendingExpansion(node, first, expand.to_end, expand.greedy, round_root)
        how = {"in_place": in_place, "merge_equal": request.merge_duplicates, "head": self._session.head}
        how["matcher"] = self._matcher_at(state)
        how |= {"delimiter": self._rule.delimiter, "markers": self._rule.markers, "marks": marks, "overrun": overrun}
        return Generate(self._owner, state.generator, samplings, left, **how, tag=expansion)

    def _count(self, done: Generated) -> None:
        self._meter.generator_tokens += done.computed_tokens
        self._meter.drafted_tokens += done.drafted_tokens
        self._meter.accepted_tokens += done.accepted_tokens

    def _matcher_at(self, state: NodeState) -> Matcher | None:
        """The matcher of what comes behind a node; None within a thought. An answer may begin with one."""
        if self._guide is None or state.position.inside:
            return None
        if state.matcher is None:
            return self._thoughts.matcher(self._guide, state.position) if self._thoughts else self._guide
        return state.matcher

    @property
    def guidance_warnings(self) -> tuple[str, ...]:
        """Warnings of paths that ended because their matcher failed."""
        return tuple(f"{count} paths ended with an error: {error}." for error, count in self._failures.items())

    def _on_generated(self, done: Generated, expansion: PendingExpansion) -> None:
        parent, count = expansion.node, len(done.indices)
        above = self._states[parent]
        draws = tuple(expansion.first_child + i for i in done.indices)
        node = Node(len(self.nodes), parent, (*parent.path, draws[0]), draws=draws)
        node.rollout = expansion.greedy or parent.rollout
        node.text, node.num_tokens, node.log_probability = done.text, len(done.token_ids), done.log_probability
        node.own_tokens, node.multiplicity = done.own_tokens, count
        if self._keeps_log_probabilities:
            node.log_probabilities = tuple(done.log_probabilities)
        self.nodes.append(node)
        self._budget.begin(node, expansion.round_root)
        self._meter.note_step()
        self._meter.nodes += count
        self._meter.duplicates += count - 1
        self._meter.generated_tokens += count * node.num_tokens
        state = NodeState(expansion.to_end, above.streams.child(draws[0]), done.sequence, matcher=done.matcher)
        if self._thoughts:
            reading = self._thoughts.read(done.token_ids, above.position)
            node.text, node.thought_chars, state.position = reading.text, reading.thought_chars, reading.position
            if reading.position.closed and not above.position.closed:
                state.matcher = None  # an answer begins, whatever of its form the thought's marks have matched
        if done.cause is StopCause.ERROR and done.matcher:
            self._failures[done.matcher.error] = self._failures.get(done.matcher.error, 0) + count
        above.expected -= count
        if done.work.in_place:
            above.generator = None
        self._states[node] = state
        node.termination = self._termination(node, done.cause, expansion)
        if self._thoughts:
            self._write(node, state, self._thoughts.behind(node, state.position, above.position, done.cause))
        if self._bar and viable(node) and self._bar.drops(node):
            self._meter.stopped_paths += count if node.open else 0
            self._meter.stopped_tokens += self._bar.tokens_left(node) if node.open else 0
            node.termination = Termination.PRUNED
        to_score = self._has_score(node)
        if to_score:
            node.score = self._session.score_sampled(node, done)
        if not state.to_end:
            self._unfinished -= count - 1
            # Merge only equal terminations: the same text can be complete in one sample and cut off in another.
            alike = parent, node.text, node.termination, state.position, node.written
            if self._merges_texts and (kept := self._siblings.setdefault(alike, node)) is not node:
                self._merge(node, kept)
                return
        elif node.termination is None and self._gate:
            self._waiting[node] = expansion
        elif node.termination is None:
            self._go_on(node, expansion)
        alone = state.to_end and above.to_end and parent.multiplicity == 1
        if to_score and self._is_probed_first(node, expansion.round_root):
            self._unscored[node] = alone
        else:
            self._on_scores(self._session.want(node, alone) if to_score else self._session.skip(node))
        self._release_inner_node(parent)

    def _is_probed_first(self, node: Node, round_root: Node) -> bool:
        """Return whether a node's score waits for its probe; the answer of a complete path is as good as one."""
        if not self._scores_probes:
            return False
        if node.complete:
            answer = answer_in(node.answer_text(), self._request)
            node.probe = Probe(answer, float(bool(answer)), 0)
        return self._probed_now(node, round_root, starts=node.open)

    def _write(self, node: Node, state: NodeState, writing: Writing | None) -> None:
        """Write behind a step's tokens, if there is anything to write, so that its path goes on."""
        if writing is None:
            return
        if node.path_tokens() + len(writing.ids) >= self._resolved.generator_limits.path_tokens:
            node.termination = Termination.LENGTH  # it has thought again behind its first thought
            return
        assert state.generator is not None
        self._engine.append(state.generator, writing.ids, writing.instead_of)
        node.termination, node.written = None, HostText(writing.text, len(writing.ids))
        state.position, state.matcher = writing.position, None
        self._meter.appended_tokens += node.multiplicity * len(writing.ids)

    def _go_on(self, node: Node, expansion: PendingExpansion) -> None:
        """Sample the next step of independent paths that are one so far; `expansion` sampled their last."""
        expand = Expand(node, node.multiplicity, expansion.to_end, expansion.greedy)
        self._generate(expand, expansion.round_root, in_place=node.multiplicity == 1)

    def _pass_gate(self) -> None:
        """Let the paths go on that the gate lets pass; once the vote is decided, settle those that wait."""
        assert self._gate is not None
        for node in self._gate.release(self._waiting):
            self._go_on(node, self._waiting.pop(node))
        if self._gate.decided and not self._meter.stopped_paths:
            self._meter.stopped_paths = sum(node.multiplicity for node in self._waiting)
            self._meter.stopped_tokens = self._gate.tokens_left(self._waiting)
            for node in [node for node in self._waiting if self._states[node].scored]:
                self._settle(node)

    def _release_inner_node(self, node: Node) -> None:
        """Release the sequences of an inner node of independent paths once no child needs them."""
        state = self._states[node]
        if state.to_end and not state.expected and node not in self._waiting:
            self._release_sequences(node, state)

    def _release_sequences(self, node: Node, state: NodeState) -> None:
        if state.generator is not None:
            self._engine.release(state.generator)
            state.generator = state.matcher = None
        self._session.release(node)

    def _merge(self, duplicate: Node, kept: Node) -> None:
        """Merge a sibling with the same text and termination into the node that was there first.

        `kept` takes the lower path of the two and its sampled tokens, so that its descendants do not depend on which of
        them finished first.
        """
        if duplicate.path < kept.path:
            one, other = self._states[duplicate], self._states[kept]
            one.generator, other.generator = other.generator, one.generator
            one.streams, other.streams = other.streams, one.streams
            one.matcher, other.matcher = other.matcher, one.matcher
            of_tokens = () if duplicate.score is None else ("score",)  # others are of the text, which is the same
            for name in ("path", "num_tokens", "own_tokens", "log_probability", "log_probabilities", *of_tokens):
                mine, theirs = getattr(duplicate, name), getattr(kept, name)
                setattr(duplicate, name, theirs)
                setattr(kept, name, mine)
        kept.draws = tuple(sorted((*kept.draws, *duplicate.draws)))
        duplicate.termination = Termination.DUPLICATE
        kept.multiplicity += duplicate.multiplicity
        self._meter.duplicates += 1
        self._release(duplicate)
        self._unfinished -= 1

    def _termination(self, node: Node, cause: StopCause, expansion: PendingExpansion) -> Termination | None:
        position = self._states[node].position
        if cause is StopCause.ERROR:
            return Termination.ERROR
        if cause is StopCause.EOS:
            if self._thoughts and position.inside:
                goes_on = self._thoughts.forced and self._budget.generator_left(node, expansion.round_root) > 0
                return None if goes_on else Termination.UNCLOSED
            # An empty last step still completes the text before it.
            return Termination.EOS if node.path_text().strip() else Termination.DEGENERATE
        if self._request.end_at_box and not self._request.text_form and _ends_boxed(node):
            return Termination.BOXED
        if (cause is not StopCause.DELIMITER or expansion.to_end) and self._budget.generator_left(
            node, expansion.round_root
        ) <= 0:
            return Termination.BUDGET
        if cause is StopCause.CONTEXT or node.path_tokens() >= self._resolved.generator_limits.path_tokens:
            return Termination.LENGTH
        if self._request.max_steps is not None and node.depth >= self._request.max_steps:
            return Termination.LENGTH
        if cause is StopCause.MARK or (self._thoughts and position.inside and position.blank):
            return None  # blanks around marks are no step that says nothing
        return Termination.DEGENERATE if self._is_degenerate(node) else None

    def _is_degenerate(self, node: Node) -> bool:
        """Return whether a path goes round in circles: by its paragraphs, wherever its steps end."""
        texts = [step.text for step in node.lineage(LONGEST_LOOP)]
        if self._rule.delimiter == PARAGRAPH:
            return is_degenerate(texts)
        *whole, last = _BLANK_LINES.split("".join(texts).strip())
        return (bool(whole) and is_degenerate(whole)) or (bool(last) and is_degenerate([last]))

    def _has_score(self, node: Node) -> bool:
        """Return whether a node is to be scored: steps without text, and steps that were cut off, are not."""
        if self._resolved.score_final_only:
            return node.complete
        return bool(node.text.strip()) and viable(node)

    def _on_scoring(self, done: Done) -> None:
        if not self._session.is_check(done):
            self._meter.verifier_tokens += done.computed_tokens
        try:
            self._on_scores(self._session.take(done))
        except ScoreMismatchError:
            self.abandon()  # the same step's other results may be lost to the error
            raise

    def _on_scores(self, scores: Iterable[StepScore]) -> None:
        for step in scores:
            node: Node = step.node
            node.verifier_tokens += step.tokens
            self._meter.verifier_tree_tokens += step.tokens
            if node is self.root or step.status is ScoreStatus.PENDING:
                continue
            state = self._states[node]
            node.score, state.scored = step.score, True
            if step.status is ScoreStatus.OVER_BUDGET:
                self._budget.mark_exhausted(node)
            if step.status is not ScoreStatus.SCORED and not state.to_end:
                node.termination = self._budget.why_unscored(node)
            if state.to_end and node.termination is None:
                self._release_inner_node(node)
            decided_before = self._gate is not None and self._gate.decided and node in self._waiting
            if not state.to_end or node.termination is not None or decided_before:
                self._settle(node)

    def _settle(self, node: Node) -> None:
        """Count a node as finished: it is scored and, for independent paths, ended or stopped."""
        state = self._states[node]
        if self._scorer and state.to_end and node.complete:
            read = [node] if self._resolved.score_final_only else steps_with_text(node)
            if any(step.score is None for step in read):
                node.termination = self._budget.why_unscored(node)  # no score for this path
        self._unfinished -= node.multiplicity if state.to_end else 1
        self.settled.append(node)
        candidate = self._on_complete(node) if node.complete and not node.rollout else None
        if self._bar and candidate:
            self._bar.end(node)
        if self._gate and node.termination is not None:
            self._gate.end(node, candidate)
        if state.to_end and not node.open:
            if self._ended % self._look_every == 0:
                self._meter.observe(self.footprint())
            self._ended += 1
            self._release_sequences(node, state)

    def _release(self, node: Node) -> None:
        if state := self._states.pop(node, None):
            self._release_sequences(node, state)


def _ends_boxed(node: Node) -> bool:
    """Return whether a step ends the paragraph of a boxed answer, which may have begun in steps before it."""
    text, step = node.text[node.thought_chars :], node.parent
    if PARAGRAPH not in text:
        return False
    while step and (before := step.text[step.thought_chars :]) and PARAGRAPH not in before.lstrip():
        text, step = before + text, step.parent
    boxes = boxed(text)
    return bool(boxes.answer) and PARAGRAPH in text[boxes.last :]
