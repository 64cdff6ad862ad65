r"""Answer probes: on a fork of a path's sequence the host opens a box, and reads what the model writes into it.

The path's own sequence stays as it is, so the path goes on to the bit as if nobody had asked. Probes take the likeliest
tokens under the penalties of the path, and draw nothing; the engine batches them with all other work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from espalier.engine.guidance.matcher import Matcher
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.work import Done, Generate, Generated, Sampling, StepMarks, StopCause
from espalier.prm.limits import UNLIMITED
from espalier.prm.scorer import ScoredSearch, Scorer, ScorerNeeds, ScoreSession, StepNode, StepScore
from espalier.search.common_fields import answer_in
from espalier.search.grading.answers import content_before_brace, exact_match_key
from espalier.search.growth.policies import Branch, Expansion, PathPolicy, PolicyContext
from espalier.search.rules import PARAGRAPH
from espalier.search.run.resolve import penalties_of
from espalier.search.thoughts.plans import PROBE_ANSWER_TOKENS
from espalier.search.tree import Node, Probe

if TYPE_CHECKING:
    from espalier.search.growth.budget import Budget
    from espalier.search.growth.thoughts import PathThoughts

_AT_BRACE = StepMarks(end_text="}")


@dataclass(slots=True, eq=False)
class RunningProbe:
    """A probe that is being sampled: the purpose of its work.

    Attributes:
        branch: the node at whose end it reads.
        opening: number of tokens that the host wrote.
        text: what the model has written so far.
        log_probabilities: of its tokens.
        matcher: what it may write next; None for anything.
    """

    branch: Branch
    opening: int
    text: str = ""
    log_probabilities: list[float] = field(default_factory=list)
    matcher: Matcher | None = None


class AnswerProbes(PathPolicy):
    """The probes of one search; owns their sequences."""

    def __init__(self, context: PolicyContext, thoughts: PathThoughts | None, budget: Budget | None) -> None:
        """Probe the paths of a search.

        Args:
            context: the search; the form of its answers says what may stand in a box, up to its closing brace.
            thoughts: of its paths, which a probe may close.
            budget: of its tokens, which probes take their share of.
        """
        resolved = context.resolved
        assert resolved.probes
        form = resolved.request.answer_form.value
        self._engine, self._owner, self._meter = context.engine, context.owner, context.meter
        self._request, self._plan = resolved.request, resolved.probes
        self._thoughts, self._budget = thoughts, budget
        self._matcher = context.matchers[resolved.probe_grammar] if resolved.probe_grammar else None
        self._read = form.content_before_brace if form else content_before_brace
        self._prompt_tokens = resolved.generator_limits.prompt_tokens
        self._sampling = Sampling(0.0, penalties=penalties_of(resolved.request, self._prompt_tokens))
        self._decides_scores = context.scorer is not None and context.scorer.needs.reads == "probes"
        self._unscored: set[Node] = set()  # nodes that are scored once they are probed
        self._held: dict[Node, Expansion] = {}  # children that are sampled once their node is probed
        self._running: dict[RunningProbe, KVSequence] = {}

    def sequences(self) -> list[KVSequence]:
        """See `PathPolicy`."""
        return list(self._running.values())

    def holds(self, expansion: Expansion) -> bool:
        """See `PathPolicy`; a node is probed before its children are sampled."""
        answers = not (expansion.greedy or expansion.branch.node.rollout)
        if not self._probed_now(expansion.branch, starts=answers):
            return False
        self._held[expansion.branch.node] = expansion
        return True

    def holds_score(self, branch: Branch) -> bool:
        """See `PathPolicy`; the answer of a complete path is as good as a probe."""
        node = branch.node
        if not self._decides_scores:
            return False
        if node.complete:
            answer = answer_in(node.answer_text(), self._request)
            node.probe = Probe(answer, float(bool(answer)), 0)
        if not self._probed_now(branch, starts=node.open):
            return False
        self._unscored.add(node)
        return True

    def take(self, done: Done) -> bool:
        """See `PathPolicy`."""
        if not (isinstance(done, Generated) and isinstance(done.work.tag, RunningProbe)):
            return False
        branch = done.work.tag.branch
        if (probe := self.read(done)) is None:
            return True
        branch.node.probe = probe
        self._meter.probe_tokens += probe.tokens
        self._meter.generated_tokens += probe.tokens
        self._meter.generator_tree_tokens += probe.tokens
        self._meter.generator_unshared_tokens += probe.tokens
        if branch.node in self._unscored:
            self._unscored.remove(branch.node)
            self.tree.score(branch)
        if expansion := self._held.pop(branch.node, None):
            if self._thoughts and (closing := self._thoughts.once_probed(branch.node)):
                self.tree.write(branch, closing)
            self.tree.resume(expansion)
        return True

    def close(self) -> None:
        """See `PathPolicy`."""
        for sequence in self._running.values():
            self._engine.release(sequence)
        self._running.clear()

    def _probed_now(self, branch: Branch, starts: bool) -> bool:
        """Return whether a node is being probed; where it `starts` that, from now on, if it is due."""
        node = branch.node
        if any(probe.branch is branch for probe in self._running):
            return True
        left = self._budget.generator_left(node) if self._budget else UNLIMITED
        inside = self._thoughts is not None and self._thoughts.position(node).inside
        opening = self.opening(node, inside, left) if starts else ()
        if not opening:
            return False
        assert branch.sequence is not None, "the node's generator sequence was released"
        self.start(branch, branch.sequence, opening)
        return True

    def opening(self, node: Node, inside: bool, left: int) -> tuple[int, ...]:
        """The tokens that open the probe of a node; empty if it is not to be probed.

        Args:
            node: the node, whose probe does not run.
            inside: whether its path is in a thought.
            left: tokens that the path has left of a budget.
        """
        plan = self._plan
        if node.probe or node.parent is None:
            return ()
        tokens = node.path_tokens()
        if tokens // plan.every == node.parent.path_tokens() // plan.every:
            return ()
        if inside:
            opening = plan.in_thought
        elif any(step.thought_chars or step.written.text for step in node.lineage()):
            return ()  # it has thought, and answers now
        else:
            opening = plan.behind_paragraph if node.text.endswith(PARAGRAPH) else plan.in_text
        room = min(plan.context - self._prompt_tokens - tokens, left - 1)  # a token is left for the path itself
        return opening if room >= len(opening) + PROBE_ANSWER_TOKENS else ()

    def start(self, branch: Branch, path: KVSequence, opening: tuple[int, ...]) -> None:
        """Probe a node's path, of which no work may run, behind the tokens `opening`."""
        probe = RunningProbe(branch, len(opening), matcher=self._matcher)
        (self._running[probe],) = self._engine.fork(path, 1)
        self._engine.append(self._running[probe], opening)
        self._sample(probe)

    def read(self, done: Generated) -> Probe | None:
        """Read finished work of a probe; None if its answer goes on, as it does behind an inner brace."""
        probe: RunningProbe = done.work.tag
        probe.text += done.text
        probe.log_probabilities += done.log_probabilities
        answer, probe.matcher = self._read(probe.text), done.matcher
        if answer is None and done.cause is StopCause.MARK and len(probe.log_probabilities) < PROBE_ANSWER_TOKENS:
            self._sample(probe)
            return None
        self._engine.release(self._running.pop(probe))
        sampled = len(probe.log_probabilities)
        certainty = math.exp(math.fsum(probe.log_probabilities) / sampled) if answer else 0.0
        return Probe(answer or "", certainty, probe.opening + sampled)

    def _sample(self, probe: RunningProbe) -> None:
        left = PROBE_ANSWER_TOKENS - len(probe.log_probabilities)
        how = {"delimiter": "", "marks": _AT_BRACE, "in_place": True, "matcher": probe.matcher, "tag": probe}
        self._engine.submit(Generate(self._owner, self._running[probe], (self._sampling,), left, **how))


LAST = 3
"""Probes of a path that are compared."""
UNKNOWN = 0.5
"""Score of a step before the first probe of its path."""


class ProbeScorer(Scorer):
    """Scores steps by the probes of their paths, which the search makes for it; see the module."""

    name = "probe"
    needs = ScorerNeeds(reads="probes", merges="tokens")

    def begin(self, search: ScoredSearch) -> ScoreSession:
        """See `Scorer`."""
        return _ProbeSession()


class _ProbeSession(ScoreSession):
    def _want(self, node: StepNode, in_place: bool) -> Iterable[StepScore]:  # probed already, if it is to be
        assert isinstance(node, Node), "probes are of a search's own nodes"
        return (StepScore(node, probe_score(node.probes())),)


def probe_score(probes: list[Probe]) -> float:
    """Return the score of a path with these probes, the last one first."""
    if not probes:
        return UNKNOWN
    last, compared = probes[0], probes[:LAST]
    alike = sum(exact_match_key(probe.answer) == exact_match_key(last.answer) for probe in compared)
    return last.certainty * alike / len(compared)
