"""The paths of a result that a client is shown as the answer's text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from espalier.search.conversation import ToolCall
from espalier.search.result import Candidate, NodeRecord, SearchResult, content_of, thought_of
from espalier.search.tree import path_to


@dataclass(frozen=True, slots=True)
class Shown:
    """The path that is shown for a search.

    Attributes:
        steps: its texts without its thought.
        finish_reason: `stop` if the path is complete, `length` if a limit cut it.
        thought: what the model thought, empty if it did not.
        thought_tokens: number of tokens sampled for its thought.
        calls: of tools, in none of its texts.
    """

    steps: tuple[str, ...]
    finish_reason: str
    thought: str = ""
    thought_tokens: int = 0
    calls: tuple[ToolCall, ...] = ()

    def stopped(self, stop: Sequence[str], include_stop: bool) -> "Shown":
        """The path up to the first of the texts `stop` that is in it, which may lie across steps."""
        text = "".join(self.steps)
        ends = [(at, at + len(each) * include_stop) for each in stop if (at := text.find(each)) >= 0]
        if not ends:
            return self
        left, steps = min(ends)[1], list[str]()
        for step in self.steps:
            steps.append(step[:left])
            left -= len(steps[-1])
        return replace(self, steps=tuple(filter(None, steps)), finish_reason="stop")


def shown(result: SearchResult) -> Shown:
    """Return the path to show: the selected one.

    Where no path has an answer, it is the best complete one; where none is complete, the one that came furthest. An
    answer that was read by a probe stands in a box behind its path.
    """
    return shown_paths(result, 1)[0]


def shown_paths(result: SearchResult, count: int) -> list[Shown]:
    """Return the path to show first, then complete paths by their scores, `count` at most."""
    candidates, probed = candidates_shown(result, count), result.probed
    if candidates and not probed:
        return [Shown(each.content_steps, "stop", each.thought, each.thought_tokens, each.calls) for each in candidates]
    furthest = max(result.nodes, key=lambda node: (len(node.path), _score(node)), default=None)
    nodes = {node.node_id: node for node in result.nodes}
    path = path_to(nodes, probed.node_id if probed else furthest.node_id if furthest else None)
    thinking = sum(step.tokens for step in path if step.thought_chars)
    answer = (f"\\boxed{{{probed.answer}}}",) if probed else ()
    steps, plan, calls = content_of(path), result.configuration.call_plan, tuple[ToolCall, ...]()
    if plan:
        content, calls = plan.split(text := "".join(steps), cut=True)
        steps = steps if content == text else (content.strip(),)
    return [Shown((*steps, *answer), "length", thought_of(path), thinking, calls)]


def candidates_shown(result: SearchResult, count: int) -> list[Candidate]:
    """Return the selected candidate, or else the best complete one, and then the others by their scores."""
    best = result.best or max(result.candidates, key=_score, default=None)
    if best is None:
        return []
    others = (each for each in result.candidates if each.node_id != best.node_id)
    return [best, *sorted(others, key=_score, reverse=True)][:count]


def _score(scored: Candidate | NodeRecord) -> float:
    return -1.0 if scored.score is None else scored.score
