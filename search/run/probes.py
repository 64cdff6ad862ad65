r"""Answer probes: on a fork of a path's sequence the host opens a box, and reads what the model writes into it.

The path's own sequence stays as it is, so the path goes on to the bit as if nobody had asked. Probes take the likeliest
tokens under the penalties of the path, and draw nothing; the engine batches them with all other work.
"""

import math
from dataclasses import dataclass, field

from espalier.engine.engine import Engine
from espalier.engine.guidance.matcher import Matcher
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.work import Generate, Generated, Sampling, StepMarks, StopCause
from espalier.search.form import read_form
from espalier.search.grading.boxes import content_before_brace
from espalier.search.run.executor import ResolvedRequest, penalties_of
from espalier.search.step_rule import PARAGRAPH
from espalier.search.thoughts.probing import ANSWER_TOKENS
from espalier.search.tree import Node, Probe

_AT_BRACE = StepMarks(end_text="}")


@dataclass(slots=True, eq=False)
class RunningProbe:
    """A probe that is being sampled: the purpose of its work.

    Attributes:
        node: the node at whose end it reads.
        opening: number of tokens that the host wrote.
        text: what the model has written so far.
        log_probabilities: of its tokens.
        matcher: what it may write next; None for anything.
    """

    node: Node
    opening: int
    text: str = ""
    log_probabilities: list[float] = field(default_factory=list)
    matcher: Matcher | None = None


class AnswerProbes:
    """The probes of one search that are being sampled; owns their sequences."""

    def __init__(self, engine: Engine, owner: str, resolved: ResolvedRequest, matcher: Matcher | None = None) -> None:
        """Probe for `owner`; `matcher` says what may stand in a box, up to its closing brace."""
        self._engine = engine
        self._matcher = matcher
        form = resolved.request.answer_form
        self._read = read_form(form).content_before_brace if form else content_before_brace
        self._owner = owner
        self._plan = resolved.probes
        self._prompt_tokens = resolved.generator_limits.prompt_tokens
        self._sampling = Sampling(0.0, penalties=penalties_of(resolved.request, self._prompt_tokens))
        self._sequences: dict[RunningProbe, KVSequence] = {}

    @property
    def sequences(self) -> list[KVSequence]:
        """The sequences that they hold."""
        return list(self._sequences.values())

    def opening(self, node: Node, inside: bool, left: int) -> tuple[int, ...]:
        """The tokens that open the probe of a node; empty if it is not to be probed.

        Args:
            node: the node, whose probe does not run.
            inside: whether its path is in a thought.
            left: tokens that the path has left of a budget.
        """
        plan = self._plan
        if plan is None or node.probe or node.parent is None:
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
        return opening if room >= len(opening) + ANSWER_TOKENS else ()

    def start(self, node: Node, path: KVSequence, opening: tuple[int, ...]) -> None:
        """Probe a node's path, of which no work may run, behind the tokens `opening`."""
        probe = RunningProbe(node, len(opening), matcher=self._matcher)
        (self._sequences[probe],) = self._engine.fork(path, 1)
        self._engine.append(self._sequences[probe], opening)
        self._sample(probe)

    def runs(self, node: Node) -> bool:
        """Return whether a node is being probed."""
        return any(probe.node is node for probe in self._sequences)

    def take(self, done: Generated) -> Probe | None:
        """Process finished work of a probe; None if its answer goes on, as it does behind an inner brace."""
        probe: RunningProbe = done.work.tag
        probe.text += done.text
        probe.log_probabilities += done.log_probabilities
        answer, probe.matcher = self._read(probe.text), done.matcher
        if answer is None and done.cause is StopCause.MARK and len(probe.log_probabilities) < ANSWER_TOKENS:
            self._sample(probe)
            return None
        self._engine.release(self._sequences.pop(probe))
        sampled = len(probe.log_probabilities)
        certainty = math.exp(math.fsum(probe.log_probabilities) / sampled) if answer else 0.0
        return Probe(answer or "", certainty, probe.opening + sampled)

    def close(self) -> None:
        """Release the sequences; the owner's work must have been cancelled."""
        for sequence in self._sequences.values():
            self._engine.release(sequence)
        self._sequences.clear()

    def _sample(self, probe: RunningProbe) -> None:
        left = ANSWER_TOKENS - len(probe.log_probabilities)
        how = {"delimiter": "", "marks": _AT_BRACE, "in_place": True, "matcher": probe.matcher, "tag": probe}
        self._engine.submit(Generate(self._owner, self._sequences[probe], (self._sampling,), left, **how))
