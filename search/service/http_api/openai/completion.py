"""Results of searches as chat completions: whole, or in chunks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from espalier.search.result import (
    Candidate,
    Event,
    Finished,
    NodeRecord,
    SearchResult,
    Started,
    StepDone,
    content_of,
    thought_of,
)
from espalier.search.service.http_api.openai.chat_request import ChatCall
from espalier.search.tree import path_to


@dataclass(frozen=True, slots=True)
class Shown:
    """The path that is shown for a search.

    Attributes:
        steps: its texts without its thought.
        tokens: number of tokens sampled for it.
        finish_reason: `stop` if the path is complete, `length` if a limit cut it.
        thought: what the model thought, empty if it did not.
        thought_tokens: number of tokens sampled for its thought.
    """

    steps: tuple[str, ...]
    tokens: int
    finish_reason: str
    thought: str = ""
    thought_tokens: int = 0

    @property
    def reasoning(self) -> dict[str, str]:
        """The thought as a field of a message or a delta, by both names that clients know; empty without one."""
        return {"reasoning_content": self.thought, "reasoning": self.thought} if self.thought else {}

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
    nodes = {node.node_id: node for node in result.nodes}
    if probed or not candidates:
        furthest = max(result.nodes, key=lambda node: (len(node.path), _score(node)), default=None)
        path = path_to(nodes, probed.node_id if probed else furthest.node_id if furthest else None)
        thinking = sum(step.tokens for step in path if step.thought_chars)
        answer = (f"\\boxed{{{probed.answer}}}",) if probed else ()
        return [Shown((*content_of(path), *answer), _tokens(path), "length", thought_of(path), thinking)]
    return [
        Shown(content_of(c.steps), _tokens(path_to(nodes, c.node_id)), "stop", c.thought, c.thought_tokens)
        for c in candidates
    ]


def _tokens(path: list[NodeRecord]) -> int:
    return sum(step.tokens for step in path)


def candidates_shown(result: SearchResult, count: int) -> list[Candidate]:
    """Return the selected candidate, or else the best complete one, and then the others by their scores."""
    best = result.best or max(result.candidates, key=_score, default=None)
    if best is None:
        return []
    others = (each for each in result.candidates if each.node_id != best.node_id)
    return [best, *sorted(others, key=_score, reverse=True)][:count]


def progress_line(event: StepDone) -> str:
    """One line about a round, for people."""
    scores = [node.score for node in event.kept if node.score is not None]
    scores += [event.best.score] if event.best and event.best.score is not None else []
    best = f", best score {max(scores):.2f}" if scores else ""
    return f"Depth {event.depth}: {event.scored} candidates{best}.\n"


@dataclass(frozen=True, slots=True)
class Completion:
    """One chat completion.

    Attributes:
        search_id: the server's name for the search.
        call: what was asked for.
        created: when it began, in seconds since 1970.
    """

    search_id: str
    call: ChatCall
    created: int

    def whole(self, result: SearchResult) -> dict[str, Any]:
        """The completion of a search that has ended."""
        paths = self._paths(result)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(path.steps), **path.reasoning, "refusal": None},
                "logprobs": None,
                "finish_reason": path.finish_reason,
            }
            for index, path in enumerate(paths)
        ]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage_of(result, paths),
            "espalier": espalier_of(result, self.call.choices),
            **({"metadata": metadata_of(result)} if self.call.metadata else {}),
        }

    def _paths(self, result: SearchResult) -> list[Shown]:
        its = self.call
        return [path.stopped(its.stop, its.include_stop) for path in shown_paths(result, its.choices)]

    def events(self, event: Event) -> list[dict[str, Any]]:
        """The chunks of an event. Nothing but the selected path is ever content, as it could not be taken back."""
        match event:
            case Started():
                return [self._chunk({"role": "assistant", "content": ""})]
            case StepDone():
                return [self._chunk({}, espalier={"progress": progress_line(event)})]
            case Finished():
                return self.last_chunks(event.result)
            case _:
                return []

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, index: int = 0, **more: Any
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.call.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage, **more}

    def last_chunks(self, result: SearchResult) -> list[dict[str, Any]]:
        """The chunks of a search that has ended: the selected path, how it ended, and the usage if wanted."""
        paths = self._paths(result)
        chunks: list[dict[str, Any]] = []
        for index, path in enumerate(paths):
            if index:
                chunks.append(self._chunk({"role": "assistant", "content": ""}, index=index))
            if path.thought:
                chunks.append(self._chunk(dict(path.reasoning), index=index))
            chunks += [self._chunk({"content": step}, index=index) for step in path.steps]
            own = {} if index else {"espalier": espalier_of(result, self.call.choices)}
            chunks.append(self._chunk({}, path.finish_reason, index, **own))
        if self.call.include_usage:
            chunks.append({**self._head("chat.completion.chunk"), "choices": [], "usage": usage_of(result, paths)})
        return chunks

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.search_id}", "object": kind, "created": self.created, "model": self.call.model}


def usage_of(result: SearchResult, paths: Sequence[Shown]) -> dict[str, Any]:
    """Tokens as the OpenAI API counts them: all that is sampled is completion, and shown thoughts are reasoning."""
    usage = result.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated_tokens,
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
        "completion_tokens_details": {"reasoning_tokens": sum(path.thought_tokens for path in paths)},
    }


def espalier_of(result: SearchResult, choices: int) -> dict[str, Any]:
    """Fields of a result that the OpenAI API has no place for, without the texts of the conversation."""
    configuration = result.configuration.to_dict()
    del configuration["problem"], configuration["history"]
    return {
        "search_id": result.search_id,
        "answer": result.answer,
        "score": result.score,
        "stop_reason": result.stop_reason,
        "probed": result.probed and asdict(result.probed),
        "candidates": len(result.candidates),
        "choices": [
            {"answer": each.answer, "score": each.score, "multiplicity": each.multiplicity}
            for each in candidates_shown(result, choices)
        ],
        "warnings": result.warnings,
        "usage": asdict(result.usage),
        "configuration": configuration,
    }


def metadata_of(result: SearchResult) -> dict[str, Any]:
    """All sampled candidates by the names that clients of its_hub read, the selected one first."""
    shown = candidates_shown(result, len(result.candidates))
    candidates = [candidate for candidate in shown for _ in range(candidate.multiplicity)]
    return {
        "algorithm": result.configuration.algorithm,
        "all_responses": [{"role": "assistant", "content": candidate.text} for candidate in candidates],
        "response_counts": Counter(candidate.answer for candidate in candidates),
        "selected_index": 0 if candidates else None,
    }


def _score(scored: Candidate | NodeRecord) -> float:
    return -1.0 if scored.score is None else scored.score
